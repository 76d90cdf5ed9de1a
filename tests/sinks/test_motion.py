"""Measures of moving sinks: against loops on random tracks with missing data, and against planted sinks."""

import itertools
import warnings
from math import nan as NAN

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from planting import planted, with_sinks

import sinklens
from sinklens.errors import TrackError
from sinklens.sinks import EpsilonOverMean, motion
from sinklens.tasks import held_out

LOW = EpsilonOverMean(0.6)


def path(positions, length=8, strength=6.0):
    """A track of one head whose strongest key is at `positions`, one per step; None for an all-zero pattern."""
    score = with_sinks([[[position]] for position in positions], length, strength)
    score[0, [position is None for position in positions]] = 0.0
    return planted(score)


def random_track(kind, seed):
    """Three rows: row 1 begins with two padding positions, row 2 ends after four of seven steps; some heads are 0."""
    rng = np.random.default_rng(seed)
    score = rng.gamma(0.5, 2.0, size=(3, 7, 3, 4, 9))
    score[:, 1:] = np.where(rng.random(score[:, 1:].shape) < 0.6, score[:, :-1], score[:, 1:])  # some persistence
    score[rng.random(score.shape[:4]) < 0.1] = 0.0
    score[0, :, 2, 3] = 0.0
    if kind == "autoregressive":
        for step in range(7):
            score[:, step, ..., 3 + step :] = NAN
    if kind == "holes":
        score[rng.random(score.shape) < 0.15] = NAN
    score[2, 4:] = NAN
    real = np.ones((3, 9), dtype=bool)
    real[1, :2] = False
    return planted(score, real=real)


RANDOM = [(kind, seed) for kind in ("diffusion", "autoregressive", "holes") for seed in range(3)]


@pytest.fixture(params=RANDOM, ids=str)
def track(request):
    """Each of the random tracks."""
    return random_track(*request.param)


def places(track, *names):
    """Every index of the named axes."""
    return itertools.product(*(range(track.data.sizes[name]) for name in names))


def naive_main(track):
    """Strongest key, from a loop over the positions."""
    score, real = track.data["score"].to_numpy(), track.data["is_real"].to_numpy()
    main = np.full(score.shape[:4], NAN)
    for b, t, layer, h in places(track, "batch", "step", "layer", "head"):
        best = 0.0
        for j in range(score.shape[-1]):
            if real[b, j] and score[b, t, layer, h, j] > best:
                best, main[b, t, layer, h] = score[b, t, layer, h, j], j
    return main


def naive_existing(track):
    score, real = track.data["score"].to_numpy(), track.data["is_real"].to_numpy()
    exists = np.zeros(score.shape, dtype=bool)
    for place in np.ndindex(score.shape):
        exists[place] = real[place[0], place[-1]] and not np.isnan(score[place])
    return exists


def mean_or_nan(values):
    values = [value for value in values if not np.isnan(value)]
    return sum(values) / len(values) if values else NAN


def variance(values):
    return sum((value - sum(values) / len(values)) ** 2 for value in values) / len(values)


def assert_same(found, expected):
    np.testing.assert_allclose(np.asarray(found, dtype=float), expected, rtol=1e-5, atol=1e-7)


def test_the_strongest_key_has_the_largest_column_sum(track):
    main = motion.strongest_key(track)
    assert main.dims == ("batch", "step", "layer", "head")
    assert_same(main, naive_main(track))
    assert_same(main.fillna(-1), track.top(1).isel(rank=0))
    assert_same(motion.existing(track), naive_existing(track))


def test_jumps_and_drift_equal_loops(track):
    main, moves, line = naive_main(track), motion.jumps(track), motion.drift(track)
    for b, layer, h in places(track, "batch", "layer", "head"):
        at = {"batch": b, "layer": layer, "head": h}
        p = main[b, :, layer, h]
        pairs = [(x, y) for x, y in itertools.pairwise(p) if not (np.isnan(x) or np.isnan(y))]
        far = [abs(y - x) for x, y in pairs if x != y]
        expected = [len(far), len(pairs), len(far) / len(pairs) if pairs else NAN, mean_or_nan(far)]
        assert_same([moves[name].isel(at).item() for name in ("changes", "pairs", "share", "distance")], expected)
        t = np.flatnonzero(~np.isnan(p))
        assert line["steps"].isel(at).item() == len(t)
        slope = np.polyfit(t, p[t], 1)[0] if len(t) > 1 else NAN
        fit = np.corrcoef(t, p[t])[0, 1] if len(t) > 1 and len(set(p[t])) > 1 else NAN
        assert_same(
            [line[name].isel(at).item() for name in ("slope", "correlation", "r_squared")], [slope, fit, fit**2]
        )


