"""Tables of means with their limits, p values and verdicts."""

import itertools
from math import nan as NAN

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy.stats import ttest_1samp

from sinklens.analyses import difference_table, interval_table
from sinklens.analyses.estimates.power import smallest_t
from sinklens.analyses.estimates.tables import judged, p_value, verdict
from sinklens.utils.estimates import mcnemar


def test_a_table_has_a_row_per_model_measure_and_entry():
    data = xr.Dataset({"a": (("prompt", "unit"), [[1.0, 2.0], [3.0, 6.0]])}, coords={"unit": ["x", "y"]})
    table = interval_table({"one": data, "two": data * 2}, ["a"])
    rows = [("one", "x", 2.0, 2), ("one", "y", 4.0, 2), ("two", "x", 4.0, 2), ("two", "y", 8.0, 2)]
    assert [*table[["model", "unit", "estimate", "prompts"]].itertuples(index=False, name=None)] == rows
    assert (table["low"] <= table["estimate"]).all()


def test_differences_are_taken_prompt_by_prompt():
    """The models differ by exactly 1 on every prompt, though each varies by far more than that."""
    first = xr.Dataset({"a": ("prompt", [0.0, 50.0, 100.0])})
    table = difference_table({"one": first, "two": first + 1, "three": first - 2}, ["a"])
    assert table["model"].tolist() == ["two − one", "three − one"]
    np.testing.assert_allclose(table[["estimate", "low", "high"]], [[1, 1, 1], [-2, -2, -2]])
    assert difference_table({"one": first}, ["a"]).empty


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


def test_no_loss_at_all_still_has_an_interval_in_a_table():
    data = xr.Dataset({"cost": ("prompt", np.zeros(50)), "kl": ("prompt", np.zeros(50))})
    table = interval_table({"m": data}, ["cost", "kl"]).set_index("measure")
    assert table.loc["cost", ["low", "high"]].tolist() == pytest.approx([-0.0713, 0.0713], abs=1e-4)
    assert table.loc["kl", ["low", "high"]].tolist() == [0, 0]  # not an outcome: no range is known
    other = difference_table({"m": data, "n": data}, ["cost"])
    assert other["low"].item() < 0 < other["high"].item()


def test_where_prompts_differ_by_group_alone_the_table_is_a_t_test_over_groups():
    """Eight prompts of each of six groups; outcomes that differ in no group have the limits over prompts."""
    of_group = np.array([0.4, 1.1, 0.2, 0.9, -0.3, 0.6])
    values = {"kl": np.repeat(of_group, 8), "cost": np.repeat([1.0, 0, 0, 0, 0, 1], 8), "right": np.zeros(48),
              "changed": np.arange(48) > 0}  # fmt: skip
    at = {"prompt_group": ("prompt", np.repeat(list("abcdef"), 8))}
    data = xr.Dataset({name: ("prompt", value.astype(float)) for name, value in values.items()}, at)
    (kl, cost, right, changed), (_, _, alone, _) = (
        judged(interval_table({"m": one}, list(values), null=0.0)).to_dict("records")
        for one in (data, data.drop_vars("prompt_group"))
    )
    expected = ttest_1samp(of_group, 0)
    assert (kl["groups"], cost["groups"], right["groups"]) == (6, 6, 0)
    np.testing.assert_allclose([kl["low"], kl["high"]], expected.confidence_interval(), atol=0.03)
    assert (kl["p"], changed["p"]) == (pytest.approx(expected.pvalue, abs=0.004), pytest.approx(0, abs=1e-4))
    assert kl["shown"] == pytest.approx(smallest_t(6, of_group.std(ddof=1), 0.05 / 4), rel=0.05)
    assert (changed["verdict"], cost["verdict"], cost["why"][:26]) == (
        "holds", "cannot tell", "too few groups of prompts:"
    )  # fmt: skip
    assert [right[name] for name in ("low", "high", "p")] == [alone[name] for name in ("low", "high", "p")]


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
    assert 0 < p_value(values * 2, (-2, 2)) < 0.1


def test_claims_are_corrected_over_each_models_own_claims():
    rows = [("a", 0.04, 0.1, 0.3), ("a", 0.01, 0.2, 0.4), ("b", 0.04, 0.1, 0.3), ("b", NAN, NAN, NAN)]
    table = pd.DataFrame([{"model": m, "p": p, "estimate": low, "low": low, "high": high} for m, p, low, high in rows])
    found = judged(pd.concat([table, table.iloc[:1].assign(p=0.03)], ignore_index=True))
    assert found["p_holm"].tolist()[:3] == pytest.approx([0.06, 0.03, 0.04])
    assert found["verdict"].tolist() == ["cannot tell", "holds", "holds", "not measured", "cannot tell"]
