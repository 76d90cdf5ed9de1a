"""Stratified statistics against loops, and their intervals against resampled prompts."""

import numpy as np
import pytest
import xarray as xr

import sinklens.analyses.strata as module
from sinklens.analyses.strata import compare, correlation_within, two_groups


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
    found, share = compare(parts, 0, difference)
    assert float(found.estimate) == pytest.approx(naive(parts, difference))
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
    for one, other in zip(compare(parts_of(), 3).found, whole.found, strict=True):
        assert one == pytest.approx(other)


def test_strata_with_one_group_drop_out_and_are_counted():
    a, n = np.array([[2.0, 6.0]]), np.array([[4.0, 6.0]])
    b, m = np.array([[1.0, 0.0]]), np.array([[4.0, 0.0]])
    found, share = compare([a, n, b, m])
    assert float(found.estimate) == 2
    assert share == 0.25
    assert np.isnan(found.low)  # one prompt
    nothing, share = compare([a[:, 1:], n[:, 1:], b[:, 1:], m[:, 1:]])
    assert np.isnan(nothing.estimate)
    assert share == 0


def test_a_correlation_within_strata_ignores_differences_between_them():
    noise = np.random.default_rng(0)
    stratum = np.arange(30.0)
    x, y = stratum + noise.normal(size=(20, 30)), stratum + noise.normal(size=(20, 30))
    assert np.corrcoef(x.ravel(), y.ravel())[0, 1] > 0.9
    found = correlation_within(x, y)
    assert found.low < 0 < found.high
    y -= 2 * (x - stratum)
    y[3, 4] = np.nan
    found = correlation_within(x, y)
    known = ~np.isnan(y)
    away = [np.where(known, part, np.nan) - np.nanmean(np.where(known, part, np.nan), axis=0) for part in (x, y)]
    expected = np.corrcoef(*[part[known] for part in away])[0, 1]
    assert float(found.estimate) == pytest.approx(expected)
    assert found.high < -0.8


def test_resamples_of_one_prompt_have_no_correlation():
    """Two prompts: half of the resamples draw one of them twice, and nothing varies in those."""
    found = correlation_within(np.array([[0.1, 0.7], [0.3, 0.2]]), np.array([[0.4, 0.1], [0.2, 0.9]]))
    assert -1 <= found.low <= found.high <= 1


def test_two_groups_sum_events_and_places_where_each_group_is():
    events = xr.DataArray([[[1.0, 2.0], [np.nan, 4.0]]], dims=("prompt", "step", "place"))
    first = xr.DataArray([[[True, False], [True, False]]], dims=("prompt", "step", "place"))
    a, n, b, m = two_groups(events, events.notnull().astype(float).where(events.notnull()), first)
    assert a.tolist() == [[1, 0, 0, 0]]
    assert n.tolist() == [[1, 0, 0, 0]]
    assert b.tolist() == [[0, 2, 0, 4]]
    assert m.tolist() == [[0, 1, 0, 1]]
