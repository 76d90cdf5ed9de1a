"""Figures of planted tracks and of tables."""

import warnings

import numpy as np
import pandas as pd
import pytest
from planting import planted as planted_track
from planting import with_sinks
from tracks import made

import sinklens
from sinklens.errors import SinklensError
from sinklens.sinks.labels import plain, short, token_label, token_labels, token_ticks
from sinklens.sinks.palette import COLOURS
from sinklens.views import (
    color_map,
    curves,
    figures,
    interval_dots,
    most_moving_head,
    panels,
    sink_map,
    sink_path,
    stillest_head,
)


@pytest.fixture
def planted():
    """Two heads over four steps of five positions: head 0 stays on position 1, head 1 moves 0 → 4 → 2 → 3."""
    places = np.zeros((1, 4, 5), dtype=bool)
    places[0, :2, 3:] = True
    score = with_sinks([[[1, place]] for place in (0, 4, 2, 3)], length=5, strength=3.0, low=0.5)
    return planted_track(score, masked=places, committed=places, prompt_length=2)


def test_a_head_whose_sink_moves_ranks_above_one_whose_strongest_key_moves():
    """Head 0 has a sink that moves once; head 1 has no sink, and its largest score moves at every step."""
    score = np.full((1, 4, 1, 2, 8), 0.5, dtype=np.float32)
    for step, (sink, key) in enumerate(zip((1, 1, 5, 5), (0, 4, 2, 3), strict=True)):
        score[0, step, 0, 0, sink], score[0, step, 0, 1, key] = 9, 2
    track = planted_track(score)
    assert most_moving_head(track) == (0, 0)
    marks = [line for line in sink_path(track, 0, 0).get_lines() if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in marks] == [4, 0]  # all filled
    marks = [line for line in sink_path(track, 0, 1).get_lines() if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in marks] == [4, 4]  # all hollow


def test_the_most_moving_and_the_stillest_head_and_ties_between_them(planted):
    assert (most_moving_head(planted), stillest_head(planted)) == ((0, 1), (0, 0))
    score = with_sinks([[[1, 2, 3]], [[1, 2, 3]]])
    score[0, :, 0, 1] *= 2  # ties go to the stronger
    assert stillest_head(planted_track(score)) == most_moving_head(planted_track(score)) == (0, 1)


def test_the_highlighted_path_is_that_of_the_requested_head(planted):
    ax = sink_path(planted, 0, 1, color=(0.0, 1.0, 0.0), shade="#0000ff")
    highlighted = next(line for line in ax.get_lines() if line.get_label() == "layer 0, head 1")
    assert (highlighted.get_xdata().tolist(), highlighted.get_ydata().tolist()) == ([0, 1, 2, 3], [0, 4, 2, 3])
    assert highlighted.get_color() == (0.0, 1.0, 0.0)
    shaded = (ax.get_images()[0].get_array() == (0, 0, 1, 1)).all(-1)
    assert shaded.T.tolist() == planted.data["masked"].to_numpy()[0].tolist()


def test_a_map_shows_the_scores_of_its_steps_and_marks_the_strongest_keys(planted):
    ax = sink_map(planted, layer=0, head=1)
    np.testing.assert_allclose(ax.get_images()[0].get_array(), planted.scores()[0, :, 0, 1])
    assert ax.get_lines()[0].get_xdata().tolist() == [0, 4, 2, 3]
    mean = sink_map(planted)
    np.testing.assert_allclose(mean.get_images()[0].get_array(), planted.scores()[0].mean(("layer", "head")))
    some = sink_map(planted, 0, 1, steps=slice(2, 4))
    np.testing.assert_allclose(some.get_images()[0].get_array(), planted.scores()[0, 2:, 0, 1])
    assert some.yaxis.get_major_formatter()(0, 0) == "2"  # the number in the run


def colour_bar(ax):
    """The label of the colour bar beside `ax`, on one line."""
    bars = [other for other in ax.figure.axes if other.get_label() == "<colorbar>"]
    return " ".join(bars[-1].get_ylabel().split())


