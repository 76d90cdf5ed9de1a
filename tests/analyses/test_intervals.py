"""Bootstrap intervals compared with loops that draw the same prompts, and tables of them."""

import warnings

import numpy as np
import pytest
import xarray as xr

from sinklens.analyses.intervals import (
    RESAMPLES,
    bootstrap,
    difference_table,
    interval_rows,
    interval_table,
    pooled,
    verdict,
)

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
        ((0.6, 0.4, 0.8), "undecided"),
        ((0.9, NAN, NAN), "undecided"),
        ((NAN, NAN, NAN), "not measured"),
        ((0.5, 0.5, 0.5), "below"),
    ],
)
def test_a_verdict_requires_the_entire_interval_on_one_side(numbers, expected):
    assert verdict(*numbers, 0.5, "above", "below") == expected
