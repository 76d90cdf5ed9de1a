"""The layer study on sinks planted layer by layer."""

import numpy as np
import pytest
import xarray as xr
from planting import planted, with_sinks

from sinklens.analyses.layers import Layers, by_layer, trend
from sinklens.tasks.word_problems import held_out


def test_planted_fewer_and_stronger_sinks_are_measured():
    """Layer 0: two heads with sinks of 5 at two positions; layer 1: one head with a sink of 9; layer 2: no sink."""
    score = with_sinks([[[2, 3], [4, None], [None, None]]] * 2, strength=5.0)
    score[0, :, 1, 0, 4] = 9.0
    data = by_layer(planted(score)).isel(prompt=0)
    assert data["count"].values.tolist() == [1, 0.5, 0]
    assert data["places"].values.tolist() == [2, 1, 0]
    assert data["heads"].values.tolist() == [1, 0.5, 0]
    np.testing.assert_array_equal(data["strength"], [5, 9, np.nan])
    np.testing.assert_allclose(data["main_sum"], [[5, 5], [9, 0.25], [0.25, 0.25]])
    np.testing.assert_allclose(data["main_visible"], data["main_sum"] / 10)
    assert float(data["trend_count"]) == pytest.approx(-1)
    assert float(data["trend_strength"]) == pytest.approx(8)  # 4 more over half the depth


def test_a_causal_strongest_key_is_averaged_over_the_queries_that_see_it():
    """Key 3 of 5 is seen by queries 3 and 4: a column sum of 1.6 is a mean of 0.8."""
    data = by_layer(planted([[[[[1.0, 0.9, 0.8, 1.6, 0.7]]]]], causal=True))
    assert float(data["main_visible"][0, 0, 0]) == pytest.approx(0.8)


def test_steps_missing_from_a_row_are_not_counted():
    score = np.concatenate([with_sinks([[[2]], [[3]]])] * 2)
    score[1, 1] = np.nan
    data = by_layer(planted(score))
    assert data["count"].values.tolist() == [[1], [1]]
    assert np.isnan(data["trend_count"]).all()  # one layer has no depth


@pytest.mark.parametrize("missing", [[], [1], [0, 3]])
def test_the_trend_is_the_slope_of_the_least_squares_line(missing):
    values = np.array([3.0, 1.0, 4.0, 1.5, 9.0])
    values[missing] = np.nan
    known = ~np.isnan(values)
    slope = np.polyfit(np.linspace(0, 1, 5)[known], values[known], 1)[0]
    assert float(trend(xr.DataArray(values, dims="layer"))) == pytest.approx(slope)


def test_the_verdict_follows_the_interval(tiny_llada, tiny_llama):
    study = Layers(settings={"gen_length": 4, "steps": 4})
    found = study.run([tiny_llada, tiny_llama], [problem.prompt for problem in held_out(8)])
    for row in found.tables["trend"].itertuples():
        sign = 1 if row.claim.startswith("stronger") else -1
        low, high = sorted((sign * row.low, sign * row.high))
        expected = "cannot tell"
        if row.p_holm <= 0.05:
            expected = "holds" if low > 0 else "the other way" if high <= 0 else "cannot tell"
        assert row.verdict == expected, row
    assert "holds" in found.tables["trend"]["verdict"].tolist()
    assert len(found.tables["map"]) == 2 * 2 * 4 * 6
    figures = study.figures(found.measured, found.examples)
    shown = figures["map"].axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(shown, found.measured["tiny-llada"]["main_sum"].mean("prompt"))
