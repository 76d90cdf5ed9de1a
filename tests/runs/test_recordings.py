"""Runs made elsewhere: over their canvases, a model has the same values at all points."""

import pytest
import torch
from watching import PADDED, short

import sinklens
from sinklens.errors import SettingError
from sinklens.runs import from_history, replay

EVERY = lambda name: not name.endswith(("hook_fresh", "hook_expert_indices"))  # noqa: E731


def collected(run):
    """A run made by `run(hooks)`, and copies of all values that pass its points, by step and point."""
    values = {}

    def keep(value, hook):
        values.setdefault((hook.step, hook.name), []).append(value.clone())

    return run([(EVERY, keep)]), values


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("architecture", "causal", "settings"),
    [
        ("llama", False, {"gen_length": 8, "steps": 4, "block_length": 4}),
        ("dream", False, {"gen_length": 6, "steps": 5}),
        ("sdar", False, {}),
        ("llama", True, {}),
        ("qwen3_moe", False, {}),
    ],
)
def test_a_replayed_run_has_identical_values_at_every_point(worded, architecture, causal, settings):
    model, options = worded(architecture, causal), short(worded(architecture, causal), settings)
    run, values = collected(lambda hooks: sinklens.generate(model, PADDED[1:], hooks=hooks, **options))
    prompt = run.canvas[:, 0, : run.prompt_length][run.real[:, : run.prompt_length]].tolist()
    history, mask = run.canvas[:, :, run.real[0]].unbind(1), -1 if causal else model.mask_token_id
    (recorded,) = from_history(history, [prompt], mask)
    again, repeated = collected(lambda hooks: replay(model, recorded, hooks=hooks, **options))
    assert torch.equal(again.canvas, run.canvas)
    assert torch.equal(again.undecided, run.undecided)
    assert values.keys() == repeated.keys()
    for place, found in values.items():
        assert len(found) == len(repeated[place])
        for one, other in zip(found, repeated[place], strict=True):
            assert torch.equal(one, other), place
    assert len({name for _, name in values}) > 30


@pytest.mark.usefixtures("unchecked")
def test_the_history_of_other_libraries_is_read_with_either_padding(worded):
    """Dream's history lacks the first canvas and is padded on the left; dLLM's has it and is padded on the right."""
    model, prompts = worded(), [[5, 6, 7], [8, 9, 10, 11, 12]]
    run = sinklens.generate(model, prompts, gen_length=4, steps=4, record_sinks=False)
    left = list(run.canvas.unbind(1))
    right = [
        torch.stack([torch.cat([row[real], row[~real]]) for row, real in zip(one, run.real, strict=True)])
        for one in left
    ]
    for history, side in ((left[1:], "left"), (right, "right")):
        found = from_history(history, prompts, model.mask_token_id, padding_side=side)
        for one, canvas, undecided, real in zip(found, run.canvas, run.undecided, run.real, strict=True):
            assert torch.equal(one.canvas, canvas[:, real])
            assert torch.equal(one.undecided, undecided[:, real])
            again = replay(model, one, record_sinks=False, progress=False)
            assert torch.equal(again.canvas[0], one.canvas)
    with pytest.raises(SettingError, match="every canvas must begin with its prompt"):
        from_history(right, [[5, 6, 8], prompts[1]], model.mask_token_id, padding_side="right")
    with pytest.raises(SettingError, match=r"history must hold canvases \[batch, pos\] of 2 prompts; got 0 canvases"):
        from_history([], prompts, 60)
    with pytest.raises(SettingError, match=r"the recorded run has 7 positions, 4 of them after the prompt, and this"):
        replay(model, from_history(left, prompts, model.mask_token_id)[0], gen_length=16, steps=4)
