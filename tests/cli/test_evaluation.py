"""The commands from end to end: evaluate, score and table, on the shipped twins and on local files."""

import gzip
import json

import pandas as pd
import pytest
from ledgers import planted_run

from sinklens.cli import main
from sinklens.evaluation.conditions import masking
from sinklens.evaluation.ledger import Run
from sinklens.evaluation.tables import frame, read_lines
from sinklens.views import accuracy_curves


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_evaluate_and_table_make_the_table_and_the_picture(tmp_path, capsys):
    flags = ["--task", "tiny-gsm", "--mask-sinks", 0, 1, "--controls", "random", "--limit", 3, "--out", tmp_path]
    code, out, _ = run(capsys, "evaluate", "tiny-llada", "tiny-llama", *flags)
    assert (code, out) == (0, f"Done. The table: sinklens table {tmp_path}\n")
    code, out, _ = run(capsys, "table", tmp_path)
    assert code == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert sorted(table["condition"].unique()) == ["1 random key", "1 sink", "unmasked"]
    assert set(table["total"]) == {3}
    for name in ("tiny-llada", "tiny-llama", "1 random key", "vs unmasked", "95 % intervals"):
        assert name in out
    assert {"accuracy.png", "accuracy.svg", "table.csv"} < {file.name for file in tmp_path.iterdir()}


def test_a_dry_run_tells_what_it_would_take_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "results"
    code, told, _ = run(capsys, "evaluate", "tiny-llama", "--task", "tiny-gsm", "--mask-sinks", 1, "--limit", 4,
                        "--out", out, "--dry-run")  # fmt: skip
    assert code == 0
    assert told.startswith("tiny-llama: 8 samples to do, ")
    assert "in one process here (by 8 samples that were run)" in told
    assert not out.exists()


def test_settings_reach_the_sampler_and_the_record(tmp_path, capsys):
    run(capsys, "evaluate", "tiny-llada", "--task", "tiny-gsm", "--limit", 1, "--steps", 12, "--out", tmp_path)
    (only,) = Run.all(tmp_path)
    assert only.what["settings"]["steps"] == 12
    assert only.records()[0]["steps"] == 12


def test_generated_programs_run_on_request_alone(tmp_path, capsys):
    flags = ["--task", "tiny-code", "--limit", 2, "--out", tmp_path]
    code, out, _ = run(capsys, "evaluate", "tiny-llama", *flags)
    assert (code, out) == (
        0,
        f"2 programs were generated and not run: sinklens score {tmp_path} --run-generated-code\n",
    )
    code, _, told = run(capsys, "table", tmp_path)
    assert code == 1
    assert "have not been run have no part in any number: 2 of tiny-llama (unmasked)." in told
    code, _, told = run(capsys, "score", tmp_path)
    assert code == 1
    assert (
        "this executes programs that a model wrote. Add --run-generated-code if that is meant. Isolation here" in told
    )
    assert not list(tmp_path.glob("run-*/verdicts-*"))
    code, out, told = run(capsys, "score", tmp_path, "--run-generated-code")
    assert code == 0
    assert out.startswith("2 programs were run.")
    assert "Isolation: " in told
    assert run(capsys, "table", tmp_path)[0] == 0


def test_published_tasks_are_read_from_local_files(tmp_path, capsys, shared):
    """Nothing is known of the answer but that it can be judged."""
    with gzip.open(shared / "data" / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        first = json.loads(file.readline())
    short = tmp_path / "short.jsonl"
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    made = first | {"prompt": 'def add(a, b):\n    """The sum."""\n', "test": test, "entry_point": "add"}
    short.write_text(json.dumps(made) + "\n")
    out = tmp_path / "results"
    planted_run(out, {"tiny-gsm/0": True})  # a task without files in the same ledger
    flags = ["--task", "humaneval", "--data", short, "--out", out]
    assert run(capsys, "evaluate", "tiny-llada", *flags)[0] == 0
    code, _, told = run(capsys, "score", out, "--run-generated-code", "--data", short)
    assert code == 0, told
    code, told, _ = run(capsys, "table", out)
    assert code == 0
    assert "humaneval: accuracy" in told


def test_the_papers_numbers_stand_beside_its_own_models_and_are_marked(tmp_path, capsys):
    for condition in masking([1]):
        planted_run(tmp_path, {"gsm8k/0": True}, condition, model="GSAI-ML/LLaDA-8B-Instruct", protocol="llada-gsm8k")
        planted_run(tmp_path, {"gsm8k/0": True}, condition, protocol="llada-gsm8k")
    _, out, _ = run(capsys, "table", tmp_path)
    head, rows = next(line for line in out.splitlines() if "masked" in line), out.splitlines()
    assert head.count("in the paper") == 1
    assert next(row for row in rows if "nothing" in row).count("0.76") == 1
    assert next(row for row in rows if "1 sink" in row).count("0.75") == 1


def test_lines_of_a_terminal_are_not_cut_when_written_to_a_file(tmp_path, capsys):
    for condition in masking([1, 5, 10], ["random", "weakest"]):
        planted_run(tmp_path, {"s": True}, condition, model="/a/long/path/to/some/checkpoint-of-one-s-own")
    _, out, _ = run(capsys, "table", tmp_path)
    assert "…" not in out


def test_numbers_are_whole_in_a_terminal_of_80_columns(tmp_path, capsys, monkeypatch):
    for condition in masking([1, 5], ["random"], of_unmasked=True):
        planted_run(tmp_path, dict.fromkeys("abcdefgh", True), condition, model="tiny-llada-skills")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "table", tmp_path)
    assert "…" not in out
    assert out.count("+0.000 [+0.000, +0.000]") == 6 + 4  # against the unmasked run, and sinks against random keys
    assert max(len(line) for line in out.splitlines() if line.startswith("│")) <= 80


