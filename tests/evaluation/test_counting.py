"""Progress: lines where there is no terminal, bars on one, and what is said after an interrupt."""

from pathlib import Path

import pytest

from sinklens.evaluation.counting import PARTS, Counts


def test_without_a_terminal_there_is_a_line_for_every_twentieth(capsys):
    with Counts("prompts") as counts:
        for done in range(1001):
            counts("m", done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"m: {done} of 1000 prompts done" for done in range(0, 1001, 1000 // PARTS)]


def test_few_units_have_a_line_each_and_every_label_its_own(capsys):
    with Counts("samples") as counts:
        for label in ("a", "b"):
            for done in (2, 3, 4):
                counts(label, done, 4)
    assert capsys.readouterr().err.splitlines() == [
        f"{label}: {done} of 4 samples done" for label in ("a", "b") for done in (2, 3, 4)
    ]


def test_on_a_terminal_there_are_bars_and_names_are_no_markup(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Counts("prompts") as counts:
        counts("[red]m", 1, 3)
        counts("[red]m", 3, 3)
    told = capsys.readouterr().err
    assert "[red]m" in told
    assert "3/3" in told
    assert "prompts done" not in told


def test_an_interrupt_names_what_is_kept_and_a_command_that_a_shell_takes(capsys):
    with Counts("prompts") as counts, pytest.raises(SystemExit, match="130"):
        counts("m", 3, 10)
        counts("n", 0, 10)
        counts.stop(Path("a folder"), ["analyse", "layers", "m", "n", "--out", "a folder"])
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "sinklens: interrupted; a folder keeps the finished prompts (m: 3 of 10; n: 0 of 10). To resume:",
        "  sinklens analyse layers m n --out 'a folder'",
    ]
