"""The samplers of MDLM, SEDD, BD3-LM, Duo and GIDD: noise levels and refusals; tests/sampling has their rules."""

import pytest
import torch
from stored.runs import open_folder, stored_run, stored_runs
from timed import loader

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.interventions import Remask
from sinklens.sampling import PrefixCache


def test_an_untimed_network_is_not_called_while_its_canvas_does_not_change(conformance):
    model = open_folder(conformance / "mdlm").load()
    calls = []
    handle = model.tree.hf.register_forward_pre_hook(lambda *_: calls.append(1))
    base = model.tree.hf.model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        run = sinklens.generate(model, [[]], gen_length=4, steps=40, record_sinks=False)
    finally:
        handle.remove()
        base.remove()
    changes = int((run.canvas[0, 1:] != run.canvas[0, :-1]).any(dim=1).sum())
    assert run.steps_run > len(calls)
    assert len(calls) <= changes + 1


def test_each_row_is_corrected_as_often_as_the_references(conformance):
    folder = open_folder(conformance / "gidd")
    runs = [run for run in stored_runs(folder) if "corrections_per_row" in folder.runs[run.number]]
    assert len(runs) == 2
    for stored in runs:
        assert folder.repeat(stored).active.sum(dim=1).tolist() == folder.runs[stored.number]["corrections_per_row"]


@pytest.mark.parametrize(("name", "number", "level"), [("duo", 5, "sigma"), ("gidd", 0, "t")])
def test_the_network_reads_the_stored_noise_levels(conformance, name, number, level):
    folder, seen = open_folder(conformance / name), []
    keep = ("hook_time", lambda value, hook: seen.append(value.clone()))
    run = folder.repeat(stored_run(folder, number), record_sinks=False, hooks=[keep])
    assert torch.equal(torch.stack(seen), folder.tensors[f"gen{number}.{level}"][:, None].expand(-1, len(run.tokens)))
    assert torch.equal(run.time, torch.stack(seen, dim=1))
    assert torch.equal(run.time_at(1), seen[1])


def test_a_part_of_one_time_has_kappa_1():
    settings = sinklens.families.duo.DuoSettings(gen_length=4, steps=4, high_frac=0.2, high_mode="max-capped-0.1")
    assert settings.updates()[0].kappa == 1


def test_an_untimed_network_takes_cache_policies_and_the_samplers_of_others(conformance):
    model, settings = open_folder(conformance / "mdlm").load(), {"gen_length": 6, "cache": PrefixCache()}
    free, watched = (sinklens.generate(model, [[5, 7, 8]], record_sinks=record, **settings) for record in (False, True))
    assert torch.equal(free.canvas, watched.canvas)
    assert free.answers[0].masks == 0
    assert sinklens.generate(model, [[5]], sampler="llada", gen_length=4, record_sinks=False).answers[0].masks == 0
    assert model.to_canvas([[]], gen_length=3).tolist() == [[model.mask_token_id] * 3]


EMPTY = "row 0 of the token ids is empty"
REFUSED = [
    ("duo", {"cfg_scale": 1.0}, "cfg_scale is not a setting of the duo sampler"),
    ("duo", {"sampler": "llada"}, "the llada sampler is for models with a mask token, but duo models have no mask"),
    ("mdlm", {"sampler": "duo"}, "the duo sampler is for models with no mask token, but mdlm models have a mask"),
    ("gidd", {"sampler": "mdlm"}, "the mdlm sampler sets sigma, and .* reads time; choose one of gidd, gidd-self"),
    ("mdlm", {"sampler": "gidd"}, "the gidd sampler sets time, and .* reads sigma"),
    ("sedd", {"sampler": "llada"}, r"does not set the noise level that .* reads; choose one of mdlm,"),
    ("llada-mha", {"sampler": "mdlm"}, r"the mdlm sampler sets a noise level, and .* does not read one"),
    ("duo", {"cache": "prefix"}, "PrefixCache reuses keys of earlier steps"),
    ("gidd", {"cache": "prefix"}, "PrefixCache reuses keys of earlier steps"),
    ("sedd", {"cache": "prefix"}, "PrefixCache reuses keys of earlier steps, and those of .* change with the"),
    ("duo", {"high_mode": "max-capped"}, "high_mode must be one of pure-posterior, pure-pc, constant-E"),
    ("duo", {"low_mode": "constant-2"}, r"with E from 0 to 1; got 'constant-2'"),
    ("duo", {"time_profile": "linear-constant-linear-2"}, "time_profile must be 'linear', or"),
    ("duo", {"high_frac": 0.6, "middle_frac": 0.5}, "take 8 of 7 times and leave none for the end"),
    ("duo", {"start_canvas": [[1, 2]]}, r"start_canvas must be token ids \[batch, 6\]"),
    ("duo", {"hooks": [Remask(positions=[-1])]}, "a duo model has no mask token; use ForceTokens"),
    ("bd3lm-owt", {"prompt": [[161]], "gen_length": 27}, r"has 16 positions, and a pass would need 28"),
    ("bd3lm-owt", {"prompt": [[161], [161, 3]]}, "the prompts have 1 to 2 tokens; blocks are counted from the first c"),
    ("bd3lm-owt", {"prompt": [[161]], "num_steps": 3}, "num_steps 3 is less than block_length 4, and first_hitting"),
    ("bd3lm-owt", {"prompt": [[]]}, EMPTY),
    ("sedd", {"prompt": ""}, r"has no tokenizer.* or \[\[\]\] as the prompt, to generate without one"),
    ("bd3lm-owt", {"prompt": [[161]], "var_length": True}, "stop_at_eos needs an end-of-text token"),
    ("mdlm", {"sampler": "mdlm-windows", "cache": "prefix"}, "PrefixCache computes passes over the complete text"),
    ("mdlm", {"sampler": "mdlm-windows", "window_length": 9, "stride_length": 10}, "stride_length 10 is larger than w"),
    ("mdlm", {"sampler": "mdlm-windows", "window_length": 40, "stride_length": 4},
     "window_length is 40, and the context of this model 20; give at most that"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_has_no_meaning_is_refused_by_name(conformance, name, given, message):
    given = {"prompt": [[5, 9, 13], [8, 2, 4, 6, 7]], "gen_length": 6} | given
    with pytest.raises((SettingError, PromptError), match=message):
        sinklens.generate(open_folder(conformance / name).load(), given.pop("prompt"), **given)


def test_first_hitting_decides_one_position_at_falling_times(conformance, tmp_path_factory):
    """The time falls by u^(1/m), whose mean is m / (m + 1), and each of m positions is as likely as the others."""
    model, times = loader(conformance, tmp_path_factory.mktemp)("bd3lm-owt timed"), []
    rows = [[161, number % 150, 3, 4] for number in range(240)]
    keep = ("hook_time", lambda value, hook: times.append(1 - (-value).exp()) or None)
    run = sinklens.generate(model, rows, gen_length=4, hooks=[keep], record_sinks=False)
    assert run.steps_run == 4
    assert bool(((run.canvas == 162).sum(dim=2) == torch.arange(4, -1, -1)).all())
    before = torch.ones(240)
    for time, masks in zip(times, (4, 3, 2, 1), strict=True):
        assert bool((time <= before + 1e-6).all())
        assert float((time / before).mean()) == pytest.approx(masks / (masks + 1), abs=0.06)
        before = time
    assert bool(
        (((run.canvas[:, 1, 4:] != 162).sum(dim=0) - 60).abs() < 27).all()
    )  # four standard deviations of a fair choice