def test_static_shares_equal_loops(track):
    main, found, exists = naive_main(track), track.detect(LOW).to_numpy(), naive_existing(track)
    shares = motion.static_share(track), motion.static_sinks(track.detect(LOW), motion.existing(track))
    for b in range(3):
        heads = [{*main[b, :, layer, h]} for layer, h in places(track, "layer", "head")]
        heads = [{p for p in head if not np.isnan(p)} for head in heads]
        assert_same(shares[0][b], mean_or_nan([len(head) == 1 for head in heads if head]))
        stays = []
        for layer, h, j in places(track, "layer", "head", "pos"):
            is_sink = [found[b, t, layer, h, j] for t in range(7) if exists[b, t, layer, h, j]]
            stays += [all(is_sink)] if any(is_sink) else []
        assert_same(shares[1][b], mean_or_nan(stays))


def test_lifetimes_equal_loops(track):
    found, exists = track.detect(LOW).to_numpy(), naive_existing(track)
    lives = []
    for b, layer, h, j in places(track, "batch", "layer", "head", "pos"):
        last = max((t for t in range(7) if exists[b, t, layer, h].any()), default=-1)
        start = None
        for t in range(8):
            now = t < 7 and found[b, t, layer, h, j]
            if now and start is None:
                start = t
            if not now and start is not None:
                lives.append((b, layer, h, j, start, t - start, t - 1 == last))
                start = None
    table = motion.lifetimes(track.detect(LOW), motion.existing(track))
    assert list(table.columns) == ["batch", "layer", "head", "pos", "start", "length", "censored"]
    assert [tuple(life) for life in table.itertuples(index=False)] == lives
    assert len(lives) > 50
    assert table["length"].sum() == found.sum()


def naive_jaccard(one, other):
    one, other = set(np.flatnonzero(one)), set(np.flatnonzero(other))
    return len(one & other) / len(one | other) if one | other else NAN


@pytest.mark.fast_cases(3)
def test_overlap_equals_loops(track):
    sinks, exists = track.detect(LOW), motion.existing(track)
    found, there = sinks.to_numpy(), naive_existing(track)
    steps, layers, heads = (motion.overlap(sinks, exists, along) for along in ("step", "layer", "head"))
    assert (steps.sizes["step"], layers.sizes["layer"], heads.dims) == (6, 2, ("batch", "step", "layer"))
    for b, t, layer, h in places(track, "batch", "step", "layer", "head"):
        if t:
            both = there[b, t, layer, h].any() and there[b, t - 1, layer, h].any()
            expected = naive_jaccard(found[b, t, layer, h], found[b, t - 1, layer, h]) if both else NAN
            assert_same(steps.isel(batch=b, layer=layer, head=h).sel(step=t), expected)
        if layer:
            both = there[b, t, layer].any() and there[b, t, layer - 1].any()
            union = found[b, t, layer].any(axis=0), found[b, t, layer - 1].any(axis=0)
            assert_same(layers.isel(batch=b, step=t).sel(layer=layer), naive_jaccard(*union) if both else NAN)
        pairs = itertools.combinations(found[b, t, layer], 2)
        assert_same(heads.isel(batch=b, step=t, layer=layer), mean_or_nan([naive_jaccard(x, y) for x, y in pairs]))


