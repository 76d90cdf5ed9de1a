"""Positions that a step is made to renoise, on the tiny DiffusionGemma."""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import Renoise
from sinklens.sinks import TopK

SETTINGS: dict[str, Any] = {
    "gen_length": 16, "max_denoising_steps": 4, "entropy_bound": 1.5, "confidence_threshold": 0.0
}  # fmt: skip
PROMPTS = [list(range(3, 48, 5)), [60, 65, 70, 75]]  # the second has five positions of padding
STEPS, PROMPT, LENGTH, LAYERS, HEADS = 8, 9, 25, 6, 4
POINTS = ("hook_candidates", "hook_accepted", "hook_renoise")


@pytest.fixture(scope="module")
def gemma(conformance):
    return sinklens.load(conformance / "diffusion-gemma")


def run_with(gemma, *interventions, prompts=PROMPTS, seed=0):
    """A run, and what its sampler drew and would have accepted at each step: [step][point]."""
    seen = [{} for _ in range(STEPS)]
    keep = [
        (f"denoise.{name}", lambda value, hook, name=name: seen[hook.step].update({name: value.clone()}))
        for name in POINTS
    ]
    run = sinklens.generate(gemma, prompts, hooks=[*keep, *interventions], seed=seed, **SETTINGS)
    assert run.steps_run == STEPS
    return run, seen


def marked_at_random():
    marked = np.random.default_rng(4).random((2, STEPS, LAYERS, HEADS, LENGTH)) < 0.02
    marked[1, ..., :5] = False
    return marked


def strongest_two(score):
    """The two strongest keys of every head in one step, as a mask over positions: the union over layers and heads."""
    found = np.zeros((2, LENGTH), dtype=bool)
    for row, layer, head in np.ndindex(2, LAYERS, HEADS):
        found[row, np.argsort(-np.nan_to_num(score[row, layer, head], nan=-1.0), kind="stable")[:2]] = True
    return found


def places_of(form, run, step):
    """The chosen places of a step, [batch, pos], computed by hand."""
    found = np.zeros((2, LENGTH), dtype=bool)
    if form == "positions":
        found[:, [-16, -10, -3]] = step in (1, 5)
    elif form == "array":
        found = marked_at_random()[:, step].any(axis=(1, 2))
    elif form == "detector" and step > 0:
        found = strongest_two(run.sinks["score"].to_numpy()[:, step - 1])
    elif form == "state":
        found = ~run.undecided[:, step].numpy() & (np.arange(LENGTH) >= PROMPT)
    return found


FORMS = {
    "positions": {"positions": [-16, -10, -3], "steps": [1, 5]},
    "array": {"where": marked_at_random()},
    "detector": {"where": TopK(2)},
    "state": {"where": ["committed"]},
    "everywhere": {},
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_chosen_positions_get_the_noise_of_the_step(gemma, form):
    run, seen = run_with(gemma, Renoise(**FORMS[form]))
    changed = 0
    for step in (0, 1, 2, 4, 5, 6):  # the last step of a canvas leaves other tokens
        columns = slice(PROMPT, PROMPT + 8) if step < 4 else slice(PROMPT + 8, LENGTH)  # two canvases of four steps
        chosen = places_of(form, run, step)[:, columns] | (form == "everywhere")
        chosen = torch.from_numpy(chosen)
        own = seen[step]["hook_accepted"]
        accepted = own & ~chosen
        expected = torch.where(accepted, seen[step]["hook_candidates"], seen[step]["hook_renoise"])
        assert torch.equal(run.canvas[:, step + 1, columns], expected), step
        assert torch.equal(run.undecided[:, step + 1, columns], ~accepted), step
        changed += int((accepted != own).sum())
    assert changed > 0


def test_a_run_with_the_same_seed_differs_only_at_the_renoised_position(gemma):
    base = sinklens.generate(gemma, PROMPTS, **SETTINGS)
    taken = ~base.undecided[:, 2:4, PROMPT : PROMPT + 8].numpy().any(axis=1)
    assert taken.any(axis=1).all()
    where = np.zeros((2, 1, 1, 1, LENGTH), dtype=bool)
    where[[0, 1], 0, 0, 0, PROMPT + taken.argmax(axis=1)] = True
    run, _ = run_with(gemma, Renoise(where=xr.DataArray(where[:, 0, 0, 0], dims=("batch", "pos")), steps=[2]))
    assert torch.equal(run.canvas[:, :3], base.canvas[:, :3])
    np.testing.assert_array_equal((run.undecided != base.undecided)[:, 3], where[:, 0, 0, 0])
    assert not bool((run.canvas != base.canvas)[:, 3][~torch.from_numpy(where[:, 0, 0, 0])].any())
    was_decided = where[:, 0, 0, 0] & base.sinks.decided.to_numpy()[:, 2]
    assert was_decided.any()
    assert bool(run.sinks.renoised.to_numpy()[:, 3][was_decided].all())


def test_a_row_alone_is_renoised_as_in_its_batch(gemma):
    together, _ = run_with(gemma, Renoise(where=TopK(1)))
    for row, prompt in enumerate(PROMPTS):
        alone, _ = run_with(gemma, Renoise(where=TopK(1)), prompts=[prompt])
        padding = PROMPT - len(prompt)
        assert torch.equal(alone.canvas[0], together.canvas[row, :, padding:])
        assert torch.equal(alone.undecided[0], together.undecided[row, :, padding:])


OTHERS = r"Renoise changes which tokens a step accepts .* With a mask token, use Remask or ForceTokens"
REFUSED = [
    *(
        (
            lambda gemma, worded, given=given: sinklens.generate(
                gemma, PROMPTS, hooks=given[0](**given[1]), **SETTINGS
            ),
            text,
        )
        for given, text in (
            ((Renoise, {"positions": [2]}), r"takes positions of the answer, 9 to 24 or -16 to -1; got \[2\]"),
            ((Renoise, {"positions": [25]}), r"position 25 does not exist; there are 25"),
            ((Renoise, {"steps": [8]}), r"step 8 does not exist; there are 8"),
            ((Renoise, {"positions": []}), r"positions is empty, so Renoise would change nothing"),
            ((Renoise, {"layers": [0]}), r"Renoise does not support layers="),
        )
    ),
    (lambda gemma, worded: sinklens.generate(worded("llama"), "one two", hooks=Renoise(), gen_length=4), OTHERS),
    (lambda gemma, worded: Renoise().hooks_for(gemma), OTHERS),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_places_and_models_without_a_meaning_are_refused(gemma, worded, call, text):
    with pytest.raises(SettingError, match=text):
        call(gemma, worded)
