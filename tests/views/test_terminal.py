"""A run on a terminal: a line per step, and tokens as they are, whatever they spell."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

import sinklens
from sinklens.sinks import SinkTrack
from sinklens.views import most_moving_head, terminal

HOSTILE = ["[red]", "[/]", "\x1b[2J", "a\nb"]


@pytest.fixture(scope="module")
def run(worded):
    return sinklens.generate(worded("llama"), "one two three", gen_length=4)


def test_tokens_are_never_markup_and_control_characters_are_spelled_out(run):
    """A run whose every token is spelled in a hostile way."""
    words = {int(token): HOSTILE[int(token) % 4] for token in run.canvas.unique() if token >= 0}
    track = SinkTrack(run.sinks.data.assign_attrs(vocabulary=json.dumps(words)))
    console = Console(record=True, width=200, color_system=None)
    terminal.show(run.model, replace(run, sinks=track), console)
    text = console.export_text()
    written = {words[int(token)] for token in run.tokens[0, run.prompt_length :]}
    for word in written & {"[red]", "[/]"}:
        assert word in text
    assert written & {"[red]", "[/]"}
    assert "\x1b" not in text


def test_a_line_per_step_shows_what_is_decided_and_the_most_moving_head(run):
    console = Console(record=True, width=300, color_system=None)
    terminal.show(run.model, run, console)
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    assert [line.split("│")[0].count("░") for line in lines] == run.undecided[0, 1:].sum(-1).tolist()
    layer, head = most_moving_head(run.sinks)
    path, found = run.sinks.trajectory(layer, head), run.sinks.detect().to_numpy()[0, :, layer, head]
    for step, line in enumerate(lines):
        mark, place, _ = line.split("│")[2].split(maxsplit=2)
        assert (mark == "●", int(place)) == (found[step].any(), path[step])
