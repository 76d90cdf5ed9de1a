"""The planted checkpoint: sinks recorded, found, masked, measured and drawn are the planted ones."""

import itertools

import numpy as np
import pytest
import torch
from planted_model import HEADS, planted_checkpoint, planted_sinks
from planted_truth import planted_paths, planted_scores

import sinklens
from sinklens.interventions import MaskSinks
from sinklens.sinks import (
    Broadcast,
    EpsilonOverMean,
    MeanPlusStd,
    NoOp,
    Record,
    ResidualPeak,
    SmallValueNorm,
    TopK,
    motion,
)

PROMPTS = [
    "Question: Tom has 5 apples. He buys 7 more.\nAnswer:",
    "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:",
]
GEN, STEPS = 16, 16
STATIC, MOVING, SPREAD = ("start", "fading", "newline"), ("frontier", "edge"), ("previous", "next", "uniform")
WITH_SINK = (*STATIC, *MOVING)
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The checkpoint loaded in each element type."""
    folder = planted_checkpoint(tmp_path_factory.mktemp("planted") / "checkpoint")
    return {dtype: sinklens.load(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def model(models):
    """The float32 model."""
    return models["float32"]


def decode(model, **settings):
    """A run on both prompts, the first padded on the left."""
    return sinklens.generate(model, PROMPTS, **{"gen_length": GEN, "steps": STEPS, "block_length": GEN} | settings)


@pytest.fixture(scope="module")
def runs(models):
    """One token per step, with everything that detectors need and every pattern."""
    record = Record(
        ["values", "stream", "outputs"], patterns=[(step, layer) for step in range(STEPS) for layer in (0, 1)]
    )
    return {dtype: decode(model, record_sinks=record) for dtype, model in models.items()}


@pytest.fixture(scope="module")
def run(runs):
    """The float32 run."""
    return runs["float32"]


def tokens(track):
    """The ids and padding that determine the planted sinks."""
    return track.data["token_id"].to_numpy(), track.data["is_real"].to_numpy()


def of(values, name):
    """The slice of an array with layers and heads that belongs to one planted head."""
    layer, head = HEADS[name]
    return values.isel(layer=layer, head=head)


# --- where the sinks are ---------------------------------------------------------------------------------------------


@DTYPES
def test_it_decodes_from_left_to_right(runs, dtype):
    run = runs[dtype]
    assert run.text == [" 1" * GEN] * 2
    assert run.real[0].sum() < run.real[1].sum()  # so the first row is padded
    order = torch.arange(run.canvas.shape[2]) - run.prompt_length
    assert torch.equal(run.unmask_step, order.clamp(min=-1).expand(2, -1))


@DTYPES
def test_strongest_keys_follow_the_planted_paths(runs, dtype):
    track = runs[dtype].sinks
    paths = planted_paths(*tokens(track))
    for row, name in itertools.product(range(2), WITH_SINK):
        assert track.trajectory(*HEADS[name], row=row).tolist() == of(paths, name)[row].values.tolist(), (row, name)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.02)])
def test_column_sums_are_the_planted_ones(runs, dtype, error):
    track = runs[dtype].sinks
    np.testing.assert_allclose(track.scores(), planted_scores(*tokens(track)), atol=error)
    fading = of(track.scores(), "fading").max("pos") / track.data["is_real"].sum("pos").to_numpy()[:, None]
    assert ((fading > 0.9) & (fading < 0.98)).all()


def canvases(model, rng, rows=40, length=30):
    """Prompts with zero to two newlines, some without a start token, and masks at random positions."""
    mask, start, newline = model.mask_token_id, model.tokenizer.bos_token_id, model.tokenizer.encode("\n")[-1]
    ids = rng.integers(300, 600, size=(rows, length))
    ids[:, 0] = np.where(np.arange(rows) % 5 > 0, start, ids[:, 0])
    ids[np.arange(rows) % 3 > 0, 4] = newline
    ids[np.arange(rows) % 3 > 1, 7] = newline
    ids[:, 9:] = np.where(rng.random((rows, length - 9)) < rng.random((rows, 1)), mask, ids[:, 9:])
    return ids


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-3), ("bfloat16", 0.03)])
def test_column_sums_are_the_planted_ones_on_any_canvas(models, dtype, error):
    model = models[dtype]
    ids = canvases(model, np.random.default_rng(3))
    names = [f"blocks.{layer}.attn.hook_sink_scores" for layer in (0, 1)]
    _, cache = model.run_with_cache(torch.from_numpy(ids), names_filter=names)
    recorded = torch.stack([cache[name] for name in names], dim=1).float().numpy()
    expected = planted_scores(ids[:, None], np.ones(ids.shape, dtype=bool)).to_numpy()[:, 0]
    several = planted_sinks(ids[:, None], np.ones(ids.shape, dtype=bool)).sum("pos")
    assert {0, 1, 2} <= set(np.unique(of(several, "newline")))
    assert of(several, "frontier").max() > 4
    np.testing.assert_allclose(recorded, expected, atol=error)


@pytest.mark.parametrize(("steps", "block_length", "jump"), [(4, 16, 4), (8, 8, 2), (16, 4, 1)])
def test_several_tokens_per_step_and_blocks_move_the_sinks_by_as_many(model, steps, block_length, jump):
    track = decode(model, steps=steps, block_length=block_length).sinks
    for name in MOVING:
        path = track.trajectory(*HEADS[name], row=0)
        assert path.tolist() == list(range(path[0], path[0] + GEN, jump))
        assert path.tolist() == of(planted_paths(*tokens(track)), name)[0].to_numpy().tolist()


# --- what is found, measured, masked and drawn -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "detector",
    [
        EpsilonOverMean(),
        EpsilonOverMean(50, "percent"),
        EpsilonOverMean(0.5, "fraction"),
        MeanPlusStd(3, over=()),
        TopK(1),
    ],
    ids=repr,
)
@DTYPES
def test_detectors_on_each_heads_scores_find_only_the_planted_sinks(runs, dtype, detector):
    track = runs[dtype].sinks
    found, expected = track.detect(detector), planted_sinks(*tokens(track))
    for name in WITH_SINK:
        assert (of(found, name) == of(expected, name)).all(), name
    if isinstance(
        detector, EpsilonOverMean
    ):  # with almost no variance, any unevenness exceeds a few standard deviations
        assert not any(of(found, name).any() for name in SPREAD)


@DTYPES
def test_detectors_on_values_and_residuals_separate_the_start_token_from_the_others(runs, dtype):
    track = runs[dtype].sinks
    start = of(planted_sinks(*tokens(track)), "start")
    small, no_op = track.detect(SmallValueNorm()), track.detect(NoOp())
    for name in HEADS:
        assert (of(small, name) == (start & (name == "start"))).all(), name
        assert (of(no_op, name) == (start & (name == "start"))).all(), name
        assert (of(track.detect(ResidualPeak()), name) == start).all()
        ordinary = of(planted_sinks(*tokens(track)), name) & (name in (*MOVING, "newline", "fading"))
        assert (of(track.detect(Broadcast()), name) == ordinary).all(), name


@DTYPES
def test_motion_measures_report_the_planted_motion(runs, dtype):
    track = runs[dtype].sinks
    jumps, drift = motion.jumps(track), motion.drift(track)
    for name in MOVING:
        assert (of(jumps["changes"], name) == STEPS - 1).all()
        assert (of(jumps["distance"], name) == 1).all()
        np.testing.assert_allclose([of(drift[fit], name) for fit in ("slope", "r_squared")], 1)
    for name in STATIC:
        assert (of(jumps["changes"], name) == 0).all()
    assert (motion.static_share(track.isel(layer=0)) == 1).all()
    assert (motion.static_share(track.isel(layer=1, head=slice(0, 3))) == 1 / 3).all()


def masked(model, name, **settings):
    """A run that masks the sinks of one head and records all patterns of its layer."""
    layer, head = HEADS[name]
    record = Record(patterns=[(step, layer) for step in range(STEPS)])
    return decode(model, hooks=MaskSinks(top_k=1, layers=[layer], heads=[head], **settings), record_sinks=record)


@pytest.mark.parametrize("name", WITH_SINK)
def test_masking_hides_exactly_the_sink_of_the_previous_step(model, runs, name):
    base = runs["float32"].sinks
    run = masked(model, name, source=base)
    layer, head = HEADS[name]
    path = of(planted_paths(*tokens(base)), name).to_numpy()
    for step in range(STEPS):
        pattern = run.patterns[step, layer][:, head]
        for row, real in enumerate(run.real):
            hidden = [key for key in torch.nonzero(real)[:, 0].tolist() if (pattern[row, real][:, key] == 0).all()]
            assert hidden == ([] if step == 0 else [path[row, step - 1]]), (step, row)


@pytest.mark.parametrize("name", MOVING)
def test_a_moving_sink_escapes_the_mask_of_the_previous_step(model, run, name):
    assert (of(masked(model, name).sinks.detect(), name) == of(planted_sinks(*tokens(run.sinks)), name)).all()


@pytest.mark.parametrize("name", STATIC)
def test_a_static_sink_is_masked_every_second_step(model, run, name):
    track = masked(model, name).sinks  # masked at one step, it is not found there and so not masked at the next
    there = of(track.detect(), name)
    assert (
        there.isel(step=slice(0, None, 2)) == of(planted_sinks(*tokens(run.sinks)), name).isel(step=slice(0, None, 2))
    ).all()
    assert not there.isel(step=slice(1, None, 2)).any()
    size = track.data["is_real"].sum("pos").to_numpy()[:, None]
    highest = of(track.scores(), name).isel(step=slice(1, None, 2)).max("pos")
    np.testing.assert_allclose(highest, np.broadcast_to(size / (size - 1), highest.shape), rtol=1e-4)
