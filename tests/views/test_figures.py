"""Figures and the terminal view, on planted tracks and a real run."""

import io

import numpy as np
import pytest
from rich.console import Console

import sinklens
from sinklens.sinks import build_track
from sinklens.tasks.word_problems import held_out
from sinklens.views import most_moving_head, sink_map, sink_path, sink_paths, terminal


@pytest.fixture
def planted():
    """Two heads over four steps of five positions: head 0 stays on position 1, head 1 moves 0 → 4 → 2 → 3."""
    score = np.full((1, 4, 1, 2, 5), 0.5, dtype=np.float32)
    score[0, :, 0, 0, 1] = 3
    for step, place in enumerate((0, 4, 2, 3)):
        score[0, step, 0, 1, place] = 3
    places = np.zeros((1, 4, 5), dtype=bool)
    places[0, :2, 3:] = True
    attrs = {"model": "planted", "prompt_length": 2}
    return build_track(
        score, np.zeros((1, 4, 5), int), places, places, np.ones((1, 5), bool), np.zeros((1, 5), int), attrs
    )


def test_the_most_moving_head_is_the_one_that_moves(planted):
    assert most_moving_head(planted) == (0, 1)


def test_the_path_drawn_out_is_that_of_the_head_asked_for(planted):
    ax = sink_path(planted, 0, 1)
    highlighted = next(line for line in ax.get_lines() if line.get_label() == "layer 0, head 1")
    assert highlighted.get_xdata().tolist() == [0, 1, 2, 3]
    assert highlighted.get_ydata().tolist() == [0, 4, 2, 3]
    shade = ax.get_images()[0].get_array()
    white = (shade[..., :3] == 1).all(-1)
    assert white.T.tolist() == (~planted.data["masked"].to_numpy()[0]).tolist()


def test_the_map_shows_the_scores_and_marks_the_strongest(planted):
    ax = sink_map(planted, layer=0, head=1)
    np.testing.assert_allclose(ax.get_images()[0].get_array(), planted.scores()[0, :, 0, 1])
    assert ax.get_lines()[0].get_xdata().tolist() == [0, 4, 2, 3]
    mean = sink_map(planted)
    np.testing.assert_allclose(mean.get_images()[0].get_array(), planted.scores()[0].mean(("layer", "head")))


def test_axes_are_labelled_and_given_back(planted):
    ax = sink_map(planted)
    assert planted.plot(layer=0, head=0, ax=ax) is ax
    assert "position" in ax.get_xlabel()
    assert "step" in ax.get_ylabel()
    assert len(sink_paths([planted, planted]).axes) == 2


def test_the_terminal_shows_a_line_per_step_and_tokens_as_they_are(tiny_llada):
    run = sinklens.generate(tiny_llada, "Question: [red]Tom[/red] has 2 apples. [/]\nAnswer:")
    text = io.StringIO()
    terminal.show(tiny_llada, run, Console(file=text, width=300, highlight=False))
    lines = [line for line in text.getvalue().splitlines() if "│" in line]
    assert len(lines) == 24
    masked = [line.split("│")[0].count("░") for line in lines]
    assert masked == list(range(23, -1, -1))


def test_control_characters_and_newlines_are_spelled_out(tiny_llada):
    newline = tiny_llada.tokenizer("\n", add_special_tokens=False).input_ids[0]
    assert terminal.token_text(tiny_llada, newline) == "⏎"
    bell = tiny_llada.tokenizer("\x1b", add_special_tokens=False).input_ids
    assert "\x1b" not in "".join(terminal.token_text(tiny_llada, token) for token in bell)
    assert terminal.token_text(tiny_llada, tiny_llada.mask_token_id) == "░"


def test_problem_texts_fit_the_shipped_models_context(tiny_llada):
    longest = max(len(tiny_llada.tokenizer(problem.prompt).input_ids) for problem in held_out())
    assert longest + 24 <= tiny_llada.cfg.n_ctx
