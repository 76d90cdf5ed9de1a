"""A run on a terminal: tokens are printed as they are, whatever they spell."""

import dataclasses
import types

import pytest
from rich.console import Console

import sinklens
from sinklens.views import terminal

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
    terminal.show(model, dataclasses.replace(run), console)
    text = console.export_text()
    written = {words[int(token)] for token in run.tokens[0, run.prompt_length :]}
    for word in written & {"[red]", "[/]"}:
        assert word in text
    assert written & {"[red]", "[/]"}
    assert "\x1b" not in text
