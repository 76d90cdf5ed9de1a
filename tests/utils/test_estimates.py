"""Limits and tests agree with naive computations, another library's and published values."""

import itertools
import math
import warnings
from math import nan as NAN

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import ttest_1samp
from statsmodels.stats.proportion import confint_proportions_2indep, proportion_confint

from sinklens.errors import SettingError
from sinklens.utils.estimates import (
    RESAMPLES,
    bootstrap,
    holm,
    outcomes,
    paired,
    pooled,
    proportion,
    score_interval,
    score_p,
    student,
    unpaired,
)


def naive(statistic, number, seed):
    """The 2.5 and 97.5 percentiles of `statistic` over resamples, each a list of prompt indices."""
    draws = np.random.default_rng(seed).multinomial(number, [1 / number] * number, size=RESAMPLES)
    found = [statistic([prompt for prompt, times in enumerate(draw) for _ in range(times)]) for draw in draws]
    return np.percentile([value for value in found if not np.isnan(value)], [2.5, 97.5])


@pytest.mark.parametrize("total", [1, 3, 25, 500])
def test_a_proportion_has_wilsons_limits_which_contain_it_exactly(total):
    for right in {0, total // 3, total}:
        found, share = proportion(right, total), right / total
        expected = proportion_confint(right, total, method="wilson")
        np.testing.assert_allclose([found.low, found.high], expected, atol=1e-9)
        assert found.low <= share <= found.high
        assert right or found.low == 0
        assert right < total or found.high == 1
    assert math.isnan(proportion(0, 0).value)
    assert str(proportion(3, 4)) == "0.750 [0.301, 0.954] of 4"


@pytest.mark.parametrize(("right", "total", "others", "number"), [(40, 50, 31, 60), (0, 20, 3, 30), (7, 7, 9, 9)])
def test_unpaired_limits_are_those_of_statsmodels(right, total, others, number):
    found = unpaired(proportion(right, total), proportion(others, number))
    expected = confint_proportions_2indep(others, number, right, total, method="newcomb", compare="diff")
    np.testing.assert_allclose([found.low, found.high], expected, atol=1e-9)
    assert found.n == min(total, number)


def test_mcnemars_p_value_is_a_sum_over_all_splits():
    """lost ~ Binomial(lost + gained, 1/2): add up all splits at least as unlikely as the observed one."""
    for lost, gained in itertools.product((0, 1, 2, 5), repeat=2):
        base = np.array([True] * lost + [False] * gained + [True] * 5 + [False] * 4)
        changed = np.array([False] * lost + [True] * gained + [True] * 5 + [False] * 4)
        n = lost + gained
        seen = math.comb(n, lost)
        p = sum(math.comb(n, k) for k in range(n + 1) if math.comb(n, k) <= seen) / 2**n
        found = paired(base, changed)
        assert (found.lost, found.gained, found.difference.n) == (lost, gained, n + 9)
        assert math.isclose(found.difference.p, p, rel_tol=1e-9)
        assert math.isclose(found.difference.value, (gained - lost) / (n + 9))


def tango(lost, gained, total):
    """Tango's interval from his closed form of the nuisance parameter, on a fine grid of differences."""
    grid = np.linspace(-1, 1, 400_001)
    b = -(gained + lost) + (2 * total - gained + lost) * grid
    c = -lost * grid * (1 - grid)
    q = (np.sqrt(np.maximum(b**2 - 8 * total * c, 0)) - b) / (4 * total)
    inside = (gained - lost - total * grid) ** 2 <= 1.959964**2 * total * (2 * q + grid * (1 - grid)) + 1e-9
    return grid[inside][[0, -1]]


@pytest.mark.parametrize(("lost", "gained", "total"), [(0, 0, 50), (9, 1, 50), (0, 4, 25), (50, 0, 50), (70, 40, 500)])
def test_paired_limits_are_tangos(lost, gained, total):
    base = np.array([True] * lost + [False] * gained + [True] * (total - lost - gained))
    changed = np.array([False] * lost + [True] * gained + [True] * (total - lost - gained))
    found = paired(base, changed).difference
    np.testing.assert_allclose([found.low, found.high], tango(lost, gained, total), atol=2e-5)
    same = outcomes(changed.astype(float) - base, -1, 1)  # with a width where all runs agree
    np.testing.assert_allclose([same.value, same.low, same.high], [found.value, found.low, found.high])


@pytest.mark.parametrize("total", [25, 400])
def test_score_limits_of_two_values_are_wilsons_of_statsmodels(total):
    right = np.arange(total + 1)
    low, high = score_interval(np.stack([total - right, right], axis=-1), (0, 1))
    np.testing.assert_allclose([low, high], proportion_confint(right, total, method="wilson"), atol=1e-9)


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
        assert abs(counts @ values / 50 - limit) / math.sqrt(variance / 50) == pytest.approx(1.959964, abs=1e-3)


def test_the_score_test_rejects_what_its_limits_exclude():
    counts = np.random.default_rng(2).integers(0, 7, size=(300, 5))
    low, high = score_interval(counts, (-2, -1, 0, 1, 2))
    p = score_p(counts, (-2, -1, 0, 1, 2), 0.3)
    np.testing.assert_array_equal(p < 0.05, (low > 0.3) | (high < 0.3))
    assert 0 < (p < 0.05).sum() < 300
    assert score_p(np.array([0, 5, 0]), (-1, 0, 1)) == 1


def test_holms_correction_on_a_worked_example():
    """Smallest times 4, next times 3, …, never falling, never above 1; NaN is no test."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.6, NAN, 0.5]), [1.0, NAN, 1.0])


OUTSIDE = r"integers from 0 to 1, or NaN; got (-1|0\.5|2)\. Give the range"
REFUSED = [
    (lambda: proportion(5, 4), r"5 of 4 samples cannot be right"),
    (lambda: paired(np.array([True, False]), np.ones(3, dtype=bool)), r"the same samples, at least one; got 2 and 3"),
    (lambda: paired(np.zeros(0, dtype=bool), np.zeros(0, dtype=bool)), r"got 0 and 0"),
    (lambda: paired(np.zeros(2), np.zeros(2)), r"lists of True and False; got float64 values"),
    (lambda: outcomes(np.array([1.0, -1.0, NAN]), 0, 1), OUTSIDE),
    (lambda: outcomes(np.array([1.0, 0.5]), 0, 1), OUTSIDE),
    (lambda: outcomes(np.array([[0.0, 1.0], [2.0, 0.0]]), 0, 1), OUTSIDE),
]


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_counts_and_values_out_of_range_are_refused(unchecked, call, match):
    with pytest.raises(SettingError, match=match):
        call()


def test_the_limits_of_a_mean_equal_those_of_resampling_prompts():
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
    found = bootstrap(values, seed=3)
    assert found.value == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx(tuple(naive(lambda drawn: float(np.mean(values[drawn])), 5, 3)))
    assert found.n == 5


def test_units_without_a_value_are_excluded_entry_by_entry():
    values = np.array([[1.0, NAN, NAN], [3.0, 2.0, NAN], [NAN, 4.0, NAN], [5.0, NAN, NAN]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bootstrap(values, seed=1)
    assert found.n.tolist() == [3, 2, 0]
    np.testing.assert_allclose(found.value, [3.0, 3.0, NAN])

    def first(drawn):
        known = [values[prompt, 0] for prompt in drawn if not np.isnan(values[prompt, 0])]
        return sum(known) / len(known) if known else NAN

    np.testing.assert_allclose([found.low[0], found.high[0]], naive(first, 4, 1))
    assert np.isnan([found.low[2], found.high[2]]).all()
    right = outcomes(np.array([1.0, 1.0, 0.0, NAN, 1.0, 1.0]), 0, 1)
    assert (right.value, right.n) == (0.8, 5)
    np.testing.assert_allclose([right.low, right.high], [proportion(4, 5).low, proportion(4, 5).high])


@pytest.mark.parametrize("values", [np.array([[2.0]]), np.array([[2.0], [NAN]])])
@pytest.mark.parametrize("of", [bootstrap, lambda values: outcomes(values, 0, 2)])
def test_one_unit_gives_an_estimate_without_limits(values, of):
    found = of(values)
    assert found.value.tolist() == [2.0]
    assert np.isnan([found.low[0], found.high[0]]).all()
    assert found.n.tolist() == [1]


def test_a_pooled_ratio_weights_units_by_their_counts():
    """3 of 4 and 0 of 96 are 3 % together, not 37.5 %."""
    part, total = np.array([3.0, 0.0, 2.0]), np.array([4.0, 96.0, 20.0])
    found = pooled(np.divide, [part, total], seed=5)
    assert found.value == pytest.approx(5 / 120)
    expected = naive(lambda drawn: part[drawn].sum() / total[drawn].sum(), 3, 5)
    assert (found.low, found.high) == pytest.approx(tuple(expected))


def test_students_limits_and_p_value_are_scipys():
    values = np.random.default_rng(1).normal(0.3, 1, size=9)
    found = student(values.mean(), values.std(ddof=1) / 3, 8, 9)
    expected = ttest_1samp(values, 0)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval()))
    assert [student(mean, 0.0, 8, 9).p for mean in (0.0, 0.5)] == [1, 0]
    assert math.isnan(student(0.5, 0.0, 0, 1).low)
