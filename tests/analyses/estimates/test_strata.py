"""Stratified statistics against loops, and their intervals against resampled prompts."""

from dataclasses import astuple

import numpy as np
import pytest
import xarray as xr

import sinklens.analyses.estimates.strata as module
from sinklens.analyses.estimates.strata import comparable_share, compare, correlation_within, two_groups
from sinklens.utils import estimates


def parts_of(seed=0, prompts=15, strata=40):
    noise = np.random.default_rng(seed)
    n, m = noise.integers(0, 4, (2, prompts, strata)).astype(float)
    return [noise.binomial(n.astype(int), 0.5).astype(float), n, noise.binomial(m.astype(int), 0.25).astype(float), m]


def naive(parts, difference):
    above = below = weight = 0.0
    for a, n, b, m in zip(*(part.sum(axis=0) for part in parts), strict=True):
        if n and m:
            above, below, weight = above + a * m / (n + m), below + b * n / (n + m), weight + n * m / (n + m)
    return (above - below) / weight if difference else above / below


@pytest.mark.parametrize("difference", [False, True])
def test_estimate_and_interval_equal_those_of_loops_over_drawn_prompts(difference):
    parts = parts_of()
    found, share, _ = compare(parts, 0, difference)
    assert float(found.value) == pytest.approx(naive(parts, difference))
    assert share == 1
    noise, values = np.random.default_rng(5), []
    for _ in range(600):
        drawn = noise.integers(0, 15, 15)
        values.append(naive([part[drawn] for part in parts], difference))
    low, high = np.percentile(values, [2.5, 97.5])
    width = high - low
    assert float(found.low) == pytest.approx(low, abs=0.15 * width)
    assert float(found.high) == pytest.approx(high, abs=0.15 * width)


def test_the_interval_does_not_depend_on_how_many_strata_fit_in_memory(monkeypatch):
    whole = compare(parts_of(), 3)
    monkeypatch.setattr(module, "CHUNK", 7)
    assert astuple(compare(parts_of(), 3).found) == pytest.approx(astuple(whole.found), nan_ok=True)


def test_strata_with_one_group_drop_out_and_are_counted():
    a, n = np.array([[2.0, 6.0]]), np.array([[4.0, 6.0]])
    b, m = np.array([[1.0, 0.0]]), np.array([[4.0, 0.0]])
    found, share, _ = compare([a, n, b, m])
    assert float(found.value) == 2
    assert share == 0.25
    assert np.isnan(found.low)  # one prompt
    nothing, share, _ = compare([a[:, 1:], n[:, 1:], b[:, 1:], m[:, 1:]])
    assert np.isnan(nothing.value)
    assert share == 0


def test_a_correlation_within_strata_ignores_differences_between_them():
    noise = np.random.default_rng(0)
    stratum = np.arange(30.0)
    x, y = stratum + noise.normal(size=(20, 30)), stratum + noise.normal(size=(20, 30))
    assert np.corrcoef(x.ravel(), y.ravel())[0, 1] > 0.9
    found = correlation_within(x, y).found
    assert found.low < 0 < found.high
    y -= 2 * (x - stratum)
    y[3, 4] = np.nan
    found = correlation_within(x, y).found
    known = ~np.isnan(y)
    away = [np.where(known, part, np.nan) - np.nanmean(np.where(known, part, np.nan), axis=0) for part in (x, y)]
    expected = np.corrcoef(*[part[known] for part in away])[0, 1]
    assert float(found.value) == pytest.approx(expected)
    assert found.high < -0.8


def test_resamples_of_one_prompt_have_no_correlation():
    """Two prompts: half of the resamples draw one of them twice, and nothing varies in those."""
    found = correlation_within(np.array([[0.1, 0.7], [0.3, 0.2]]), np.array([[0.4, 0.1], [0.2, 0.9]])).found
    assert -1 <= found.low <= found.high <= 1


def test_two_groups_sum_events_and_places_where_each_group_is():
    events = xr.DataArray([[[1.0, 2.0], [np.nan, 4.0]]], dims=("prompt", "step", "place"))
    first = xr.DataArray([[[True, False], [True, False]]], dims=("prompt", "step", "place"))
    a, n, b, m = two_groups(events, events.notnull().astype(float).where(events.notnull()), first)
    assert a.tolist() == [[1, 0, 0, 0]]
    assert n.tolist() == [[1, 0, 0, 0]]
    assert b.tolist() == [[0, 2, 0, 4]]
    assert m.tolist() == [[0, 1, 0, 1]]


