"""Medians, signs and log-ratios of heavy-tailed measures, against exact values and by their coverage."""

import numpy as np
import pandas
import pytest
import xarray as xr
from scipy.stats import binom, binomtest, ttest_1samp

from sinklens.analyses.intervals import bootstrap, interval_table
from sinklens.analyses.log_ratios import log_ratio, ratio_rows
from sinklens.analyses.medians import median_interval, typical

NAN = float("nan")


@pytest.mark.parametrize("number", [6, 7, 20, 51])
def test_the_median_lies_between_the_order_statistics_with_the_binomial_s_probability(number):
    median, low, high = median_interval(np.arange(1.0, number + 1))
    rank = int(low)
    assert high == number + 1 - rank
    assert median == (number + 1) / 2
    assert binom.cdf(rank - 1, number, 0.5) <= 0.025 < binom.cdf(rank, number, 0.5)


def test_few_values_leave_the_median_open_and_missing_ones_are_left_out():
    assert median_interval(np.array([3.0, NAN, 1.0])) == (2.0, -np.inf, np.inf)
    assert np.isnan(median_interval(np.array([NAN]))).all()
    found = typical(np.array([1.0, -1.0, NAN, 2.0, 0.0]))
    assert found["above"] == 0.5
    expected = binomtest(2, 4).proportion_ci(method="wilson")
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


def test_a_log_ratio_is_the_t_interval_of_the_logs():
    noise = np.random.default_rng(0)
    first, second = noise.lognormal(1, 1, 30), noise.lognormal(0, 1, 30)
    first[0], second[1] = NAN, 0
    found, p = log_ratio(first, second)
    logs = np.log(first[2:] / second[2:])
    expected = ttest_1samp(logs, 0)
    assert found.prompts == 28
    np.testing.assert_allclose([found.low, found.high], np.exp(expected.confidence_interval()))
    assert p == pytest.approx(expected.pvalue)
    rows = pandas.DataFrame(ratio_rows("m", "claim", first, second)).set_index("measure")
    larger = (first > second)[1:]
    assert rows.loc["larger", "estimate"] == pytest.approx(larger.mean())
    assert rows.loc["larger", "p"] == pytest.approx(binomtest(int(larger.sum()), 29).pvalue)


def test_a_ratio_decides_what_a_difference_of_heavy_tailed_means_cannot():
    """Each prompt costs half as much again under the first condition; a few prompts hold most of the mean."""
    noise = np.random.default_rng(3)
    second = noise.lognormal(0, 2.5, 20)
    first = 1.5 * second * noise.lognormal(0, 0.3, 20)
    difference = bootstrap(first - second + noise.normal(0, 0.3 * second.max(), 20) * 0)
    found, p = log_ratio(first, second)
    assert 1.2 < found.low < 1.5 < found.high < 1.9
    assert p < 1e-4
    assert difference.high / max(float(difference.low), 1e-9) > 5  # its size is unknown


def covered(interval, truth, studies, number=20):
    noise, inside = np.random.default_rng(5), 0
    for _ in range(studies):
        low, high = interval(noise.lognormal(0, 1.8, number), noise)
        inside += low <= truth <= high
    return inside / studies


@pytest.mark.extended
def test_medians_ratios_and_signs_are_covered_where_means_are_not():
    """Twenty prompts of a log-normal KL of which the top tenth holds about 70 %."""
    sample = np.random.default_rng(0).lognormal(0, 1.8, 200_000)
    assert np.sort(sample)[-20_000:].sum() / sample.sum() == pytest.approx(0.7, abs=0.03)
    mean = covered(lambda x, _: (lambda found: (found.low, found.high))(bootstrap(x)), np.exp(1.8**2 / 2), 300)
    median = covered(lambda x, _: median_interval(x)[1:], 1.0, 1000)
    ratio = covered(lambda x, noise: log_ratio(x, noise.lognormal(0, 1.8, 20))[0][1:3], 1.0, 1000)
    above = covered(lambda x, _: tuple(typical(x - 1)[name] for name in ("above_low", "above_high")), 0.5, 1000)
    assert mean < 0.85
    assert min(median, ratio, above) >= 0.93
