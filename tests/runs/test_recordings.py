"""Runs written to a file and read back have the same values at all points; files of others are read as documented."""

import json

import pytest
import torch
from building import random_dit
from watching import PADDED, short

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.runs import from_history, read_canvases, replay, write_canvases
from sinklens.runs.recordings import recorded_canvases

EVERY = lambda name: not name.endswith(("hook_fresh", "hook_expert_indices"))  # noqa: E731


def same(one, other):
    """Whether two runs, or rows of runs, have the same canvases and undecided positions."""
    return torch.equal(one.canvas, other.canvas) and torch.equal(one.undecided, other.undecided)


def collected(run):
    """A run made by `run(hooks)`, and copies of all values that pass its points, by step and point."""
    values = {}

    return run(
        [(EVERY, lambda value, hook: values.setdefault((hook.step, hook.name), []).append(value.clone()))]
    ), values


@pytest.mark.fast_cases(2)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("architecture", "causal", "settings"),
    [
        ("llama", False, {"gen_length": 8, "steps": 4, "block_length": 4, "temperature": 0.7}),
        ("dream", False, {"gen_length": 6, "steps": 5}),
        ("sdar", False, {}),
        ("llama", True, {}),
        ("qwen3_moe", False, {}),
    ],
)
def test_a_run_read_back_has_identical_values_at_every_point(worded, tmp_path, architecture, causal, settings):
    model, options = worded(architecture, causal), short(worded(architecture, causal), settings)
    run, values = collected(lambda hooks: sinklens.generate(model, PADDED[1:], hooks=hooks, seed=3, **options))
    write_canvases(run, tmp_path / "runs.jsonl")
    (recorded,) = read_canvases(tmp_path / "runs.jsonl")
    again, repeated = collected(lambda hooks: replay(model, recorded, hooks=hooks, progress=False))
    assert same(again, run)
    assert values.keys() == repeated.keys()
    for place, found in values.items():
        for one, other in zip(found, repeated[place], strict=True):
            assert torch.equal(one, other), place
    assert len({name for _, name in values}) > 30


def test_a_run_over_random_tokens_is_read_back(tmp_path):
    model = random_dit("duo")
    settings = {"gen_length": 8, "steps": 4, "progress": False}
    run = sinklens.generate(model, torch.tensor([[1, 2]]), seed=2, **settings)
    write_canvases([run], tmp_path / "runs.jsonl")
    again = replay(model, read_canvases(tmp_path / "runs.jsonl")[0], progress=False)
    assert same(again, run)
    torch.testing.assert_close(again.sinks.scores().values, run.sinks.scores().values, equal_nan=True)


@pytest.mark.usefixtures("unchecked")
def test_rows_of_a_padded_batch_are_replayed_alone(model, tmp_path):
    run = sinklens.generate(model, PADDED, **short(model, {"record_sinks": True}))
    write_canvases([run, run], tmp_path / "runs.jsonl")
    read = read_canvases(tmp_path / "runs.jsonl")
    assert len(read) == 4
    for row, recorded in enumerate(read[:2]):
        assert recorded.prompt_ids == run.canvas[row, 0][run.real[row]][: len(recorded.prompt_ids)].tolist()
        again = replay(model, recorded, progress=False)
        assert torch.equal(again.canvas[0], run.canvas[row][:, run.real[row]])
        found = again.sinks.scores().to_numpy()[0]
        wanted = run.sinks.scores().to_numpy()[row][..., run.real[row].numpy()]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=1e-4)


def test_the_undecided_positions_follow_from_the_mask(model):
    recorded = recorded_canvases(sinklens.generate(model, PADDED[1:], **short(model, {})))[0]
    data = recorded.to_json() | {"undecided": None, "mask_id": model.mask_token_id}
    assert torch.equal(type(recorded).from_json(data).undecided, recorded.undecided)


@pytest.mark.usefixtures("unchecked")
def test_the_history_of_other_libraries_is_read_with_either_padding(worded):
    """Dream's history lacks the first canvas and is padded on the left; dLLM's has it and is padded on the right."""
    model, prompts = worded(), [[5, 6, 7], [8, 9, 10, 11, 12]]
    run = sinklens.generate(model, prompts, gen_length=4, steps=4, record_sinks=False)
    rows = recorded_canvases(run)
    after = list(run.canvas[:, 1:].unbind(1))
    left = from_history(after, prompts, model.mask_token_id, has_start=False, source="dream")
    right = [
        torch.stack([torch.cat([row.canvas[step], torch.zeros(9 - row.canvas.shape[1]).long()]) for row in rows])
        for step in range(5)
    ]
    for found in (left, from_history(right, prompts, model.mask_token_id, has_start=True, padding_side="right")):
        for one, row in zip(found, rows, strict=True):
            assert same(one, row)
            again = replay(model, one, record_sinks=False, progress=False)  # the settings are not known
            assert torch.equal(again.canvas[0], row.canvas)
    assert same(from_history(run.canvas[1, 1:], prompts[1], model.mask_token_id, has_start=False)[0], rows[1])
    late = [run.canvas[:, 0], *run.canvas[:, 1:].unbind(1)]  # the first step decided nothing
    for one, row in zip(from_history(late, prompts, model.mask_token_id, has_start=False), rows, strict=True):
        assert torch.equal(one.canvas, torch.cat([row.canvas[:1], row.canvas]))


