"""The numbers of docs/papers/first-step-keys.md, prompt by prompt, against blocks decoded in plain torch."""

import numpy as np
import pytest
import torch
from by_hand import MASK, Network

import sinklens
from sinklens.tasks import held_out
from sinklens.tasks.word_problems import PROBLEM_KINDS

KIND = sorted(PROBLEM_KINDS)[0]
PROBLEMS = [problem for problem in held_out() if problem.kind == KIND][:2]  # two of one template
FIXED = ("first step", "step before", "block before", "another prompt", "last keys")  # all but the random ones


class Blocks:
    """A prompt decoded by hand in blocks of 8, one token per step."""

    def __init__(self, network, prompt):
        self.network, self.prompt = network, network.encode(prompt)
        self.run = network.decode(self.prompt, block=None if network.block else 8)
        origin = 0 if network.block else len(self.prompt)
        open_at = [int((canvas == MASK).nonzero()[0]) for canvas in self.run.canvases]
        self.starts = [origin + (place - origin) // 8 * 8 for place in open_at]
        steps = zip(self.run.passes, self.starts, strict=True)
        self.scores = [one.pattern[:, :, start : start + 8].sum(2) for one, start in steps]

    def first_of(self, start):
        """The first step of a block."""
        return self.starts.index(start)

    def guesses(self, step, twin):
        """Eight keys per head before the block, by guess, [layer, head, 8]; None at a block's first step and in the
        first block."""
        start = self.starts[step]
        first = self.first_of(start)
        if first == 0 or step == first:
            return None
        begins = sorted(set(twin.starts))
        there = begins[min(sorted(set(self.starts)).index(start), len(begins) - 1)]
        shared = min(start, there)  # counted back from the block, as far as both texts reach
        other = twin.scores[twin.first_of(there)][..., there - shared : there].topk(8).indices + start - shared
        return {
            "first step": self.top(first, start),
            "step before": self.top(step - 1, start),
            "block before": self.top(self.first_of(self.starts[first - 1]), start),
            "another prompt": other,
            "last keys": torch.arange(start - 8, start).expand(other.shape),
        }

    def top(self, step, start):
        """The eight keys before a block that most attention of a step goes to."""
        return self.scores[step][..., :start].topk(8).indices

    def answer(self):
        """The answer."""
        return self.network.text(self.run.tokens[len(self.prompt) :][:24])

    def shares(self, twin):
        """Recall and share of the attention, in percent, by guess."""
        found = {name: [] for name in FIXED}
        for step, score in enumerate(self.scores):
            guesses = self.guesses(step, twin)
            if guesses is None:
                continue
            own = self.top(step, self.starts[step])
            for name, keys in guesses.items():
                same = (keys[..., None] == own[..., None, :]).any(-1).sum(-1) / 8
                share = score.gather(-1, keys).sum(-1) / score.gather(-1, own).sum(-1)
                found[name].append((100 * float(same.mean()), 100 * float(share.mean())))
        return {name: np.mean(parts, axis=0) for name, parts in found.items()}


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada"])
def test_recall_and_attention_are_those_of_the_weights(name, script):
    module, model, network = script("first_step_keys"), sinklens.load(name), Network(name)
    settings = module.SETTINGS[name]
    hand = [Blocks(network, problem.prompt) for problem in PROBLEMS]
    runs = [module.block_scores(model, problem.prompt, settings) for problem in PROBLEMS]
    for number, (own, twin) in enumerate([hand, hand[::-1]]):
        run, scores = runs[number]
        assert run.text == own.answer()
        for step, score in enumerate(own.scores):
            np.testing.assert_allclose(scores[step, ..., : score.shape[-1]], score, atol=2e-5)
        found, _ = module.of_prompt(runs, number)
        expected = own.shares(twin)
        for guess in FIXED:
            np.testing.assert_allclose(found[guess], expected[guess], rtol=2e-5)
