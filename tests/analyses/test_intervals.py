"""Bootstrap intervals compared with loops that draw the same prompts, and tables of them."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from sinklens.analyses.intervals import (
    RESAMPLES,
    bootstrap,
    difference_table,
    interval_rows,
    interval_table,
    judged,
    outcomes,
    p_value,
    pooled,
    verdict,
)
from sinklens.errors import SettingError
from sinklens.evaluation.statistics import Accuracy, mcnemar, paired

NAN = float("nan")


def naive(statistic, number, seed):
    """The 2.5 and 97.5 percentiles of `statistic` over resamples, each a list of prompt indices."""
    draws = np.random.default_rng(seed).multinomial(number, [1 / number] * number, size=RESAMPLES)
    found = [statistic([prompt for prompt, times in enumerate(draw) for _ in range(times)]) for draw in draws]
    return np.percentile([value for value in found if not np.isnan(value)], [2.5, 97.5])


def test_the_interval_of_a_mean_equals_that_of_resampling_prompts():
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
    found = bootstrap(values, seed=3)
    assert found.estimate == pytest.approx(4.0)
    expected = naive(lambda drawn: float(np.mean(values[drawn])), 5, 3)
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.prompts == 5


def test_prompts_without_a_value_are_excluded_entry_by_entry():
    values = np.array([[1.0, NAN, NAN], [3.0, 2.0, NAN], [NAN, 4.0, NAN], [5.0, NAN, NAN]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bootstrap(values, seed=1)
    assert found.prompts.tolist() == [3, 2, 0]
    np.testing.assert_allclose(found.estimate, [3.0, 3.0, NAN])

    def first(drawn):
        known = [values[prompt, 0] for prompt in drawn if not np.isnan(values[prompt, 0])]
        return sum(known) / len(known) if known else NAN

    np.testing.assert_allclose([found.low[0], found.high[0]], naive(first, 4, 1))
    assert np.isnan([found.low[2], found.high[2]]).all()


@pytest.mark.parametrize("values", [np.array([[2.0]]), np.array([[2.0], [NAN]])])
def test_one_prompt_gives_an_estimate_without_an_interval(values):
    found = bootstrap(values)
    assert found.estimate.tolist() == [2.0]
    assert np.isnan([found.low[0], found.high[0]]).all()
    assert found.prompts.tolist() == [1]


def test_a_pooled_ratio_weights_prompts_by_their_counts():
    """3 of 4 and 0 of 96 are 3 % together, not 37.5 %."""
    part, total = np.array([3.0, 0.0, 2.0]), np.array([4.0, 96.0, 20.0])
    found = pooled(np.divide, [part, total], seed=5)
    assert found.estimate == pytest.approx(5 / 120)
    expected = naive(lambda drawn: part[drawn].sum() / total[drawn].sum(), 3, 5)
    assert (found.low, found.high) == pytest.approx(tuple(expected))


def test_the_interval_of_a_normal_mean_matches_the_textbook():
    values = np.random.default_rng(0).normal(10, 2, size=400)
    found = bootstrap(values)
    half = 1.96 * values.std() / 20
    assert found.low == pytest.approx(values.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.02)


def test_a_table_has_a_row_per_model_measure_and_entry():
    data = xr.Dataset({"a": (("prompt", "unit"), [[1.0, 2.0], [3.0, 6.0]])}, coords={"unit": ["x", "y"]})
    table = interval_table({"one": data, "two": data * 2}, ["a"])
    assert table["model"].tolist() == ["one", "one", "two", "two"]
    assert table["unit"].tolist() == ["x", "y", "x", "y"]
    assert table["estimate"].tolist() == [2.0, 4.0, 4.0, 8.0]
    assert (table["low"] <= table["estimate"]).all()
    assert table["prompts"].tolist() == [2] * 4


def test_differences_are_taken_prompt_by_prompt():
    """The models differ by exactly 1 on every prompt, though each varies by far more than that."""
    first = xr.Dataset({"a": ("prompt", [0.0, 50.0, 100.0])})
    table = difference_table({"one": first, "two": first + 1, "three": first - 2}, ["a"])
    assert table["model"].tolist() == ["two − one", "three − one"]
    np.testing.assert_allclose(table[["estimate", "low", "high"]], [[1, 1, 1], [-2, -2, -2]])
    assert difference_table({"one": first}, ["a"]).empty


def test_rows_are_labelled_on_every_axis():
    rows = interval_rows("m", "x", bootstrap(np.arange(12.0).reshape(2, 2, 3)), {"layer": [0, 1], "head": "abc"})
    assert [(row["layer"], row["head"], row["estimate"]) for row in rows][3:5] == [(1, "a", 6.0), (1, "b", 7.0)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.9, 0.8, 1.0), "above"),
        ((0.1, 0.0, 0.2), "below"),
        ((0.6, 0.4, 0.8), "cannot tell"),
        ((0.9, NAN, NAN), "cannot tell"),
        ((NAN, NAN, NAN), "not measured"),
        ((0.5, 0.5, 0.5), "below"),
    ],
)
def test_a_verdict_requires_the_entire_interval_on_one_side(numbers, expected):
    assert verdict(*numbers, 0.5, "above", "below") == expected


@pytest.mark.parametrize("values", [[1.0, -1.0, NAN], [1.0, 0.5], [[0.0, 1.0], [2.0, 0.0]]])
def test_outcomes_beyond_their_range_are_refused(values):
    with pytest.raises(SettingError, match=r"integers from 0 to 1, or NaN; got (-1|0\.5|2)\. Give the range"):
        outcomes(np.array(values), 0, 1)


def test_outcomes_have_the_intervals_of_the_evaluation():
    right = np.array([1.0, 1.0, 0.0, NAN, 1.0, 1.0])
    found = outcomes(right, 0, 1)
    assert (found.estimate, found.prompts) == (0.8, 5)
    np.testing.assert_allclose([found.low, found.high], Accuracy(4, 5).interval)
    base, changed = np.array([True] * 30 + [False] * 10), np.array([True] * 21 + [False] * 17 + [True] * 2)
    pair, found = paired(base, changed), outcomes(changed.astype(float) - base, -1, 1)
    np.testing.assert_allclose([found.estimate, found.low, found.high], [pair.difference, pair.low, pair.high])


def test_no_loss_at_all_still_has_an_interval_in_a_table():
    data = xr.Dataset({"cost": ("prompt", np.zeros(50)), "kl": ("prompt", np.zeros(50))})
    table = interval_table({"m": data}, ["cost", "kl"]).set_index("measure")
    assert table.loc["cost", ["low", "high"]].tolist() == pytest.approx([-0.0713, 0.0713], abs=1e-4)
    assert table.loc["kl", ["low", "high"]].tolist() == [0, 0]  # not an outcome: no range is known
    other = difference_table({"m": data, "n": data}, ["cost"])
    assert other["low"].item() < 0 < other["high"].item()


def test_a_share_of_heads_is_not_an_outcome():
    values = np.array([0.25, 0.5, 0.0, 1.0])
    table = interval_table({"m": xr.Dataset({"right": ("prompt", values)})}, ["right"])
    expected = bootstrap(values)
    assert table[["low", "high"]].to_numpy().tolist() == [[float(expected.low), float(expected.high)]]


def test_the_p_value_of_a_mean_is_the_share_of_sign_changes_at_least_as_far_from_the_null():
    values = np.array([0.9, -0.2, 0.4, 0.7, 0.1, 0.8, -0.1, 0.35]) + 2
    sums = [abs(np.dot(signs, values - 2)) for signs in itertools.product((-1, 1), repeat=8)]
    exact = np.mean(np.array(sums) >= abs((values - 2).sum()) - 1e-12)
    assert p_value(values, null=2.0) == pytest.approx(exact, abs=0.005)
    assert p_value(np.append(values, NAN), null=2.0) == p_value(values, null=2.0)
    assert p_value(np.zeros(9)) == 1
    assert np.isnan(p_value(np.array([1.0, NAN])))


def test_the_p_value_of_paired_outcomes_is_mcnemars():
    values = np.array([-1.0] * 3 + [1.0] * 11 + [0.0] * 20)
    assert p_value(values, (-1, 1)) == mcnemar(3, 11)
    assert p_value(values, (-1, 1), null=0.1) != mcnemar(3, 11)
    doubled = values * 2
    assert 0 < p_value(doubled, (-2, 2)) < 0.1


def test_claims_are_corrected_over_each_models_own_claims():
    rows = [("a", 0.04, 0.1, 0.3), ("a", 0.01, 0.2, 0.4), ("b", 0.04, 0.1, 0.3), ("b", NAN, NAN, NAN)]
    table = pd.DataFrame([{"model": m, "p": p, "estimate": low, "low": low, "high": high} for m, p, low, high in rows])
    found = judged(pd.concat([table, table.iloc[:1].assign(p=0.03)], ignore_index=True))
    assert found["p_holm"].tolist()[:3] == pytest.approx([0.06, 0.03, 0.04])
    assert found["verdict"].tolist() == ["cannot tell", "holds", "holds", "not measured", "cannot tell"]