def templates(prompts=120, seed=0, effect=1.0):
    """Two templates. The first mostly has masks at a place and few sinks, the second words and many.

    Within a template, sinks are `effect` times as likely on masks as on words.
    """
    noise = np.random.default_rng(seed)
    group = np.arange(prompts) % 2
    mask = noise.random((prompts, 6)) < np.where(group == 0, 0.8, 0.2)[:, None]
    chance = np.where(group == 0, 0.15, 0.6)[:, None] * np.where(mask, effect, 1.0)
    sink = noise.random((prompts, 6)) < chance
    return group, [part.astype(float) for part in (sink & mask, mask, sink & ~mask, ~mask)]


def test_places_of_different_templates_reverse_a_comparison_that_groups_do_not():
    """Simpson's paradox at the same place: masks seem avoided, although they are sinks as often, or more often."""
    group, parts = templates()
    old, new = compare(parts), compare(parts, group=group)
    assert old.found.high < 0.7
    assert new.found.low < 1 < new.found.high
    group, parts = templates(effect=1.6)
    old, new = compare(parts), compare(parts, group=group)
    assert old.found.high < 1
    assert float(new.found.value) == pytest.approx(1.6, rel=0.25)


def test_a_matched_estimate_within_groups_is_that_of_loops_over_groups_and_strata():
    group, parts = np.arange(15) % 3, parts_of()
    for difference in (False, True):
        wide = [np.zeros((15, 120)) for _ in parts]
        for prompt in range(15):
            for part, one in zip(wide, parts, strict=True):
                part[prompt, 40 * group[prompt] : 40 * group[prompt] + 40] = one[prompt]
        found = compare(parts, 0, difference, group)
        assert float(found.found.value) == pytest.approx(naive(wide, difference))
        assert found.groups == 3
        assert found.found.n == 15


def test_the_share_that_stays_comparable_counts_groups():
    n, m = np.array([[2.0], [3.0], [0.0]]), np.array([[0.0], [0.0], [4.0]])
    assert comparable_share(n, m) == 1
    assert comparable_share(n, m, np.array([0, 1, 1])) == pytest.approx(3 / 5)
    found = compare([n, n, m, m], group=np.array([0, 1, 1]))
    assert found.share == pytest.approx(3 / 5)
    assert compare([n, n, m, m], group=np.array([0, 1, 2])).share == 0


def test_a_correlation_between_templates_is_none_within_them():
    noise = np.random.default_rng(0)
    group = np.arange(60) % 6
    x, y = (group[:, None] / 2 + 0.3 * noise.normal(size=(60, 8)) for _ in range(2))
    assert correlation_within(x, y).found.low > 0.8
    within = correlation_within(x, y, group=group)
    assert within.found.low < 0 < within.found.high
    assert correlation_within(x, y, group=group, within=False).found.value > 0.8


def test_one_group_is_a_sample_of_prompts():
    parts = parts_of()
    alone, grouped = compare(parts), compare(parts, group=np.zeros(15, dtype=int))
    assert astuple(alone.found) == pytest.approx(astuple(grouped.found), nan_ok=True)
    assert grouped.groups == 0


def coverage(groups, each, between, studies, grouped=True):
    """How often the interval of a rate difference of 0 contains it, where groups have their own difference."""
    noise, inside = np.random.default_rng(1), 0
    for study in range(studies):
        group = np.repeat(np.arange(groups), each)
        away = noise.normal(0, between, groups)[group][:, None]
        n = np.full((len(group), 1), 20.0)
        a, b = (noise.binomial(20, np.clip(0.4 + sign * away, 0, 1)).astype(float) for sign in (0.5, -0.5))
        found = compare([a, n, b, n], study, difference=True, group=group if grouped else None).found
        inside += found.low <= 0 <= found.high
    return inside / studies


@pytest.mark.extended
@pytest.mark.parametrize("groups", [4, 7, 20])
@pytest.mark.parametrize("between", [0.0, 0.1])
def test_intervals_over_groups_cover_the_mean_of_all_groups(groups, between, monkeypatch):
    monkeypatch.setattr(estimates, "RESAMPLES", 300)
    assert coverage(groups, 10, between, 400) >= 0.92


@pytest.mark.extended
def test_intervals_over_prompts_do_not_cover_it_where_groups_differ(monkeypatch):
    monkeypatch.setattr(estimates, "RESAMPLES", 300)
    assert coverage(7, 10, 0.1, 200, grouped=False) < 0.8


def test_a_p_value_is_small_exactly_where_the_interval_over_groups_excludes_no_difference():
    for seed in range(12):
        noise = np.random.default_rng(seed)
        group, n = np.repeat(np.arange(6), 5), np.full((30, 1), 20.0)
        a, b = (noise.binomial(20, rate, (30, 1)).astype(float) for rate in (0.45, 0.35))
        for difference in (False, True):
            found = compare([a, n, b, n], 0, difference, group)
            outside = not found.found.low <= (0 if difference else 1) <= found.found.high
            assert outside == (found.found.p < 0.05)
