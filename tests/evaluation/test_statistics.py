"""Intervals and paired tests agree with naive computations and published values."""

import itertools
import math

import numpy as np
import pytest

from sinklens.errors import SettingError
from sinklens.evaluation.statistics import Accuracy, holm, paired


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
    for lost, gained in itertools.product(range(7), repeat=2):
        base = np.array([True] * lost + [False] * gained + [True] * 5 + [False] * 4)
        changed = np.array([False] * lost + [True] * gained + [True] * 5 + [False] * 4)
        n = lost + gained
        seen = math.comb(n, lost)
        p = sum(math.comb(n, k) for k in range(n + 1) if math.comb(n, k) <= seen) / 2**n
        found = paired(base, changed)
        assert (found.lost, found.gained, found.total) == (lost, gained, n + 9)
        assert math.isclose(found.p, p, rel_tol=1e-9)
        assert math.isclose(found.difference, (gained - lost) / (n + 9))


def test_the_interval_is_the_bootstrap_over_samples():
    rng = np.random.default_rng(3)
    base, changed = rng.random(200) < 0.8, rng.random(200) < 0.6
    naive = []
    for _ in range(4000):
        chosen = rng.integers(200, size=200)
        naive.append(changed[chosen].mean() - base[chosen].mean())
    found = paired(base, changed, seed=1)
    np.testing.assert_allclose([found.low, found.high], np.percentile(naive, [2.5, 97.5]), atol=0.012)
    assert paired(base, changed, seed=1) == found
    assert found.low < found.difference < found.high < 0


def test_equal_runs_have_a_difference_of_zero():
    verdicts = np.array([True, False, True])
    found = paired(verdicts, verdicts)
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


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