def test_names_with_brackets_are_shown_as_they_are(tmp_path, capsys):
    planted_run(tmp_path, {"a": True}, model="my [bold] run")
    _, out, _ = run(capsys, "table", tmp_path)
    assert out.count("my [bold] run") >= 3


def test_the_picture_has_a_line_for_each_way_of_masking(tmp_path):
    """Sets per head and per layer are not joined, and a lone unmasked model is a point."""
    planted_run(tmp_path, {"a": True})
    assert labels(tmp_path) == ["tiny-llada: sinks"]
    for scope in ("head", "layer"):
        for condition in masking([1, 5], scope=scope, of_unmasked=True)[1:]:
            planted_run(tmp_path, {"a": False}, condition)
    assert labels(tmp_path) == [
        "tiny-llada: sinks", "tiny-llada: sinks, one set per layer",
        "tiny-llada: sinks of the unmasked run", "tiny-llada: sinks of the unmasked run, one set per layer",
    ]  # fmt: skip


def test_more_models_than_a_panel_holds_have_one_each(tmp_path):
    for model in ("a", "b", "c"):
        planted_run(tmp_path, {"a": True}, model=model)
    assert labels(tmp_path) == ["a: sinks", "b: sinks", "c: sinks"]
    planted_run(tmp_path, {"a": True}, model="d")
    shown = accuracy_curves(frame(read_lines(tmp_path))).axes
    assert [panel.get_legend_handles_labels()[1] for panel in shown] == [[f"{name}: sinks"] for name in "abcd"]
    assert [panel.get_title() for panel in shown] == [f"tiny-gsm: {name}" for name in "abcd"]


def labels(ledger):
    (panel,) = accuracy_curves(frame(read_lines(ledger))).axes
    return panel.get_legend_handles_labels()[1]


def test_a_table_leaves_out_what_is_not_scored_and_says_so(tmp_path, capsys):
    for condition in masking([1]):
        planted_run(tmp_path, {"a": None, "b": None}, condition, protocol="tiny-code")
    planted_run(tmp_path, {"a": True}, model="tiny-llama", protocol="tiny-code")
    code, out, _ = run(capsys, "table", tmp_path)
    assert code == 0
    assert "2 of tiny-llada (unmasked)" in out
    assert "2 of tiny-llada (1 sink)" in out
    assert f"`sinklens score {tmp_path} --run-generated-code` runs them" in out
    assert pd.read_csv(tmp_path / "table.csv")["model"].tolist() == ["tiny-llama"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny-llada"], r"name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k)."),
        (["tiny-llada", "--task", "tiny-gms"], "no task is called 'tiny-gms'"),
        (["tiny-llada", "--task", "llada-gsm8k"], "llada-gsm8k is a protocol: --protocol llada-gsm8k."),
        (["tiny-llada", "--task", "tiny-gsm", "--protocol", "llada-gsm8k"], "is for the task gsm8k, not tiny-gsm"),
        (["tiny-llada", "--task", "tiny-gsm", "--shard", "1"], "--shard is written I/N, e.g. 0/4"),
        (["tiny-llada", "--task", "tiny-gsm", "--mask-sinks", "500", "--limit", "1"], "500"),
        (["tiny-llama", "--task", "tiny-gsm", "--limit", "0"], "limit is 0"),
        (
            ["tiny-llama", "--task", "tiny-gsm", "--block-length", "8"],
            "--block-length is no setting of the autoregress",
        ),
    ],
)
def test_a_wrong_call_is_one_message_and_exit_code_one(tmp_path, capsys, arguments, text):
    code, _, told = run(capsys, "evaluate", *arguments, "--out", tmp_path / "results")
    assert code == 1
    assert told.splitlines()[-1].startswith("sinklens: ")
    assert text in told


def test_an_interrupt_says_that_what_was_finished_is_kept(tmp_path, capsys, monkeypatch):
    import sinklens.evaluation.runner as evaluating

    monkeypatch.setattr(evaluating, "evaluate", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        main(["evaluate", "tiny-llama", "--task", "tiny-gsm", "--out", str(tmp_path)])
    told = capsys.readouterr().err
    assert f"interrupted; what was finished is kept in {tmp_path}, and the same command goes on from there" in told


def test_an_unfinished_condition_and_masks_that_escape_are_said(tmp_path, capsys):
    unmasked, own, steady = masking([1], of_unmasked=True)
    planted_run(tmp_path, dict.fromkeys("abcd", True), unmasked)
    planted_run(tmp_path, dict.fromkeys("ab", True), own)
    _, out, _ = run(capsys, "table", tmp_path)
    assert "1.000 [0.342, 1.000] (2 of 4)" in out
    assert "--of-unmasked adds masks by the sinks of the unmasked run" in out
    planted_run(tmp_path, dict.fromkeys("abcd", True), steady)
    assert "--of-unmasked" not in run(capsys, "table", tmp_path)[1]