def test_a_map_names_the_unit_of_its_scores():
    track = planted_track([[[[[1.0, 0.9, 0.8, 1.6, 0.7]]]]], causal=True)
    ax = sink_map(track)
    assert colour_bar(ax) == "attention received, column sum (uniform = 1)"
    ax = sink_map(track, unit="visible")
    assert colour_bar(ax) == "mean attention of the queries that see the key"
    np.testing.assert_allclose(ax.get_images()[0].get_array()[0], [0.2, 0.225, 0.8 / 3, 0.8, 0.7], rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_steps_missing_from_a_row_are_blank():
    score = np.concatenate([with_sinks([[[2]], [[3]]])] * 2)
    score[1, 1] = np.nan
    ax = sink_map(planted_track(score), row=1)
    assert np.ma.getmaskarray(ax.get_images()[0].get_array())[1].all()
    np.testing.assert_array_equal(ax.get_lines()[0].get_xdata(), [2, np.nan])


AWKWARD = {1: "<mask>", 3: "$\\frac{", 4: "\n\n", 5: " a_b", 6: "_c$", 7: "中", 8: " ", 9: "x" * 40, 10: "\x1b"}


def test_a_runs_labels_are_its_final_tokens_and_named_tracks_are_titled(tiny_llada):
    run = sinklens.generate(tiny_llada, "Question: 2 + 3?\nAnswer:", gen_length=8)
    assert token_labels(run.sinks) == token_labels(run.sinks, tokens=run.tokens[0].numpy())
    assert token_labels(run.sinks) != token_labels(run.sinks, tokens=run.canvas[0, -2].numpy())
    figure = figures.sink_paths({"a_b": run.sinks})
    assert figure.axes[0].get_title().startswith("a_b\ntiny-llada: ")
    figure.canvas.draw()
    assert figure._suptitle.get_window_extent().width < figure.bbox.width


@pytest.mark.filterwarnings("error")
def test_awkward_tokens_are_shown_verbatim():
    """Two dollar signs do not start a formula, and a character missing from the font is shown by its code point."""
    track = planted_track(with_sinks([[[2]]]), token_id=np.array([[[3, 4, 5, 6, 7, 8, 9, 10, 1, -1]]]), words=AWKWARD)
    names = ["\\$\\frac{", "⏎⏎", "a_b", " _c\\$", "U+4E2D", "␣", "x" * 15 + "…", "\\x1b", "░", "░"]
    assert token_labels(track) == names
    ax = sink_map(track)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_xticklabels()] == names
    assert "token" in ax.get_xlabel()


def test_padding_has_no_label_and_other_ids_can_label_the_positions():
    track = planted_track(with_sinks([[[2]]]), real=[[False] + [True] * 9], words={5: "five", 6: "six"})
    assert token_labels(track) == ["", *["five"] * 9]
    assert token_labels(track, tokens=np.full(10, 6))[1:] == ["six"] * 9
    assert token_labels(track, tokens=np.full(10, 8))[1] == "⟨8⟩"


