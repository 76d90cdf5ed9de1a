"""Comparisons of heavy-tailed quantities: against naive formulas, and their coverage beside that of the mean."""

import numpy as np
import pandas
import pytest
import xarray as xr
from scipy import stats

from sinklens.analyses import interval_table
from sinklens.analyses.estimates.medians import median, typical
from sinklens.analyses.estimates.ratios import KINDS, compared, geometric, ratio_rows, ratio_table
from sinklens.utils.estimates import Estimate, bootstrap

NAN = float("nan")


def test_each_number_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    x, y = rng.lognormal(1, 2, 30), rng.lognormal(0, 2, 30)
    found = compared(x, y)
    logs = np.log(x / y)
    assert found["ratio"].value == pytest.approx(stats.gmean(x / y))
    assert found["ratio"].p == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)
    limits = stats.t.interval(0.95, 29, logs.mean(), stats.sem(logs))
    assert np.log([found["ratio"].low, found["ratio"].high]) == pytest.approx(limits)
    assert found["median"].value == np.median(x - y)
    assert found["above"].value == (x > y).mean()
    wilson = stats.binomtest(int((x > y).sum()), 30).proportion_ci(method="wilson")
    assert (found["above"].low, found["above"].high) == pytest.approx((wilson.low, wilson.high))
    assert found["mean"].value == pytest.approx((x - y).mean())


def test_ties_missing_values_and_zeros_are_left_out_where_they_say_nothing():
    x = np.array([1.0, 2.0, 0.0, 3.0, np.nan, 4.0])
    y = np.array([1.0, 1.0, 1.0, 0.0, 1.0, 2.0])
    found = compared(x, y)
    assert {name: value.n for name, value in found.items()} == {"mean": 5, "median": 5, "above": 4, "ratio": 3}
    assert found["ratio"].value == pytest.approx(4 ** (1 / 3))
    assert found["above"].value == 0.75


@pytest.mark.parametrize("number", [6, 7, 20, 51])
def test_the_median_lies_between_the_order_statistics_with_the_binomial_s_probability(number):
    found = median(np.arange(1.0, number + 1))
    rank = int(found.low)
    assert found.high == number + 1 - rank
    assert found.value == (number + 1) / 2
    assert stats.binom.cdf(rank - 1, number, 0.5) <= 0.025 < stats.binom.cdf(rank, number, 0.5)


def test_few_values_leave_the_median_open_and_missing_ones_are_left_out():
    assert median(np.array([3.0, NAN, 1.0])) == Estimate(2.0, -np.inf, np.inf, 2)
    assert np.isnan(median(np.array([NAN])).value)
    found = typical(np.array([1.0, -1.0, NAN, 2.0, 0.0]))
    assert found["above"] == 0.5
    expected = stats.binomtest(2, 4).proportion_ci(method="wilson")
    assert (found["above_low"], found["above_high"]) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_tables_of_heavy_tailed_means_have_median_and_sign_beside_the_mean():
    data = xr.Dataset(
        {"kl": (("prompt", "pick"), [[1.0, -1.0], [2.0, 3.0], [90.0, 4.0]]), "cost": ("prompt", [0, 1, 1])}
    )
    table = interval_table({"m": data}, ["kl", "cost"]).set_index(["measure", "pick"])
    assert table.loc[("kl", 0), ["estimate", "median", "above"]].tolist() == [31, 2, 1]
    assert table.loc[("kl", 1), "above"] == pytest.approx(2 / 3)
    assert table["median"].isna().tolist() == [False, False, True]
    assert "median" not in interval_table({"m": data}, ["cost"])


def test_rows_of_a_claim_are_the_t_interval_of_the_logs_and_the_sign_test():
    noise = np.random.default_rng(0)
    first, second = noise.lognormal(1, 1, 30), noise.lognormal(0, 1, 30)
    first[0], second[1] = NAN, 0
    rows = pandas.DataFrame(ratio_rows("m", "claim", first, second)).set_index("measure")
    expected = stats.ttest_1samp(np.log(first[2:] / second[2:]), 0)
    assert rows.loc["ratio", "prompts"] == 28
    np.testing.assert_allclose(rows.loc["ratio", ["low", "high"]].tolist(), np.exp(expected.confidence_interval()))
    assert rows.loc["ratio", "p"] == pytest.approx(expected.pvalue)
    larger = (first > second)[1:]
    assert rows.loc["larger", "estimate"] == pytest.approx(larger.mean())
    assert rows.loc["larger", "p"] == pytest.approx(stats.binomtest(int(larger.sum()), 29).pvalue)


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


def test_a_table_decides_by_the_ratio_and_says_what_it_could_have_shown():
    rng = np.random.default_rng(1)
    y = rng.lognormal(0, 3, (40, 2))
    x = y * np.exp(rng.normal([1.0, 0.0], 0.5, (40, 2)))
    part = {"part": ["sink", "other"]}
    first, second = ({"planted": xr.DataArray(values, part, ("prompt", "part"))} for values in (x, y))
    table = ratio_table(first, second).set_index(["part", "number"])
    assert list(KINDS) == table.loc["sink"].index.tolist()
    assert table["verdict"].xs("ratio", level="number").tolist() == ["holds", "cannot tell"]
    assert set(table.drop(index="ratio", level="number")["verdict"]) == {""}
    spread = np.log(x / y)[:, 0].std(ddof=1)
    shown = np.exp((stats.norm.isf(0.05 / 4) + stats.norm.isf(0.2)) * spread / np.sqrt(40))
    assert table.loc[("sink", "ratio"), "shown"] == pytest.approx(shown)
    assert table.loc[("other", "ratio"), "p_holm"] == pytest.approx(table.loc[("other", "ratio"), "p"])