def naive_mass(track, pooled):
    """m_t(j) [batch, step, layer, head, pos], NaN at keys that do not exist."""
    score = np.where(naive_existing(track), track.data["score"].to_numpy(), NAN)
    if not pooled:
        return score
    mean = np.full((*score.shape[:2], 1, 1, score.shape[-1]), NAN)
    for b, t, j in places(track, "batch", "step", "pos"):
        mean[b, t, 0, 0, j] = mean_or_nan(score[b, t, :, :, j].ravel())
    return mean


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("detector", [None, EpsilonOverMean(0.3)])
def test_centroid_and_variances_equal_loops(track, pooled, detector):
    mass = naive_mass(track, pooled)
    uneven = motion.spatial_variance(track, pooled)
    centre = motion.centroid(track, detector, pooled)
    spread = motion.temporal_variance(track, detector, pooled)
    assert centre.dims == ("batch", "step") + (() if pooled else ("layer", "head"))
    for b, layer, h in np.ndindex(mass.shape[0], *mass.shape[2:4]):
        at = {"batch": b} if pooled else {"batch": b, "layer": layer, "head": h}
        means = [mean_or_nan(mass[b, :, layer, h, j]) for j in range(9)]
        assert_same(uneven.isel(at), variance([value for value in means if not np.isnan(value)]))
        path = []
        for t in range(7):
            m = {j: mass[b, t, layer, h, j] for j in range(9) if not np.isnan(mass[b, t, layer, h, j])}
            chosen = naive_sinks(m, detector, pooled)
            weight = sum(m[j] for j in chosen)
            path.append(sum(m[j] * j for j in chosen) / weight if weight > 0 else NAN)
        assert_same(centre.isel(at), path)
        path = [value for value in path if not np.isnan(value)]
        assert_same(spread.isel(at), variance(path) if len(path) > 1 else NAN)


def naive_sinks(mass, detector, pooled):
    """Positions of `mass` {j: m(j)} above mean + 2 deviations, or above the mean of the others + ε."""
    if detector is None and pooled:
        return [j for j in mass if mass[j] > np.mean([*mass.values()]) + 2 * np.std([*mass.values()])]
    epsilon = 3.0 if detector is None else detector.epsilon
    return [j for j in mass if mass[j] > sum(mass[k] for k in mass if k != j) / max(1, len(mass) - 1) + epsilon]


def test_pooled_sinks_have_the_share_of_the_computed_queries():
    """Half of the queries are computed, so a score of 2 is half of the attention, not a quarter."""
    data = path([3], strength=2.0).data.assign(
        fresh=(("batch", "step", "layer", "pos"), np.arange(8)[None, None, None] < 4)
    )
    assert motion.centroid(sinklens.SinkTrack(data), EpsilonOverMean(40, unit="percent")).item() == 3


def numbers(track, detector=None):
    return motion.motion_table(track, detector).iloc[0].to_dict()


def test_a_constant_sink_is_static_in_every_measure():
    assert numbers(path([3] * 6)) == pytest.approx(
        {
            "steps": 6, "jumps": 0, "jump_share": 0, "jump_distance": NAN, "drift": 0, "drift_r_squared": NAN,
            "static_share": 1, "sinks": 1, "lifetime": 6, "censored": 1, "static_sinks": 1, "overlap_step": 1,
            "overlap_layer": NAN, "overlap_head": NAN, "spatial_variance": 5.75**2 * 7 / 64, "temporal_variance": 0,
            "pooled_spatial_variance": 5.75**2 * 7 / 64, "pooled_temporal_variance": 0,
        },
        nan_ok=True,
    )  # fmt: skip


def test_the_drift_of_every_other_step_is_still_per_step():
    """Step numbers matter, not the number of steps kept."""
    assert motion.drift(path([1, 2, 3, 4, 5]).isel(step=slice(0, None, 2)))["slope"].item() == 1.0


def test_moves_between_steps_with_a_sink_are_counted_separately():
    """Head 0: a sink moves once; at the last step the strongest key moves but is not a sink. Head 1 has no sink."""
    score = np.full((1, 5, 1, 2, 8), 0.5, dtype=np.float32)
    for step, (place, size) in enumerate(((1, 9), (1, 9), (5, 9), (5, 9), (2, 1))):
        score[0, step, 0, 0, place] = size
        score[0, step, 0, 1, step] = 2
    track = planted(score)
    every, sinks = motion.jumps(track), motion.jumps(track, track.detect())
    assert every["changes"][0, 0].values.tolist() == [2, 4]
    assert (sinks["changes"][0, 0].values.tolist(), sinks["pairs"][0, 0].values.tolist()) == ([1, 0], [3, 0])
    assert float(sinks["share"][0, 0, 0]) == 1 / 3
    assert np.isnan(sinks["share"][0, 0, 1])