@pytest.mark.parametrize("length", [30, 100, 512])
def test_labels_are_limited_to_those_that_fit_and_include_the_strongest(length):
    _, (ax,) = panels(1)
    ax.set_xlim(0, length)
    weight = np.zeros(length)
    weight[[3, length // 2, length - 1]] = 5.0
    token_ticks(ax.xaxis, [f"t{place}" for place in range(length)], weight, limit=40)
    shown = [int(tick) for tick in ax.get_xticks()]
    assert {3, length // 2, length - 1} <= set(shown)
    assert min(length, 20) <= len(shown) <= 40


def test_model_names_appear_verbatim_in_the_legend():
    assert short("/models/_a$b$") == r" _a\$b\$"
    table = pd.DataFrame(
        {"model": ["_a$b$", "c"], "at": [1.0, 1.0], "estimate": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]}
    )
    ax = curves(table, "at")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [r" _a\$b\$", "c"]
    ax.figure.canvas.draw()
    assert (plain("a"), token_label("\t\r")) == ("a", "⇥\\x0d")


def interval_lines():
    return pd.DataFrame(
        {
            "model": ["a", "a", "b", "b"],
            "measure": ["x", "y", "x", "y"],
            "estimate": [0.2, 0.4, np.nan, np.nan],
            "low": [0.1, np.nan, np.nan, np.nan],
            "high": [0.5, np.nan, np.nan, np.nan],
        }
    )


def test_dots_are_at_the_estimates_and_bars_span_the_intervals():
    ax = interval_dots(interval_lines(), "measure", names={"x": "the x"}, line=0.3)
    dots, ends, (bars,) = ax.containers[0]
    assert dots.get_xdata().tolist() == [0.2, 0.4]
    assert [end.get_xdata().tolist() for end in ends] == [[0.1, 0.4], [0.5, 0.4]]
    np.testing.assert_allclose(bars.get_segments()[0][:, 0], [0.1, 0.5])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["the x", "y"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b (not measured)"]
    assert ax.get_lines()[-1].get_xdata() == [0.3, 0.3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert interval_dots(interval_lines().head(0), "measure").get_yticklabels() == []


def test_curves_show_the_table():
    ax = curves(interval_lines().query("model == 'a'").assign(epsilon=[1.0, 2.0]), "epsilon")
    assert ax.get_lines()[0].get_xydata().tolist() == [[1.0, 0.2], [2.0, 0.4]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (
            lambda track: sink_map(track, steps=slice(9, 12)),
            "selects no step of this track; it has 3 steps, 0 to 2",
        ),
        (
            lambda track: sink_map(track, 0, 0, tokens=np.array([1, 2])),
            "tokens has 2 ids for 9 positions; give run",
        ),
        (lambda track: sink_map(track, ax=3), "ax must be axes of matplotlib, such as ax of .*; got int"),
        (lambda track: panels(0), "count must be an integer of at least 1; got 0"),
        (lambda track: figures.sink_paths([track] * 2, ax=panels(1)[1]), "ax has 1 axes for 2 panels; give one"),
        (lambda track: figures.sink_paths(track, ax="left"), "ax must be axes of matplotlib, .*; got str"),
        (lambda track: figures.sink_paths([]), "there is no track to draw; give at least one"),
        (lambda track: figures.most_moving_head(track, 2), "batch 2 does not exist; this track has 2"),
        (lambda track: figures.stillest_head(track, -3), "batch -3 does not exist; this track has 2"),
    ],
)
def test_invalid_input_of_figures_is_rejected(draw, text):
    with pytest.raises(SinklensError, match=text):
        draw(made(False).track)


def test_a_part_of_a_track_keeps_the_numbers_of_its_run():
    track = made(False).track.isel(step=[0, 2], layer=1, head=[2], batch=1)
    for ax in (sink_map(track, 0, 0), figures.sink_path(track, -1, -1)):
        ax.figure.canvas.draw()
        axis = ax.yaxis if ax.get_ylabel() == "step" else ax.xaxis
        assert [axis.get_major_formatter()(place) for place in (0, 1, 0.5, 2)] == ["0", "2", "", ""]
    assert sink_map(track, 0, 0).get_title() == "made: layer 1, head 2"
    assert figures.sink_path(track, 0, 0).get_legend().get_texts()[0].get_text() == "layer 1, head 2"


def test_without_a_caption_a_figure_has_its_axes_and_colors_alone(planted):
    figure = figures.sink_paths({"one": planted}, caption=False)
    drawn = [sink_map(planted, 0, 1, caption=False), sink_path(planted, 0, 1, caption=False), figure.axes[0]]
    assert [ax.get_title() for ax in drawn] == ["", "", "one"]
    (own,) = panels(1)[1]
    assert figures.sink_paths(planted, ax=own, caption=False) is own.figure
    assert (figure.get_suptitle(), own.get_title()) == ("", "")
    assert own.get_ylabel() == "position of the strongest key (by column sum)"
    assert [ax.get_xlabel() for ax in drawn] == ["position", "step", "step"]
    assert drawn[0].images[0].get_cmap() == color_map()
    assert [line.get_color() for line in drawn[1].get_lines() if line.get_marker() == "o"][:1] == [COLOURS[1]]
