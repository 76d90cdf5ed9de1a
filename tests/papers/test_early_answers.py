"""The numbers of docs/papers/early-answers.md, prompt by prompt, against weights, sampler and judge in plain torch."""

import re

import numpy as np
import pytest
import torch
from by_hand import MASK, Network

import sinklens
from sinklens.experiments import answer_emergence, guesses, step_predictions
from sinklens.tasks import held_out, read_answer

PROBLEMS = [held_out(9)[number] for number in (1, 2, 4, 8)]  # those whose verdicts and exits differ by step


def right(row, text):
    return read_answer(text) == PROBLEMS[row].result


def correct(text, problem):
    """A second judge: the number that follows the first four hashes."""
    return bool(re.match(rf"{problem.result}(?!\d)", text.partition("####")[2].lstrip()))


def by_hand(network, problem):
    """Of one prompt, by step: predictions, whether the guess is right, whether what is decided is; and the answer."""
    prompt = network.encode(problem.prompt)
    run = network.decode(prompt)
    found = {name: [] for name in ("token", "probability", "gap", "entropy", "right", "spelled")}
    for step, (canvas, one) in enumerate(zip(run.canvases, run.passes, strict=True)):
        probs = one.logits.softmax(-1)
        best = probs.topk(2)
        masked, gap = canvas == MASK, best.values[:, 0] - best.values[:, 1]
        guess = network.text(torch.where(masked, best.indices[:, 0], canvas)[len(prompt) :])
        values = (
            best.indices[:, 0], best.values[:, 0], gap, -torch.xlogy(probs, probs).sum(-1), correct(guess, problem),
            correct(network.text(canvas[len(prompt) :]), problem),
        )  # fmt: skip
        for kept, value in zip(found.values(), values, strict=True):
            kept.append(torch.as_tensor(value))
    return {name: torch.stack(parts).numpy() for name, parts in found.items()}, network.text(run.tokens[len(prompt) :])


@pytest.fixture(scope="module", params=["tiny-llada", "tiny-dream"])
def both(request):
    """A run of sinklens and its predictions, and the same by hand."""
    run = sinklens.generate(sinklens.load(request.param), [problem.prompt for problem in PROBLEMS])
    network = Network(request.param)
    return run, step_predictions(run), [by_hand(network, problem) for problem in PROBLEMS]


def test_predictions_and_their_certainty_are_those_of_the_weights(both):
    run, found, hand = both
    for row, (values, text) in enumerate(hand):
        own = found.isel(batch=row, pos=slice(-values["token"].shape[1], None))
        assert run.text[row] == text
        for name in ("probability", "gap", "entropy"):
            np.testing.assert_allclose(own[name], values[name], atol=2e-5)
        answered = (own["masked"] | own["answer"]).transpose("step", "pos").to_numpy()
        assert answered.sum() == 24 * 24
        assert (own["token"].to_numpy() == values["token"])[answered].all()


def test_every_guess_is_judged_as_by_hand(both):
    run, found, hand = both
    known = answer_emergence(run, found, right)
    decided = found.assign(token=found["token"] * 0 + run.model.mask_token_id)
    spelled = np.array([[right(row, text) for text in texts] for row, texts in enumerate(guesses(run, decided))])
    by_step = np.array([values["right"] for values, _ in hand])
    np.testing.assert_array_equal(known["right"], by_step)
    np.testing.assert_array_equal(spelled, [values["spelled"] for values, _ in hand])
    final = [correct(text, problem) for (_, text), problem in zip(hand, PROBLEMS, strict=True)]
    np.testing.assert_array_equal(known["final"], final)
    np.testing.assert_allclose(known["first"], [line.argmax() / 24 if line.any() else np.nan for line in by_step])
    if run.model.name.endswith("tiny-llada"):  # a step earlier or later, other verdicts would come out
        assert 0 < by_step.mean() < 1
        assert (by_step[:, 1:] != by_step[:, :-1]).any()