def test_undefined_measures_are_nan_without_a_warning():
    """One step, one head: no pair of steps, layers or heads. And a run whose only head is all zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, none = numbers(path([2])), numbers(path([None, None, None]))
    assert {name for name, value in one.items() if np.isnan(value)} == {
        "jumps", "jump_share", "jump_distance", "drift", "drift_r_squared", "overlap_step", "overlap_layer",
        "overlap_head", "temporal_variance", "pooled_temporal_variance",
    }  # fmt: skip
    assert {name: value for name, value in none.items() if not np.isnan(value)} == {
        "steps": 3, "sinks": 0, "spatial_variance": 0, "pooled_spatial_variance": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda found, exists: motion.overlap(found, exists, "pos"), r"along must be step, layer or head; got 'pos'"),
        (
            lambda found, exists: motion.overlap(found.isel(head=0), exists),
            "found must hold bool over batch, step, layer, head",
        ),
        (lambda found, exists: motion.lifetimes(found.astype(float), exists), "found must hold bool"),
        (lambda found, exists: motion.lifetimes(found, exists * 1), r"exists must hold bool over .* existing\(track\)"),
        (
            lambda found, exists: motion.static_sinks(found.isel(step=[0]), exists),
            r"do not belong to the same track, or to",
        ),
        *(
            (lambda found, exists, change=change: motion.jumps(path([1, 2, 3]), change(found)), text)
            for change, text in (
                (lambda found: found.isel(step=[0]), "do not belong to the same track, or to the same part of it"),
                (
                    lambda found: found.isel(layer=0, head=0),
                    "found must hold bool over",
                ),
                (
                    lambda found: found.to_numpy(),
                    r"found must hold bool over",
                ),
            )
        ),
        (lambda found, exists: motion.static_sinks(found, xr.concat([exists] * 2, "batch")), r"take the same rows"),
    ],
)
def test_sinks_that_do_not_belong_together_are_rejected(unchecked, ask, text):
    track = path([1, 2, 3])
    with pytest.raises(TrackError, match=text):
        ask(track.detect(), motion.existing(track))


@pytest.mark.fast_cases(3)
def test_the_table_holds_the_means_of_the_measures(track, tmp_path):
    found, exists = track.detect(LOW), motion.existing(track)
    table = motion.motion_table(track, LOW)
    lives = motion.lifetimes(found, exists)
    assert (table.index.name, table["steps"].tolist()) == ("batch", [7, 7, 4])
    measures = {
        "jump_share": motion.jumps(track)["share"],
        "drift": motion.drift(track)["slope"],
        "overlap_head": motion.overlap(found, exists, "head"),
        "temporal_variance": motion.temporal_variance(track, LOW, pooled=False),
        "pooled_temporal_variance": motion.temporal_variance(track),
    }
    for b in range(3):
        for name, value in measures.items():
            assert_same(table[name][b], mean_or_nan(value.isel(batch=b).to_numpy().ravel()))
        assert_same(table["lifetime"][b], lives.loc[lives["batch"] == b, "length"].mean())
        assert_same(table["sinks"][b], found[b].to_numpy().sum() / exists[b].any("pos").to_numpy().sum())
    table.to_csv(tmp_path / "motion.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "motion.csv", index_col="batch"), table)


@pytest.mark.extended
def test_sinks_move_in_the_diffusion_model_but_not_in_its_autoregressive_twin(tiny_llada, tiny_llama):
    prompts = [problem.prompt for problem in held_out(8)]
    diffusion, autoregressive = (
        motion.motion_table(sinklens.generate(model, prompts).sinks) for model in (tiny_llada, tiny_llama)
    )
    assert (diffusion["static_share"] < autoregressive["static_share"]).all()
    assert diffusion["jump_share"].mean() > 3 * autoregressive["jump_share"].mean()
    assert diffusion["pooled_temporal_variance"].min() > 1 > autoregressive["pooled_temporal_variance"].max()
    assert (diffusion["pooled_spatial_variance"] < autoregressive["pooled_spatial_variance"]).all()
