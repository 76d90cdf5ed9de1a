"""Recorded variables equal plain torch on separate passes, and recording leaves no hooks."""

import json
import math

import numpy as np
import pytest
import torch
from asked import PROMPTS
from building import random_ids, shared_model

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.sinks import Quantity, Record
from sinklens.sinks.quantities import Outputs

ALL = Record(["values", "stream", "outputs"])
POINTS = ("hook_v", "hook_resid_pre", "hook_z", "hook_pattern")


def passed(run, step):
    """Values by point of a separate pass over the canvas of step `step`, and which positions are real."""
    length = run.prompt_length + step if run.sinks.causal else run.canvas.shape[2]
    real = run.real[:, :length]
    _, cache = run.model.run_with_cache(
        run.canvas[:, step, :length], attention_mask=real, names_filter=lambda name: name.endswith(POINTS)
    )
    return cache, real


def lower_median(values):
    return sorted(values)[(len(values) - 1) // 2]


def assert_stream(data, values, there):
    """Check the stream's variables of one row and layer; `values` is [pos, d_model]."""
    size = values.abs().tolist()
    every = [entry for j in there for entry in size[j]]
    assert float(data["stream_median"]) == pytest.approx(lower_median(every), rel=1e-4)
    for j in there:
        peak, channel = float(data["stream_peak"][j]), int(data["stream_channel"][j])
        assert peak == pytest.approx(max(size[j]), rel=1e-4)
        assert size[j][channel] == pytest.approx(peak, rel=1e-4)
        median = lower_median([size[i][channel] for i in there])
        assert float(data["stream_channel_median"][j]) == pytest.approx(median, rel=1e-4, abs=1e-5)


def assert_recorded(run, step):
    """Check that every built-in quantity of `step` equals plain torch on a separate pass."""
    cache, real = passed(run, step)
    cfg, data = run.model.cfg, run.sinks.data.isel(step=step)
    arrays = {name: data[name].to_numpy() for name in data.data_vars}
    for layer in range(cfg.n_layers):
        at = {point: cache[f"blocks.{layer}.{'' if 'resid' in point else 'attn.'}{point}"] for point in POINTS}
        for b in range(len(real)):
            there = real[b].nonzero()[:, 0].tolist()
            stream = {name: value[b, layer] for name, value in arrays.items() if name.startswith("stream")}
            assert_stream(stream, at["hook_resid_pre"][b], there)
            for h in range(cfg.n_heads):
                group = h // (cfg.n_heads // cfg.n_key_value_heads)
                for j in there:
                    norm = math.sqrt(sum(float(entry) ** 2 for entry in at["hook_v"][b, j, group]))
                    assert arrays["value_norm"][b, layer, h, j] == pytest.approx(norm, rel=1e-4)
                singular = torch.linalg.svdvals(at["hook_z"][b, there, h])
                rank = float((singular**2).sum() / singular[0] ** 2)
                assert arrays["output_rank"][b, layer, h] == pytest.approx(rank, rel=1e-3)
                sums = at["hook_pattern"][b, h, there].sum(0).numpy()
                np.testing.assert_allclose(arrays["score"][b, layer, h, : len(sums)], sums, atol=2e-5)


@pytest.fixture(scope="module", params=["tiny_llada", "tiny_llama"])
def run(request):
    """Three prompts of different lengths; the autoregressive model with its cache."""
    return sinklens.generate(request.getfixturevalue(request.param), PROMPTS, gen_length=8, record_sinks=ALL)


@pytest.mark.fast_cases(2)
def test_every_quantity_equals_plain_torch_on_the_canvas_of_its_step(run):
    assert not run.real.all()
    for step in (0, 5):
        assert_recorded(run, step)


def test_grouped_heads_share_the_norm_of_their_value_head():
    ids = random_ids(2, 6)
    for causal in (False, True):
        assert_recorded(sinklens.generate(shared_model("llama", causal), ids, gen_length=3, record_sinks=ALL), 2)


def test_a_row_is_recorded_the_same_alone_and_in_a_batch(run):
    alone = sinklens.generate(run.model, PROMPTS[0], gen_length=8, record_sinks=ALL).sinks
    width, steps = alone.data.sizes["pos"], alone.steps
    assert width < run.sinks.data.sizes["pos"]
    for name, values in alone.data.data_vars.items():
        if name not in ("is_real", "unmask_step", "final_id", "stream_channel"):
            batched = run.sinks.data[name].isel(batch=[0], step=slice(0, steps))
            batched = batched.isel(pos=slice(-width, None)) if "pos" in batched.dims else batched
            np.testing.assert_allclose(values, batched, rtol=1e-3, atol=1e-4, err_msg=str(name))


class Entropy(Quantity):
    """−Σ_j A[i, j] log A[i, j] of every query."""

    name = "entropy"
    point = "attn.hook_pattern"
    variables = {"entropy": ("head", "pos")}  # noqa: RUF012

    def keep(self, value):
        return torch.special.entr(value.detach()).sum(-1)

    def join(self, before, now):
        return torch.cat([before, now], dim=2)

    def finish(self, kept, real, heads):
        assert kept.shape == (len(real), heads, real.shape[1])
        return {"entropy": kept}


class Odd(Quantity):
    """Variables of every kind, with positions as a middle axis; the point in TransformerLens 4's spelling."""

    name = "odd"
    point = "attn.v.hook_out"
    variables = {"flag": ("pos",), "count": ("pos", "head"), "half": ("pos", "d_head"), "single": ()}  # noqa: RUF012

    def finish(self, kept, real, heads):
        ones = torch.ones(*kept.shape[:2], heads, dtype=torch.int64)
        half = kept[:, :, 0].to(torch.bfloat16)
        return {"flag": real, "count": ones, "half": half, "single": kept.double().sum((1, 2, 3))}


def assert_same_tracks(one, other):
    assert set(one.data.data_vars) == set(other.data.data_vars)
    for name, values in one.data.data_vars.items():
        if name != "stream_channel":
            np.testing.assert_allclose(values, other.data[name], rtol=1e-3, atol=1e-4, err_msg=str(name))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("edited", [False, True])  # an edit empties the cache
def test_cached_and_uncached_runs_record_the_same(tiny_llama, edited):
    def replace(canvas, hook):
        if edited and hook.step >= 4:
            canvas[:, -6] = 300
        return canvas

    record = Record([*ALL.quantities, Entropy(), Odd()], patterns=[(0, 1), (3, 3), (-1, 3), (5, -2)])
    given = {"hooks": [("denoise.hook_canvas", replace)], "gen_length": 8, "record_sinks": record}
    cached, uncached = (sinklens.generate(tiny_llama, PROMPTS, use_cache=use, **given) for use in (True, False))
    assert (cached.canvas[:, 4] == 300).any() == edited
    assert_same_tracks(cached.sinks, uncached.sinks)
    assert set(cached.patterns) == set(uncached.patterns) == {(0, 1), (3, 3), (7, 3), (5, 2)}
    for place, pattern in cached.patterns.items():
        torch.testing.assert_close(pattern, uncached.patterns[place], rtol=1e-3, atol=1e-5)
        assert pattern.shape == (3, 6, *[cached.prompt_length + place[0]] * 2)


def test_recorded_scores_are_the_column_sums_of_the_recorded_pattern(tiny_llada):
    record = Record([Entropy()], patterns=[(0, 0), (-1, -1), (3, 2)])
    run = sinklens.generate(tiny_llada, PROMPTS, gen_length=8, steps=6, block_length=8, record_sinks=record)
    assert set(run.patterns) == {(0, 0), (5, 3), (3, 2)}
    real = run.real[:, None].float().expand(-1, tiny_llada.cfg.n_heads, -1)
    assert not run.real.all()
    for (step, layer), pattern in run.patterns.items():
        torch.testing.assert_close(pattern.sum(-1), real, rtol=0, atol=1e-5)
        score = run.sinks.data["score"].isel(step=step, layer=layer).to_numpy()
        np.testing.assert_allclose(pattern.sum(2), score, atol=1e-5)
        assert torch.equal(pattern.sum(2).argmax(-1), torch.from_numpy(score).argmax(-1)), "another key is strongest"
        entropy = -(pattern * pattern.clamp(min=1e-30).log()).sum(-1).numpy()
        np.testing.assert_allclose(run.sinks.data["entropy"].isel(step=step, layer=layer), entropy, atol=1e-4)
        np.testing.assert_allclose(passed(run, step)[0][f"blocks.{layer}.attn.hook_pattern"], pattern, atol=1e-5)


def test_variables_of_every_kind_are_filled_where_positions_do_not_exist_yet(tiny_llama):
    data = sinklens.generate(tiny_llama, PROMPTS[0], gen_length=3, record_sinks=Record([Odd()])).sinks.data
    exists = np.arange(data.sizes["pos"]) < data.attrs["prompt_length"] + np.arange(3)[:, None]
    for name, kind, nothing in (("flag", bool, False), ("count", np.int64, -1), ("half", np.float32, np.nan)):
        values = np.moveaxis(data[name].transpose("batch", "layer", "step", "pos", ...).to_numpy()[0, 0], 0, 0)
        assert values.dtype == kind
        np.testing.assert_array_equal(values[~exists], np.full_like(values[~exists], nothing))
        assert (values[exists] != nothing).all()
    assert data["count"].dims == ("batch", "step", "layer", "pos", "head")
    assert data["single"].dtype == np.float32


def plant(value):
    value[:, 5, 3] = 777.0


def flatten(value):
    value[:, :, 2] = value[:, -1:, 2]


def assert_edited(data):
    """Step 1 of layer 1 shows the edits: values of 2, a peak of 777, a flat head 2, a zeroed head 1."""
    here = data.isel(step=1, layer=1)
    np.testing.assert_allclose(here["value_norm"], 2 * math.sqrt(32), rtol=1e-6)
    assert (here["stream_peak"].to_numpy()[:, 5] == 777).all()
    assert (here["stream_channel"].to_numpy()[:, 5] == 3).all()
    np.testing.assert_allclose(here["output_rank"].to_numpy()[:, 2], 1, rtol=1e-5)
    assert (here["score"].to_numpy()[:, 1] == 0).all()
    for elsewhere in (data.isel(step=0, layer=1), data.isel(step=1, layer=0)):
        assert not np.allclose(elsewhere["value_norm"], 2 * math.sqrt(32))
        assert (elsewhere["stream_peak"] < 700).all()
        assert (elsewhere["output_rank"].to_numpy()[:, 2] > 1.001).all()


EDITS = {
    "hook_resid_pre": plant, "attn.hook_v": lambda value: torch.full_like(value, 2.0), "attn.hook_z": flatten,
    "attn.hook_pattern": lambda value: value * torch.tensor([1.0, 0, 1, 1, 1, 1])[:, None, None],
}  # fmt: skip


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("guidance", [0.0, 1.0])
@pytest.mark.parametrize("in_block", [False, True])
def test_values_are_recorded_after_edits_of_hook_functions_and_of_a_trace_block(tiny_llada, guidance, in_block):
    """Edits replace values where EDITS returns a new one, and act in place where it changes the old one."""

    def at_step_1(edit):
        return lambda value, hook: edit(value) if hook.step == 1 else None

    given = {"steps": 2, "cfg_scale": guidance, "record_sinks": Record(ALL.quantities, patterns=[(1, 1)])}
    given["hooks"] = [] if in_block else [(f"blocks.1.{name}", at_step_1(edit)) for name, edit in EDITS.items()]
    with sinklens.trace(tiny_llada, PROMPTS[:2], **given) as t:
        for _ in t.steps[1] if in_block else t.steps[:0]:
            plant(t["blocks.1.hook_resid_pre"])
            t["blocks.1.attn.hook_v"] = torch.full_like(t["blocks.1.attn.hook_v"], 2.0)
            t["blocks.1.attn.hook_pattern"][:, 1] = 0
            flatten(t["blocks.1.attn.hook_z"])
    assert_edited(t.sinks.data)
    assert t.patterns[1, 1].shape == (2, 6, *[t.canvas.shape[2]] * 2)
    assert (t.patterns[1, 1][:, 1] == 0).all()


def watched(model):
    return [name for name, point in model.tree.hook_dict.items() if point.watched or point._forward_hooks]


@pytest.mark.fast_cases(1)
def test_recording_leaves_no_hook_and_does_not_change_the_text(run):
    assert watched(run.model) == []
    assert sinklens.generate(run.model, PROMPTS, gen_length=8, record_sinks=False).text == run.text
    every = Record([*ALL.quantities, Entropy()], patterns=[(step, 2) for step in range(8)])
    assert sinklens.generate(run.model, PROMPTS, gen_length=8, record_sinks=every).text == run.text
    assert watched(run.model) == []


class Wrong(Entropy):
    """Declares other axes than it returns."""

    variables = {"entropy": ("head",)}  # noqa: RUF012


class Taken(Odd):
    """Declares a variable that every track has."""

    variables = {"is_real": ("pos",)}  # noqa: RUF012


class Lost(Entropy):
    """Names a point that does not exist."""

    point = "attn.hook_patern"


@pytest.mark.parametrize(
    ("record", "error", "text"),
    [
        (lambda _: Record(3), SettingError, "quantities must be a list of values; got 3"),
        (
            lambda _: Record(["value"]),
            SettingError,
            r"unknown quantity 'value'; known: values, stream, outputs\. Nearest: val",
        ),
        (lambda _: Record([Wrong(), Entropy()]), SettingError, r"two quantities of the track have the name 'entropy'"),
        (lambda _: Record([Taken()]), SettingError, r"two quantities of the track fill the variable 'is_real'"),
        (lambda tmp: Record(out=tmp / "run.nc"), SettingError, r"run\.nc' does not end in \.zarr.*run\.sinks\.save"),
        (lambda tmp: Record(out=tmp), SettingError, r"does not end in \.zarr"),
        (
            lambda tmp: Record(out=str(tmp / "old.zarr")),
            SettingError,
            r"old\.zarr already exists; choose another path",
        ),
        (lambda _: Record(patterns=[(1.5, 0)]), SettingError, r"\(step, layer\) pairs, .*; got \[\(1.5, 0\)\]"),
        (lambda _: Record(patterns=[(0, True)]), SettingError, r"\(step, layer\) pairs, .*; got \[\(0, True\)\]"),
        (lambda _: "values", SettingError, r"record_sinks must be True, False or a Record such as .*; got 'values'"),
        (lambda _: Record(patterns=[(24, 0)]), SettingError, r"\(24, 0\) is outside this run of 24 steps and 4 layers"),
        (lambda _: Record(patterns=[(0, 0), (0, -5)]), SettingError, r"\(0, -5\) is outside this run"),
        (lambda _: Record([Lost()]), HookNameError, r"'blocks\.0\.attn\.hook_patern'\. Nearest: .*hook_pattern"),
        (lambda _: Record([Wrong()]), SettingError, r"declares .*\('batch', 'head'\).*finish returned .*\[1, 6, \d+\]"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_invalid_record_is_rejected(tiny_llada, tmp_path, record, error, text):
    (tmp_path / "old.zarr").mkdir()
    with pytest.raises(error, match=text):
        sinklens.generate(tiny_llada, PROMPTS[0], record_sinks=record(tmp_path))
    assert watched(tiny_llada) == []


@pytest.mark.parametrize("broken", [0.0, torch.nan, torch.inf])
def test_an_output_that_is_zero_or_not_finite_has_no_rank_and_does_not_affect_others(broken):
    z = torch.randn(2, 5, 3, 4)
    z[1, 2:, 0] = broken
    z[1, :2, 0] = 0
    rank = Outputs().finish(z, torch.ones(2, 5, dtype=torch.bool), 3)["output_rank"]
    assert rank.isnan().nonzero().tolist() == [[1, 0]]
    padded = Outputs().finish(z, torch.tensor([[True] * 5, [True] * 2 + [False] * 3]), 3)["output_rank"]
    torch.testing.assert_close(padded[0], rank[0])
    assert padded[1, 0].isnan()  # zero at real positions; padding does not matter


def test_every_token_of_a_run_has_text_even_if_a_replay_overrides_an_edit(tiny_llada):
    first = sinklens.generate(tiny_llada, PROMPTS[0], steps=4)

    def force(canvas, hook):
        canvas[:, -1] = 444
        return canvas

    again = sinklens.generate(tiny_llada, PROMPTS[0], steps=4, replay=first, hooks=[("denoise.hook_canvas", force)])
    ids = set(np.unique(again.sinks.data["token_id"]).tolist())
    assert 444 in ids
    assert 444 not in first.sinks.vocabulary
    assert ids <= set(again.sinks.vocabulary)
    for token, text in again.sinks.vocabulary.items():
        assert text == tiny_llada.tokenizer.decode([token])


def test_a_track_describes_its_run(run):
    attrs = run.sinks.data.attrs
    assert (attrs["model"], json.loads(attrs["settings"])["gen_length"]) == (run.model.name, 8)
    assert (attrs["seed"], attrs["causal"], run.sinks.causal) == (0, int(run.sinks.causal), run.model.family == "llama")
    assert run.sinks.special == run.model.special_tokens
