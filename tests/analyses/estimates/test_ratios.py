"""Comparisons of heavy-tailed quantities: against naive formulas, and their coverage beside that of the mean."""

from math import nan as NAN

import numpy as np
import pandas
import pytest
from scipy import stats

from sinklens.analyses.estimates.ratios import geometric, median, ratio_rows, ratio_table
from sinklens.utils.estimates import Estimate, bootstrap


@pytest.mark.parametrize("number", [6, 7, 20, 51])
def test_the_median_lies_between_the_order_statistics_with_the_binomial_s_probability(number):
    found = median(np.arange(1.0, number + 1))
    rank = int(found.low)
    assert (found.high, found.value) == (number + 1 - rank, (number + 1) / 2)
    assert stats.binom.cdf(rank - 1, number, 0.5) <= 0.025 < stats.binom.cdf(rank, number, 0.5)


def test_few_values_leave_the_median_open_and_missing_ones_are_left_out():
    assert median(np.array([3.0, NAN, 1.0])) == Estimate(2.0, -np.inf, np.inf, 2)
    assert np.isnan(median(np.array([NAN])).value)


def test_rows_of_a_claim_are_the_t_interval_of_the_logs_and_the_sign_test():
    noise = np.random.default_rng(0)
    first, second = noise.lognormal(1, 1, 30), noise.lognormal(0, 1, 30)
    first[0], second[1] = NAN, 0
    rows = pandas.DataFrame(ratio_rows("m", "claim", first, second)).set_index("measure")
    expected = stats.ttest_1samp(np.log(first[2:] / second[2:]), 0)
    assert rows.loc["ratio", "prompts"] == 28
    assert rows.loc["ratio", "estimate"] == pytest.approx(stats.gmean(first[2:] / second[2:]))
    np.testing.assert_allclose(rows.loc["ratio", ["low", "high"]].tolist(), np.exp(expected.confidence_interval()))
    assert rows.loc["ratio", "p"] == pytest.approx(expected.pvalue)
    larger = (first > second)[1:]
    wilson = stats.binomtest(int(larger.sum()), 29).proportion_ci(method="wilson")
    assert rows.loc["larger", ["estimate", "low", "high"]].tolist() == pytest.approx([larger.mean(), *wilson], abs=1e-6)
    assert rows.loc["larger", "p"] == pytest.approx(stats.binomtest(int(larger.sum()), 29).pvalue)
    table = ratio_table({"m": {"claim": (first, second), "none": (second, second)}})
    assert table["p_holm"][0] == pytest.approx(expected.pvalue * table["p"].count())


def test_a_mean_of_heavy_tails_is_covered_too_rarely_and_a_ratio_as_often_as_stated():
    """Planted: x / y is 1.5 on the geometric mean, in 20 prompts whose top tenth holds most of the mean."""
    rng, mean, ratio = np.random.default_rng(4), 0, 0
    for _ in range(600):
        y = rng.lognormal(0, 2, 20)
        x = y * 1.5 * rng.lognormal(0, 0.7, 20)
        found = bootstrap(x)
        truth = 1.5 * np.exp(2**2 / 2 + 0.7**2 / 2)
        mean += found.low <= truth <= found.high
        logs = geometric(np.log(x / y))
        ratio += logs.low <= 1.5 <= logs.high
    assert mean / 600 < 0.75
    assert 0.93 <= ratio / 600 <= 0.97
