"""The command: what it rejects before a run begins, and what it prints."""

from pathlib import Path

import pytest

from training import __main__ as command


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny-llada", "--steps", "-5"], "--steps must be at least 1; got -5."),
        (["tiny-llada", "--steps", "0"], "--steps must be at least 1; got 0."),
        (["tiny-lada"], "Nearest: tiny-llada"),
        (["tiny-llada", "--run", "run", "--out", "run"], "--out and --run are both run"),
        (["tiny-llada", "--out", "file"], "cannot write to "),
        (["tiny-llada", "--out", "/proc/no/such"], "cannot write to /proc"),
        (["tiny-llada", "--out", "another"], "another holds a "),
    ],
)
def test_a_command_that_cannot_finish_is_rejected_before_the_run(arguments, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", lambda *given: pytest.fail("the run began"))
    Path("file").write_text("")
    Path("another").mkdir()
    Path("another", "state.pt").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert command.main(arguments) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("training: ")
    assert text in printed
    assert sorted(tmp_path.rglob("*")) == before
