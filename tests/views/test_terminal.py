"""A run on a terminal: a line per step, and tokens as they are, whatever they spell."""

import json
import re
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


def shown(run, width):
    console = Console(record=True, width=width, color_system=None)
    terminal.show(run.model, run, console)
    return console.export_text()


def test_tokens_are_never_markup_and_control_characters_are_spelled_out(run):
    """A run whose every token is spelled in a hostile way."""
    words = {int(token): HOSTILE[int(token) % 4] for token in run.canvas.unique() if token >= 0}
    track = SinkTrack(run.sinks.data.assign_attrs(vocabulary=json.dumps(words)))
    text = shown(replace(run, sinks=track), 200)
    written = {words[int(token)] for token in run.tokens[0, run.prompt_length :]}
    for word in written & {"[red]", "[/]"}:
        assert word in text
    assert written & {"[red]", "[/]"}
    assert "\x1b" not in text


def test_a_terminal_of_80_columns_cuts_nothing(tiny_llada):
    run = sinklens.generate(tiny_llada, "Question: Tom has 5 apples. How many has he?\nAnswer:")
    wide, narrow = (shown(run, width) for width in (300, 80))
    keys = [sorted(re.findall(r"░|(?:[●○] )?\d+ ‘[^’]*’(?: ×\d+)?", text)) for text in (wide, narrow)]
    assert keys[0] == keys[1]
    assert sum("‘" in key for key in keys[1]) == 4 * run.steps_run  # three strongest keys, and that of one head
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))


def test_a_line_per_step_shows_what_is_decided_and_the_most_moving_head(run):
    lines = [line for line in shown(run, 300).splitlines() if "│" in line]
    assert [line.split("│")[0].count("░") for line in lines] == run.undecided[0, 1:].sum(-1).tolist()
    layer, head = most_moving_head(run.sinks)
    path, found = run.sinks.trajectory(layer, head), run.sinks.detect().to_numpy()[0, :, layer, head]
    for step, line in enumerate(lines):
        mark, place, _ = line.split("│")[2].split(maxsplit=2)
        assert (mark == "●", int(place)) == (found[step].any(), path[step])
