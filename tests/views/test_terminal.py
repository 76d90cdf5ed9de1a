"""A run on a terminal: a line per step, and tokens as they are, whatever they spell."""

import types

import pytest
from rich.console import Console

import sinklens
from sinklens.views import most_moving_head, terminal

HOSTILE = ["[red]", "[/]", "\x1b[2J", "a\nb"]


@pytest.fixture(scope="module")
def run(worded):
    return sinklens.generate(worded("llama"), "one two three", gen_length=4)


def test_tokens_are_never_markup_and_control_characters_are_spelled_out(run):
    """A model whose tokenizer spells every token in a hostile way."""
    words = {int(token): HOSTILE[int(token) % 4] for token in run.canvas.unique()}
    tokenizer = types.SimpleNamespace(decode=lambda ids, **_: "".join(words[int(one)] for one in ids))
    model = types.SimpleNamespace(**{name: getattr(run.model, name) for name in ("mask_token_id", "eos_token_ids")})
    model.tokenizer = tokenizer
    console = Console(record=True, width=200, color_system=None)
    terminal.show(model, run, console)
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
