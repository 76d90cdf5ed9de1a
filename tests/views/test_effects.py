"""Figures of effects: their labels, their scales, what they show without data, and the bars of a split score."""

import numpy as np
import pytest
import xarray as xr
from pandas import DataFrame

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


KINDS = {"x": "strong", "y": "random"}


def costs():
    """Two models and two measures with two orders, two numbers of keys and two kinds of keys, model b with more."""
    columns = ["model", "measure", "order", "top_k", "pick", "estimate"]
    lines = [
        (m, q, o, k, p, 0.1 if m == "a" else 0.4)
        for m in "ab" for q in ("cost", "kl") for o in ("u", "v") for k in (5, 1) for p in KINDS
    ]  # fmt: skip
    frame = DataFrame(lines, columns=columns)
    return frame.assign(low=frame["estimate"] - 0.05, high=frame["estimate"] + 0.05)


def test_intervals_have_a_panel_per_model_measure_and_value_and_one_scale_per_column():
    names, kinds = {"u": "up", "v": "down"}, {"along": "order", "by": "pick", "series": KINDS}
    figure = effects.interval_panels(costs(), {"cost": "lost"}, panel="top_k", names=names, **kinds)
    assert [ax.get_title() for ax in figure.axes] == ["a: 5", "a: 1", "b: 5", "b: 1"]
    for ax in figure.axes:
        assert [label.get_text() for label in ax.get_yticklabels()] == ["up", "down"]
        assert ax.get_xlabel() == "lost"
        assert ax.get_xlim()[0] < 0.05
        assert ax.get_xlim()[1] > 0.45
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["strong", "random"]
    assert [dots.get_xdata().tolist() for dots, *_ in figure.axes[2].containers] == [[0.4, 0.4], [0.4, 0.4]]
    both = effects.interval_panels(costs().query("top_k == 1"), {"cost": "lost", "kl": "KL"}, names={}, **kinds)
    assert [ax.get_xlabel() for ax in both.axes] == ["lost", "KL"] * 2


def test_intervals_over_numbers_are_curves_and_rows_without_a_number_are_left_out():
    frame = costs().query("order == 'u'").assign(keys=lambda rows: rows["top_k"].where(rows["pick"] == "x"))
    settings = {"along": "keys", "by": "pick", "series": KINDS, "xlabel": "keys"}
    first, _ = effects.interval_panels(frame, {"kl": "KL"}, **settings).axes
    assert (first.get_title(), first.get_xlabel(), first.get_ylabel()) == ("a", "keys", "KL")
    assert first.lines[0].get_xdata().tolist() == [1, 5]
    assert [line.get_label() for line in first.lines if not line.get_label().startswith("_")] == ["strong"]
    (empty,) = effects.interval_panels(frame.assign(keys=np.nan), {"kl": "KL"}, **settings).axes
    assert "not known" in empty.texts[0].get_text()


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
    widths = [bar.get_width() for bar in ax.patches]
    assert widths == pytest.approx([-2.0, 1.0, 0.5, 0.2, 0.1, *[0.01] * 7, 0.03])
    assert ax.get_title() == "who wrote the key: head 1.3, step 4, key 17, mean over queries"
    heads = writer_bars(TABLE, "query")
    assert heads.patches[0].get_width() == pytest.approx(-4.0)
    assert heads.patches[0].get_facecolor() == heads.patches[4].get_facecolor()  # both heads
