"""Duo, GIDD and MDLM under ψ samplers: noise levels, batches and refusals, beside the stored runs."""

from typing import Any

import pytest
import torch
from stored.runs import open_folder, stored_runs
from torch import Tensor

import sinklens
from sinklens.errors import SettingError
from sinklens.interventions import ForceTokens, MaskSinks, Remask


def test_each_row_is_corrected_as_often_as_the_references(conformance):
    folder = open_folder(conformance / "gidd")
    runs = [run for run in stored_runs(folder) if "corrections_per_row" in folder.runs[run.number]]
    assert len(runs) == 2
    for stored in runs:
        counts = folder.runs[stored.number]["corrections_per_row"]
        assert folder.repeat(stored).active.sum(dim=1).tolist() == counts


def test_the_network_reads_the_stored_noise_levels(conformance):
    for name, number, level in (("duo", 5, "sigma"), ("gidd", 0, "t")):
        seen: list[Tensor] = []
        folder = open_folder(conformance / name)
        stored = next(run for run in stored_runs(folder) if run.number == number)
        expected = folder.tensors[f"gen{number}.{level}"]
        keep = ("hook_time", lambda value, hook, seen=seen: seen.append(value.clone()))
        run = folder.repeat(stored, record_sinks=False, hooks=[keep])
        assert torch.equal(torch.stack(seen), expected[:, None].expand(-1, len(run.tokens)))
        assert torch.equal(run.time, torch.stack(seen, dim=1))
        assert torch.equal(run.time_at(1), seen[1])


KINDS = {
    "duo": {"steps": 5},
    "duo psi": {"steps": 5, "low_mode": "constant-0.5", "top_p": 0.9},
    "gidd": {"steps": 6},
    "gidd correction": {
        "sampler": "gidd-self-correction",
        "steps": 4,
        "temperature": 3.0,
        "start_canvas": [3, 40, 77, 12, 99, 54],
    },
    "mdlm": {"sampler": "remdm", "steps": 6, "low_mode": "max-capped-0.4"},
    "sedd": {"steps": 6},
}
PROMPTS = [[5, 9, 13], [8, 2, 4, 6, 7]]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind, conformance):
    return open_folder(conformance / kind.split()[0]).load()


def _generate(model: sinklens.Model, kind: str, prompts: Any = PROMPTS, **more: Any) -> Any:
    return sinklens.generate(model, prompts, gen_length=6, **KINDS[kind], **more)


def test_rows_do_not_depend_on_their_batch_and_copies_differ(model, kind):
    both = _generate(model, kind, seed=3)
    for row, prompt in enumerate(PROMPTS):
        alone = _generate(model, kind, [prompt], seed=3)
        steps = alone.canvas.shape[1]
        assert torch.equal(both.canvas[row, :steps, -6:], alone.canvas[0, :, -6:])
    copies = _generate(model, kind, [PROMPTS[0]] * 2, seed=3)
    assert torch.equal(copies.canvas[0], _generate(model, kind, PROMPTS[:1], seed=3).canvas[0])
    assert not torch.equal(copies.canvas[0], copies.canvas[1])
    assert torch.equal(both.canvas, _generate(model, kind, seed=3).canvas)
    assert not torch.equal(both.canvas, _generate(model, kind, seed=4).canvas[:, : both.canvas.shape[1]])


def test_a_prompt_is_on_every_canvas(model, kind):
    run = _generate(model, kind)
    for row, prompt in enumerate(PROMPTS):
        assert (run.canvas[row, :, run.prompt_length - len(prompt) : run.prompt_length] == torch.tensor(prompt)).all()
    assert not run.undecided[:, :, : run.prompt_length].any()


def test_undecided_positions_are_masks_or_in_duo_all_until_the_end(model, kind):
    run = _generate(model, kind)
    if kind.startswith("duo"):
        assert run.undecided[:, :-1, run.prompt_length :].all()
        assert not run.undecided[:, -1].any()
        assert run.answers[0].masks == 0
    else:
        assert torch.equal(run.undecided, run.canvas == model.mask_token_id)
    assert bool((run.canvas[:, 1:] != run.canvas[:, :-1]).any())


