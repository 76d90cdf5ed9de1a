"""Intervals and paired tests agree with naive computations and published values."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from sinklens.errors import SettingError
from sinklens.evaluation.statistics import Accuracy, holm, paired, score_interval, score_p


def test_wilsons_interval_solves_its_equation():
    """The bounds are the shares p for which |p̂ − p| = z √(p (1 − p) / n)."""
    for right, total in ((458, 500), (1, 10), (250, 500), (13, 14)):
        found = Accuracy(right, total)
        for bound in found.interval:
            assert math.isclose(
                abs(found.share - bound), 1.959964 * math.sqrt(bound * (1 - bound) / total), rel_tol=1e-5
            )
    assert Accuracy(0, 20).interval[0] == 0.0
    assert Accuracy(20, 20).interval[1] == 1.0
    assert math.isnan(Accuracy(0, 0).share)


def test_mcnemars_p_value_is_a_sum_over_all_splits():
    """lost ~ Binomial(lost + gained, 1/2): add up all splits at least as unlikely as the observed one."""
    for lost, gained in itertools.product((0, 1, 2, 5), repeat=2):
        base = np.array([True] * lost + [False] * gained + [True] * 5 + [False] * 4)
        changed = np.array([False] * lost + [True] * gained + [True] * 5 + [False] * 4)
        n = lost + gained
        seen = math.comb(n, lost)
        p = sum(math.comb(n, k) for k in range(n + 1) if math.comb(n, k) <= seen) / 2**n
        found = paired(base, changed)
        assert (found.lost, found.gained, found.total) == (lost, gained, n + 9)
        assert math.isclose(found.p, p, rel_tol=1e-9)
        assert math.isclose(found.difference, (gained - lost) / (n + 9))


def tango(lost, gained, total):
    """Tango's interval from his closed form of the nuisance parameter, on a fine grid of differences."""
    grid = np.linspace(-1, 1, 400_001)
    b = -(gained + lost) + (2 * total - gained + lost) * grid
    c = -lost * grid * (1 - grid)
    q = (np.sqrt(np.maximum(b**2 - 8 * total * c, 0)) - b) / (4 * total)
    inside = (gained - lost - total * grid) ** 2 <= 1.959964**2 * total * (2 * q + grid * (1 - grid)) + 1e-9
    return grid[inside][[0, -1]]


@pytest.mark.parametrize(("lost", "gained", "total"), [(0, 0, 50), (9, 1, 50), (0, 4, 25), (50, 0, 50), (70, 40, 500)])
def test_the_paired_interval_is_tangos(lost, gained, total):
    base = np.array([True] * lost + [False] * gained + [True] * (total - lost - gained))
    changed = np.array([False] * lost + [True] * gained + [True] * (total - lost - gained))
    found = paired(base, changed)
    np.testing.assert_allclose([found.low, found.high], tango(lost, gained, total), atol=2e-5)


def test_with_values_0_and_1_the_score_interval_is_wilsons():
    right = np.arange(26)
    low, high = score_interval(np.stack([25 - right, right], axis=-1), (0, 1))
    expected = np.array([Accuracy(int(number), 25).interval for number in right])
    np.testing.assert_allclose(np.stack([low, high], axis=-1), expected, atol=1e-9)


def test_limits_are_where_the_best_distribution_with_that_mean_is_just_rejected():
    """Over −2 to 2, a general optimiser finds the distribution of a given mean that makes the counts likeliest."""
    counts, values = np.array([2, 5, 30, 9, 4]), np.arange(-2, 3)
    for limit in score_interval(counts, (-2, -1, 0, 1, 2)):
        mean = {"type": "eq", "fun": lambda p, limit=limit: p @ values - limit}
        total = {"type": "eq", "fun": lambda p: p.sum() - 1}
        found = minimize(
            lambda p: -(counts * np.log(p)).sum(), counts / 50, bounds=[(1e-6, 1)] * 5, constraints=[mean, total],
            options={"ftol": 1e-12, "maxiter": 500},
        )  # fmt: skip
        variance = found.x @ (values - limit) ** 2
        distance = abs(counts @ values / 50 - limit) / math.sqrt(variance / 50)
        assert distance == pytest.approx(1.959964, abs=1e-3)


def test_the_score_test_rejects_what_its_interval_excludes():
    counts = np.random.default_rng(2).integers(0, 7, size=(300, 5))
    low, high = score_interval(counts, (-2, -1, 0, 1, 2))
    p = score_p(counts, (-2, -1, 0, 1, 2), 0.3)
    np.testing.assert_array_equal(p < 0.05, (low > 0.3) | (high < 0.3))
    assert 0 < (p < 0.05).sum() < 300
    assert score_p(np.array([0, 5, 0]), (-1, 0, 1)) == 1


def test_equal_runs_may_still_differ_on_other_samples():
    verdicts = np.array([True, False, True] * 10)
    found = paired(verdicts, verdicts)
    assert (found.difference, found.p) == (0.0, 1.0)
    assert found.high == -found.low == pytest.approx(1.959964**2 / (30 + 1.959964**2), rel=1e-5)


def test_holms_correction_on_a_worked_example():
    """Smallest times 4, next times 3, …, never falling, never above 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm({"a": 0.6, "b": 0.5}) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_verdicts_of_different_samples_are_refused():
    with pytest.raises(SettingError, match=r"need the same samples, at least one; got 2 and 3"):
        paired(np.array([True, False]), np.array([True, False, True]))
    with pytest.raises(SettingError, match=r"got 0 and 0"):
        paired(np.zeros(0, dtype=bool), np.zeros(0, dtype=bool))


@pytest.mark.parametrize("total", [1, 3, 25, 500])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_interval_contains_its_share_exactly(total, share):
    low, high = Accuracy(round(share * total), total).interval
    assert 0.0 <= low <= share <= high <= 1.0
