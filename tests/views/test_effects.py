"""Figures of effects: their labels, their scales, and what they show without data."""

import numpy as np
from pandas import DataFrame

from sinklens.views import effects


def table(**columns):
    """One row per value of the first column, its estimate in the middle of its interval."""
    frame = DataFrame(columns)
    return frame.assign(low=frame["estimate"] - 0.1, high=frame["estimate"] + 0.1)


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


def test_every_model_has_a_row_of_maps_with_its_own_scale():
    lines = [
        (m, way, n, h, v) for m, v in (("a", 1.0), ("b", 8.0)) for way in ("x", "y") for n in (0, 1) for h in (0, 1)
    ]
    frame = DataFrame(lines, columns=["model", "way", "layer", "head", "estimate"])
    figure = effects.head_maps(frame, {"x": "one", "y": "other"}, "KL")
    maps = [ax for ax in figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in maps] == ["a: one", "a: other", "b: one", "b: other"]
    assert [ax.images[0].get_clim()[1] for ax in maps] == [1, 1, 8, 8]


def test_a_model_that_was_not_measured_is_labelled_so():
    lines = [("a", "number", layer, step, np.nan) for layer in (0, 1) for step in (0, 1)]
    frame = DataFrame(lines, columns=["model", "group", "layer", "step", "estimate"])
    (ax,) = effects.patch_maps(frame, {"number": "the number"}).axes
    assert ax.texts[0].get_text() == "not measured"


def test_infinity_is_drawn_after_the_largest_number():
    frame = table(model=["a"] * 3, measure=["kl"] * 3, width=[2, 8, np.inf], estimate=[3.0, 2.0, 0.0])
    (ax,) = effects.doubling_curves(frame, "width", {"kl": "KL"}, "width").axes
    assert ax.lines[0].get_xdata().tolist() == [2, 8, 16]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "8", "all"]
    assert ax.get_xscale() == "log"


def test_each_kind_has_a_curve_in_the_panel_of_its_model_and_measure():
    lines = [(m, q, n, k, 1.0) for m in "ab" for q in ("kl", "right") for n in (2, 4) for k in ("x", "y")]
    frame = DataFrame(lines, columns=["model", "measure", "keys", "kind", "estimate"]).assign(low=0.5, high=1.5)
    kinds, meanings = {"x": "strongest", "y": "random"}, {"right": "right", "kl": "KL", "other": "not in the table"}
    figure = effects.kinds_of_keys(frame, "keys", "kind", kinds, meanings, "keys")
    assert [(ax.get_title(), ax.get_ylabel()) for ax in figure.axes] == [
        ("a", "right"),
        ("a", "KL"),
        ("b", "right"),
        ("b", "KL"),
    ]
    for ax in figure.axes:
        assert [text.get_text() for text in ax.get_legend().get_texts()] == ["strongest", "random"]


def test_confidence_is_shown_overall_and_by_step_for_two_kinds_of_keys():
    keys = {"x": "strongest key", "y": "steady key", "z": "random key"}
    lines = [("a", measure, pick, -0.2) for measure in ("change", "rest") for pick in keys]
    frame = DataFrame(lines, columns=["model", "measure", "pick", "estimate"]).assign(low=-0.3, high=-0.1)
    halves = ("change_attended_step", "change_rest_step")
    lines = [("a", measure, pick, step, -0.2) for measure in halves for pick in keys for step in range(3)]
    steps = DataFrame(lines, columns=["model", "measure", "pick", "step", "estimate"]).assign(low=-0.3, high=-0.1)
    figure = effects.confidence_changes(frame, steps, {"change": "change", "rest": "rest"}, keys)
    assert [ax.get_title() for ax in figure.axes] == ["a", "strongest key masked", "steady key masked"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == list(keys.values())
    nothing = effects.confidence_changes(frame.assign(estimate=np.nan), steps, {}, keys)
    assert "one position is decided at a time" in nothing.axes[0].texts[0].get_text()


def test_costs_have_a_panel_per_model_and_number_of_keys():
    lines = [(m, "cost", o, p, k, 0.1) for m in "ab" for o in ("u", "v") for p in ("x", "y") for k in (1, 5)]
    frame = DataFrame(lines, columns=["model", "measure", "order", "pick", "top_k", "estimate"]).assign(low=0, high=0.2)
    figure = effects.costs_by_order(frame, {"u": "up", "v": "down"}, {"x": "strong", "y": "random"}, "lost")
    assert [ax.get_title() for ax in figure.axes] == [
        "a: 1 key per head",
        "a: 5 keys per head",
        "b: 1 key per head",
        "b: 5 keys per head",
    ]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["up", "down"]


def test_every_layer_has_a_curve_over_the_start_of_patching():
    lines = [("a", "flipped", layer, start, 0.5) for layer in (-1, 0) for start in (0.0, 0.5)]
    frame = DataFrame(lines, columns=["model", "measure", "layer", "start", "estimate"]).assign(low=0.4, high=0.6)
    (ax,) = effects.start_curves(frame).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["embedding", "layer 0"]