def test_a_pass_over_a_step_reads_its_noise_level(model, kind):
    shown: list[Tensor] = []
    watched = ("blocks.1.attn.hook_pattern", lambda value, hook: shown.append(value[0, 0, 2:, 2:].clone()))
    run = _generate(model, kind, hooks=[watched])
    for step in (0, run.steps_run - 1):
        found = sinklens.views.pattern_at(_generate(model, kind, replay=run), step, 1)
        torch.testing.assert_close(found[0], shown[step].float(), atol=1e-5, rtol=1e-4)
    first: list[Tensor] = []
    keep = ("blocks.0.attn.hook_pattern", lambda value, hook: first.append(value[1, 0].clone()))
    _generate(model, kind, hooks=[keep], replay=run)
    strongest = [pattern.sum(dim=0).argmax() for pattern in first]
    _generate(model, kind, hooks=[MaskSinks(top_k=1, same_step=True), keep], replay=run)
    for pattern, key in zip(first[run.steps_run :], strongest, strict=True):
        assert torch.equal(pattern.sum(dim=0).nonzero()[:, 0], torch.tensor([k for k in range(11) if k != key]))


def test_the_lab_keeps_the_noise_levels(model, kind):
    from sinklens.live.outcome import ARRAYS, RunOutcome

    run = _generate(model, kind, PROMPTS[:1])
    kept = RunOutcome.of(run)
    again = RunOutcome.from_record(kept.record(), {name: getattr(kept, name) for name in ARRAYS}).generation(
        model, None
    )
    assert torch.equal(again.time, run.time)
    assert again.settings == run.settings


def test_a_forced_token_is_on_the_canvas_of_its_step(model, kind):
    steps = _generate(model, kind).steps_run
    run = _generate(model, kind, hooks=[ForceTokens(tokens={-1: 11}, steps=[steps - 1])])
    assert (run.canvas[:, steps - 1, -1] == 11).all()


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("duo", {"cfg_scale": 1.0}, "cfg_scale is not a setting of the duo sampler"),
        ("duo", {"sampler": "llada"}, "the llada sampler is for models with a mask token, but duo models have no mask"),
        ("mdlm", {"sampler": "duo"}, "the duo sampler is for models with no mask token, but mdlm models have a mask"),
        ("gidd", {"sampler": "mdlm"}, "the mdlm sampler sets sigma, and .* reads time; choose one of gidd, gidd-self"),
        ("mdlm", {"sampler": "gidd"}, "the gidd sampler sets time, and .* reads sigma"),
        ("duo", {"cache": "prefix"}, "PrefixCache reuses keys of earlier steps"),
        ("gidd", {"cache": "prefix"}, "PrefixCache reuses keys of earlier steps"),
        ("duo", {"high_mode": "max-capped"}, "high_mode must be one of pure-posterior, pure-pc, constant-E"),
        ("duo", {"low_mode": "constant-2"}, r"with E from 0 to 1; got 'constant-2'"),
        ("duo", {"time_profile": "linear-constant-linear-2"}, "time_profile must be 'linear', or"),
        ("duo", {"high_frac": 0.6, "middle_frac": 0.5}, "take 8 of 7 times and leave none for the end"),
        ("duo", {"start_canvas": [[1, 2]]}, r"start_canvas must be token ids \[batch, 6\]"),
        ("duo", {"hooks": [Remask(positions=[-1])]}, "duo models have no mask token; use ForceTokens"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(conformance, name, given, message):
    with pytest.raises(SettingError, match=message):
        sinklens.generate(open_folder(conformance / name).load(), PROMPTS, gen_length=6, **given)


def test_a_part_of_one_time_has_kappa_1():
    settings = sinklens.families.duo.DuoSettings(gen_length=4, steps=4, high_frac=0.2, high_mode="max-capped-0.1")
    assert settings.updates()[0].kappa == 1
