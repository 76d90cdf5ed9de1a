"""Progress: lines without a terminal, bars on a terminal, and the message after an interrupt."""

from pathlib import Path

import pytest

from sinklens.evaluation.counting import PARTS, Counts


def test_without_a_terminal_every_twentieth_prints_a_line(capsys):
    with Counts("prompts") as counts:
        for done in range(1001):
            counts("m", done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"m: {done} of 1000 prompts done" for done in range(0, 1001, 1000 // PARTS)]


def test_few_units_print_one_line_each_per_label(capsys):
    with Counts("samples") as counts:
        for label in ("a", "b"):
            for done in (2, 3, 4):
                counts(label, done, 4)
    assert capsys.readouterr().err.splitlines() == [
        f"{label}: {done} of 4 samples done" for label in ("a", "b") for done in (2, 3, 4)
    ]


def test_a_terminal_shows_bars_and_names_are_not_read_as_markup(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Counts("prompts") as counts:
        counts("[red]m", 1, 3)
        counts("[red]m", 3, 3)
    printed = capsys.readouterr().err
    assert "[red]m" in printed
    assert "3/3" in printed
    assert "prompts done" not in printed


def test_an_interrupt_prints_what_is_kept_and_a_shell_command_to_resume(capsys):
    with Counts("prompts") as counts, pytest.raises(SystemExit, match="130"):
        counts("m", 3, 10)
        counts("n", 0, 10)
        counts.stop(Path("a folder"), ["analyse", "existence", "m", "n", "--out", "a folder"])
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "sinklens: interrupted; a folder keeps the finished prompts (m: 3 of 10; n: 0 of 10). To resume:",
        "  sinklens analyse existence m n --out 'a folder'",
    ]