@pytest.mark.usefixtures("unchecked")
def test_a_history_that_grows_by_blocks_is_that_of_full_canvases(worded):
    """As dLLM's BD3LMSampler stores it: the left-padded prompts, then each block from its first step on."""
    model, prompts = worded(), [[5, 6, 7], [8, 9, 10, 11, 12]]
    run = sinklens.generate(model, prompts, gen_length=8, steps=8, block_length=4, record_sinks=False)
    grown = [run.canvas[:, step, : 5 if step == 0 else 9 if step <= 4 else 13] for step in range(9)]
    found = from_history(grown, prompts, model.mask_token_id, has_start=True)
    for one, row in zip(found, recorded_canvases(run), strict=True):
        assert same(one, row)


@pytest.mark.parametrize("filler", [0, 5])
@pytest.mark.parametrize(("prompts", "length"), [([[5, 6, 7], [8, 9, 10, 11, 12]], 7), ([[5, 5], [5]], 8)])
def test_the_history_of_bd3lm_is_replayed_without_its_padding(prompts, length, filler, conformance):
    """Its padding completes the first block; without settings, a replay has the passes of the recorded blocks."""
    model = sinklens.load(conformance / "bd3lm", block_length=4, mask_token_id=309)
    given = {"steps": 3, "temperature": 1.0, "stop": False, "record_sinks": False}
    run = sinklens.generate(model, prompts, gen_length=length, sampler="bd3lm", **given)
    canvas, end = run.canvas.clone(), run.prompt_length
    for row, prompt in zip(canvas, prompts, strict=True):
        row[:, : end - len(prompt)] = filler
    begun = [step for step in range(run.steps_run + 1) if (canvas[:, step, end : end + 4] != model.mask_token_id).all()]
    grown = [canvas[:, 0, :end]]
    grown += [canvas[:, step, : end + 4 if step <= begun[0] else None] for step in range(1, run.steps_run + 1)]
    for row, (one, prompt) in enumerate(
        zip(from_history(grown, prompts, model.mask_token_id, has_start=True), prompts, strict=True)
    ):
        assert torch.equal(one.canvas, canvas[row, :, end - len(prompt) :])
        again = replay(model, one, sampler="bd3lm", record_sinks=False, progress=False)
        assert torch.equal(again.canvas[0, :, again.prompt_length - len(prompt) :], one.canvas)


@pytest.mark.parametrize(("lengths", "text"), [
    ([5, 5], "the first canvas must begin with prompt_ids"),
    ([], r"history must hold canvases \[batch, pos\], one for each step, of 1 prompts; got 0 canvases"),
    ([5, 4], r"may grow by blocks, but not shrink; their lengths are \[5, 4\]"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_history_is_refused(lengths, text):
    with pytest.raises(SettingError, match=text):
        from_history([torch.full((1, length), 60) for length in lengths], [[5, 6]], 60, has_start=True)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_recorded_run_is_refused_with_its_line(model, tmp_path):
    recorded = recorded_canvases(sinklens.generate(model, PADDED[1:], **short(model, {})))[0]
    data = recorded.to_json()
    cases = {
        "a recorded run is an object with format 'canvases 1'; got None": {},
        "lacks a key or has one of another form: KeyError 'canvas'": {k: v for k, v in data.items() if k != "canvas"},
        "the first canvas must begin with prompt_ids": data | {"prompt_ids": [1, 2]},
        "the first canvas must have undecided positions": data | {"undecided": [[] for _ in data["canvas"]]},
    }
    for text, changed in cases.items():
        (tmp_path / "runs.jsonl").write_text(json.dumps(data) + "\n\n" + json.dumps(changed) + "\n")
        with pytest.raises(CheckpointError, match=rf"line 3: .*{text}"):
            read_canvases(tmp_path / "runs.jsonl")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_canvases(tmp_path / "none.jsonl")
    longer = "the recorded run has 15 positions, 8 of them after the prompt, and this"
    for given, text in ((recorded, longer), ([recorded], r"recorded must be one recorded run, .*\[0\] .*; got \[")):
        with pytest.raises(SettingError, match=text):
            replay(model, given, gen_length=16, steps=4)
