"""Stratified statistics against loops, and their intervals against resampled prompts."""

import numpy as np
import pytest

from sinklens.analyses.estimates.strata import compare, correlation_within
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
    assert [float(found.low), float(found.high)] == pytest.approx([low, high], abs=0.15 * (high - low))


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
    assert float(found.value) == pytest.approx(np.corrcoef(*[part[known] for part in away])[0, 1])
    assert found.high < -0.8


def test_a_matched_estimate_within_groups_is_that_of_loops_over_groups_and_strata():
    group, parts = np.arange(15) % 3, parts_of()
    for difference in (False, True):
        wide = [np.zeros((15, 120)) for _ in parts]
        for prompt in range(15):
            for part, one in zip(wide, parts, strict=True):
                part[prompt, 40 * group[prompt] : 40 * group[prompt] + 40] = one[prompt]
        found = compare(parts, 0, difference, group)
        assert float(found.found.value) == pytest.approx(naive(wide, difference))
        assert (found.groups, found.found.n) == (3, 15)


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


def test_a_p_value_is_small_exactly_where_the_interval_over_groups_excludes_no_difference():
    for seed in range(12):
        noise = np.random.default_rng(seed)
        group, n = np.repeat(np.arange(6), 5), np.full((30, 1), 20.0)
        a, b = (noise.binomial(20, rate, (30, 1)).astype(float) for rate in (0.45, 0.35))
        for difference in (False, True):
            found = compare([a, n, b, n], 0, difference, group)
            outside = not found.found.low <= (0 if difference else 1) <= found.found.high
            assert outside == (found.found.p < 0.05)
