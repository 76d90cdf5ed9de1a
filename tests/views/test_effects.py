"""Figures of effects: their labels and scales, and the bars of a split score."""

import numpy as np
import pytest
import xarray as xr

from sinklens.views import effects, writer_bars


def test_a_small_map_shows_numbers_and_a_large_one_only_colours():
    rows, columns = ("layer", [0, 1]), ("head", [0, 1, 2])
    ax = effects.effect_map(np.array([[0.0, 0.5, np.nan], [-0.001, 1.0, 2.0]]), rows=rows, columns=columns, label="KL")
    assert [text.get_text() for text in ax.texts] == ["0.00", "0.50", "0.00", "1.00", "2.00"]
    assert ax.images[0].get_clim() == (0, 2)
    large = effects.effect_map(
        np.ones((9, 24)), rows=("layer", range(9)), columns=("step", range(24)), bounds=(-1.0, 1.0)
    )
    assert not large.texts
    assert [int(label.get_text()) for label in large.get_xticklabels()] == list(range(0, 24, 2))
    assert large.images[0].get_clim() == (-1, 1)


PARTS = [0.5, -2.0, 0.1, 1.0, 0.2, *[0.01] * 10]
NAMES = ["embed", "L0H0", "L0H1", "0_mlp_out", "bias", *(f"L1H{head}" for head in range(10))]
TABLE = xr.Dataset(
    {"from_key_excess": ("writer", PARTS), "from_query_excess": ("writer", np.array(PARTS) * 2)},
    {"writer": NAMES, "kind": ("writer", ["embed", "head", "head", "mlp", "bias", *["head"] * 10])},
    {"layer": 1, "head": 3, "step": 4, "query": -1, "key": 17},
)  # fmt: skip


def test_the_largest_parts_have_bars_and_the_others_share_one():
    ax = writer_bars(TABLE)
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert (names[:5], names[-1]) == (["L0H0", "0_mlp_out", "embed", "bias", "L0H1"], "3 others")
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([-2.0, 1.0, 0.5, 0.2, 0.1, *[0.01] * 7, 0.03])
    assert ax.get_title() == "who wrote the key: head 1.3, step 4, key 17, mean over queries"
    heads = writer_bars(TABLE, "query")
    assert heads.patches[0].get_width() == pytest.approx(-4.0)
    assert heads.patches[0].get_facecolor() == heads.patches[4].get_facecolor()  # both heads
