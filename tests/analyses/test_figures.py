"""Figures of studies: their labels, their scales, and what they show without data."""

import numpy as np
from pandas import DataFrame

from sinklens.analyses import figures

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
    figure = figures.interval_panels(costs(), {"cost": "lost"}, panel="top_k", names=names, **kinds)
    assert [ax.get_title() for ax in figure.axes] == ["a: 5", "a: 1", "b: 5", "b: 1"]
    for ax in figure.axes:
        assert [label.get_text() for label in ax.get_yticklabels()] == ["up", "down"]
        assert ax.get_xlabel() == "lost"
        assert ax.get_xlim()[0] < 0.05
        assert ax.get_xlim()[1] > 0.45
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["strong", "random"]
    assert [dots.get_xdata().tolist() for dots, *_ in figure.axes[2].containers] == [[0.4, 0.4], [0.4, 0.4]]
    both = figures.interval_panels(costs().query("top_k == 1"), {"cost": "lost", "kl": "KL"}, names={}, **kinds)
    assert [ax.get_xlabel() for ax in both.axes] == ["lost", "KL"] * 2


def test_intervals_over_numbers_are_curves_and_rows_without_a_number_are_left_out():
    frame = costs().query("order == 'u'").assign(keys=lambda rows: rows["top_k"].where(rows["pick"] == "x"))
    settings = {"along": "keys", "by": "pick", "series": KINDS, "xlabel": "keys"}
    first, _ = figures.interval_panels(frame, {"kl": "KL"}, **settings).axes
    assert (first.get_title(), first.get_xlabel(), first.get_ylabel()) == ("a", "keys", "KL")
    assert first.lines[0].get_xdata().tolist() == [1, 5]
    assert [line.get_label() for line in first.lines if not line.get_label().startswith("_")] == ["strong"]
    assert {ax.get_title() for ax in figures.interval_panels(frame, {"kl": "KL"}, caption=False, **settings).axes} == {
        ""
    }
    (empty,) = figures.interval_panels(frame.assign(keys=np.nan), {"kl": "KL"}, **settings).axes
    assert "not known" in empty.texts[0].get_text()


def test_histograms_show_the_shares_and_empty_panels_the_reason():
    ax = figures.score_histogram(np.array([0, 1, 2.0]), {"m": np.array([0.25, 0.75])}, "sum")
    assert ax.patches[0].get_data().values.tolist() == [0.25, 0.75]
    assert ("uniform = 1" in ax.get_xlabel(), ax.get_title()) == (True, "unit: sum")
    assert figures.nothing_to_show(ax, "m", "no $sinks$").texts[0].get_text() == r"no \$sinks\$"
