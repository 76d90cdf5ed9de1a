"""The exact cache equals complete passes; under a policy, what a step may decide and which entries it may not use."""

from dataclasses import dataclass

import pytest
import torch
from asked import WORDS as PROMPTS

import sinklens
from sinklens.sampling import DualCache, History, Policy
from sinklens.sampling.key_cache import KeyCache

ANSWER = {"gen_length": 12, "block_length": 6, "steps": 8, "sampler": "llada"}


def test_a_position_is_proposed_only_if_the_one_that_predicts_it_is_computed(worded):
    """Logits predict the next position. The first block keeps its last three masks, and the last of them is computed in
    the second block's steps, but only to predict the block's first position."""
    proposed, last = {}, 6 + 6 - 1  # the prompt has six columns

    def postpone(value, hook):
        proposed[hook.step] = value > -torch.inf
        if hook.step < 4:
            value[:, 9:12] = value[:, 9:12].clamp(max=-1.0)  # the least confident, but not excluded

    run = sinklens.generate(
        worded("dream"), PROMPTS, cache=DualCache(), by_quota=False, threshold=1.0,
        hooks=[("denoise.hook_confidence", postpone)], **ANSWER,
    )  # fmt: skip
    for_successor = 0
    for step in range(run.steps_run):
        computed = torch.from_numpy(run.sinks["fresh"].to_numpy()[:, step]).any(dim=1)
        predicted = torch.nn.functional.pad(computed[:, :-1], (1, 0))
        assert not (proposed[step] & ~(computed & predicted)).any()
        for_successor += int((computed & ~predicted & run.undecided[:, step])[:, last].sum())
    assert for_successor >= 2


@dataclass(frozen=True)
class FirstLayerOnce(Policy):
    """The block fresh; in step 6 the first layer everywhere too."""

    def plan(self, history: History) -> torch.Tensor:
        plan = history.in_block.expand_as(history.age).clone()
        if history.step in (0, 6):
            plan[:, : None if history.step == 0 else 1] = True
        return plan


def test_a_replaced_token_is_computed_in_every_layer_whichever_layers_had_computed_it(worded):
    """The first block's last position is decided in step 5 and computed in one layer; later a replay replaces it."""
    settings = {"gen_length": 12, "block_length": 6, "cache": FirstLayerOnce()}
    base = sinklens.generate(worded("llama"), PROMPTS, **settings)
    canvas, row = base.canvas.clone(), 0
    position = int((base.unmask_step[row] == 5).nonzero()[0, 0])
    canvas[row, 8:, position] = canvas[row, 8, position] % 7 + 1
    run = sinklens.generate(worded("llama"), PROMPTS, replay=canvas, **settings)
    fresh = run.sinks["fresh"].isel(batch=row, pos=position).to_numpy()
    assert canvas[row, 8, position] != base.canvas[row, 8, position]
    assert fresh[5:10].tolist() == [[True] * 3, [True, False, False], [False] * 3, [True] * 3, [False] * 3]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "point"), [("llama", "hook_k"), ("qwen3", "hook_k"), ("llama", "hook_v")])
def test_an_edited_fresh_entry_is_cached_as_edited_and_the_plan_stays(worded, architecture, point):
    """Read in the last layer, so that an edit in step 0 and the same edit of the stale entry in step 1 agree."""
    model, name, kept, seen = worded(architecture), f"blocks.2.attn.{point}", {}, {}
    base = sinklens.generate(model, PROMPTS, cache=DualCache(), **ANSWER)

    def edit(value, hook):
        if hook.step == 0:
            value[:, 4] += 1.0
            kept["edited"] = value[:, 4].clone()

    def replace(value, hook):
        if hook.step == 1:
            value[:, 4] = kept["edited"]

    watch = [
        (f"blocks.2.attn.{end}", lambda value, hook: seen.setdefault(hook.step, []).append(value.clone()))
        for end in ("hook_k", "hook_v", "hook_z")
    ]
    for change in (edit, replace):
        hooks = [(name, change), *watch]
        run = sinklens.generate(model, PROMPTS, cache=DualCache(), replay=base, hooks=hooks, **ANSWER)
        fresh = run.sinks["fresh"].to_numpy()
        assert (fresh[:, :2] == base.sinks["fresh"].to_numpy()[:, :2]).all()
        assert change is replace or (fresh == base.sinks["fresh"].to_numpy()).all()
    for one, other in zip(seen[1][:3], seen[1][3:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_exact_cache_computes_what_follows_the_finished_blocks(worded):
    """Blocks of four: a step keeps the columns before its block and computes them again only if their tokens change."""
    model = worded("sdar")
    text = torch.randint(3, model.cfg.d_vocab, (2, 16), generator=torch.Generator().manual_seed(0))
    nothing, cache, windows = torch.zeros_like(text, dtype=torch.bool), KeyCache(model.tree), []
    for start, edited, rows in ((4, None, None), (8, 5, None), (8, 9, None), (12, 2, [0, 1]), (12, None, [1])):
        if edited is not None:  # inside the last block, inside the current one, in a finished one
            text[:, edited] = (text[:, edited] + 1) % model.cfg.d_vocab
        cache.plan(text, nothing, nothing, slice(start, start + 4))
        hidden = cache.hidden(text, ~nothing, None if rows is None else torch.tensor(rows))
        expected, first = model.tree.hidden(text[rows or [0, 1], : start + 4]), cache.window.start
        torch.testing.assert_close(hidden, expected[:, first:], atol=1e-5, rtol=1e-4)
        windows.append((first, cache.window.stop))
    assert windows == [(0, 8), (4, 12), (8, 12), (0, 16), (12, 16)]  # rows may leave
    cache.plan(text, nothing, nothing, slice(12, 16))
    cache.hidden(text, ~nothing, torch.tensor([0, 1]))
    assert cache.window == slice(0, 16)  # a row that returns empties it
