"""The commands evaluate, score and table from end to end, on the shipped models and on local files."""

import gzip
import json
import re
import shutil

import pandas as pd
import pytest
from ledgers import planted_run

import sinklens
from sinklens.cli import main
from sinklens.evaluation import LedgerRun, frame, masking
from sinklens.model.files import find_checkpoint
from sinklens.sampling import DualCache
from sinklens.tasks import held_out
from sinklens.views import accuracy_curves, panels


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_ledgers_are_merged_and_exported(tmp_path, capsys):
    for place in ("a", "b"):
        planted_run(tmp_path / place, {f"tiny-gsm/{place}": True})
    merged, file = tmp_path / "merged", tmp_path / "all.jsonl"
    code, out, _ = run(capsys, "merge", tmp_path / "a", tmp_path / "b", "--out", merged)
    assert (code, out) == (0, f"2 records were copied. To print the table: sinklens table {merged}\n")
    assert run(capsys, "export", merged, "--out", file)[:2] == (0, f"2 records were written to {file}.\n")
    assert [json.loads(line)["record"]["sample"] for line in file.read_text().splitlines()] == [
        "tiny-gsm/a", "tiny-gsm/b",
    ]  # fmt: skip
    code, _, printed = run(capsys, "export", tmp_path, "--out", file)
    assert (code, "holds no run; create one with" in printed) == (1, True)


def test_evaluate_and_table_write_the_table_and_the_figure(tmp_path, capsys):
    flags = ["--task", "tiny-gsm", "--mask-sinks", 0, 1, "--controls", "random", "--limit", 2,
             "--gen-length", 4, "--out", tmp_path]  # fmt: skip
    code, out, _ = run(capsys, "evaluate", "tiny-llada", "tiny-llama", *flags)
    assert (code, out) == (0, f"Done. To print the table: sinklens table {tmp_path}\n")
    code, out, _ = run(capsys, "table", tmp_path)
    assert code == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert sorted(table["condition"].unique()) == ["1 random key", "1 sink", "unmasked"]
    assert set(table["total"]) == {2}
    for name in ("tiny-llada", "tiny-llama", "1 random key", "vs unmasked", "95 % score intervals"):
        assert name in out
    assert {"accuracy.png", "table.csv"} < {file.name for file in tmp_path.iterdir()}


@pytest.mark.usefixtures("isolation")
def test_generated_programs_run_only_on_request(tmp_path, capsys):
    flags = ["--task", "tiny-code", "--limit", 2, "--out", tmp_path]
    say = f"2 generated programs have not been run; to run them: sinklens score {tmp_path} --run-generated-code\n"
    assert run(capsys, "evaluate", "tiny-llama", *flags)[:2] == (0, say)
    code, out, _ = run(capsys, "table", tmp_path)
    texts = (
        "not scored (2)", "tiny-code, tiny-llama: answers", f"Written: {tmp_path / 'table.csv'}.\n",
        "have not been run are excluded from all accuracies: 2 of tiny-llama (unmasked).",
        f"`sinklens score {tmp_path} --run-generated-code` runs them",
    )  # fmt: skip
    assert [text for text in texts if text not in out] == []
    assert "vs unmasked" not in out
    assert pd.read_csv(tmp_path / "table.csv")[["total", "unscored"]].values.tolist() == [[0, 2]]
    code, _, printed = run(capsys, "score", tmp_path)
    assert (code, "written by a model. Add --run-generated-code to allow that. Isolation on" in printed) == (1, True)
    assert not any(run.records("verdicts") for run in LedgerRun.all(tmp_path))
    code, out, printed = run(capsys, "score", tmp_path, "--run-generated-code")
    assert (code, out.startswith("2 programs were run."), "Isolation: " in printed) == (0, True, True)
    assert run(capsys, "table", tmp_path)[0] == 0


@pytest.mark.extended
@pytest.mark.usefixtures("isolation")
def test_published_tasks_are_read_from_local_files(tmp_path, capsys, shared):
    """The answer itself is unknown; this checks only that it can be scored."""
    with gzip.open(shared / "data" / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        first = json.loads(file.readline())
    short = tmp_path / "short.jsonl"
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    problem = first | {"prompt": 'def add(a, b):\n    """The sum."""\n', "test": test, "entry_point": "add"}
    short.write_text(json.dumps(problem) + "\n")
    out = tmp_path / "results"
    planted_run(out, {"tiny-gsm/0": True})  # a task without files in the same ledger
    assert run(capsys, "evaluate", "tiny-llada", "--task", "humaneval", "--data", short, "--out", out)[0] == 0
    code, _, printed = run(capsys, "score", out, "--run-generated-code", "--data", short)
    assert code == 0, printed
    code, printed, _ = run(capsys, "table", out)
    assert code == 0
    assert "humaneval, tiny-llada: accuracy" in printed


@pytest.mark.extended
def test_numbers_are_not_wrapped_in_a_terminal_of_80_columns(tmp_path, capsys, monkeypatch):
    for condition in masking([1, 5], ["random"], of_unmasked=True):
        planted_run(tmp_path, dict.fromkeys("abcdefgh", True), condition, model="tiny-llada-skills")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "table", tmp_path)
    # the unmasked run, and sinks against random keys
    assert ("…" in out, len(re.findall(r" \[-0\.\d{3}, \+0\.\d{3}\]", out))) == (False, 6 + 4)
    assert max(len(line) for line in out.splitlines() if line.startswith("│")) <= 80


@pytest.mark.extended
def test_the_figure_has_a_curve_for_each_kind_of_masking(tmp_path):
    """Newest and all queries are separate curves, and a model with only an unmasked run is a point."""
    planted_run(tmp_path, {"a": True})
    assert labels(tmp_path) == ["sinks"]
    for queries in ("newest", "all"):
        for condition in masking([1, 5], queries=queries, of_unmasked=True)[1:]:
            planted_run(tmp_path, {"a": False}, condition)
    assert set(labels(tmp_path)) == {
        "sinks", "sinks, for all queries", "sinks of the unmasked run", "sinks of the unmasked run, for all queries",
    }  # fmt: skip


def test_every_model_has_a_panel(tmp_path):
    for model in "abcd":
        planted_run(tmp_path, {"a": True}, model=model)
    shown = accuracy_curves(frame(tmp_path), panels(4)[1]).axes
    assert [panel.get_title() for panel in shown if panel.axison] == [f"tiny-gsm: {name}" for name in "abcd"]


def labels(ledger):
    (panel,) = [one for one in accuracy_curves(frame(ledger), caption=False).axes if not one.get_title()]
    return panel.get_legend_handles_labels()[1]


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["tiny-llada"], "name a task (--task tiny-gsm) or a protocol (--protocol llada-gsm8k), or give a file"),
        (["tiny-llada", "--task", "tiny-gms"], "no protocol is called 'tiny-gms'"),
        (["tiny-llada", "--task", "llada-gsm8k"], "is for the task gsm8k, not llada-gsm8k"),
        (["tiny-llada", "--task", "tiny-gsm", "--protocol", "llada-gsm8k"], "is for the task gsm8k, not tiny-gsm"),
        (["tiny-llada", "--task", "tiny-gsm", "--shard", "1"], "--shard must be I/N, e.g. 0/4"),
        (["tiny-llada", "--task", "tiny-gsm", "--mask-sinks", "500", "--limit", "1"], "500"),
        (["tiny-llama", "--task", "tiny-gsm", "--limit", "0"], "limit is 0"),
        (["tiny-llama", "--task", "tiny-gsm", "--shard", "0/0"], "--shard must be I/N, e.g. 0/4"),
        (["tiny-llama", "--task", "tiny-gsm", "--controls", "random"], "--controls has no effect without --mask-sinks"),
        (["tiny-llama", "--task", "tiny-gsm", "--of-unmasked"], "--of-unmasked has no effect without --mask-sinks"),
        (
            ["tiny-llama", "--task", "tiny-gsm", "--mask-sinks", "1", "--controls", "same_kinds"],
            "weakest, same_mass, same_kind, nearest; got 'same_kinds'. Nearest: same_kind",
        ),
        (["tiny-llama", "--task", "tiny-gsm", "--queries", "all"], "--queries has no effect without --mask-sinks"),
        (
            ["tiny-llada", "--task", "tiny-gsm", "--mask-sinks", "1", "--queries", "all"],
            "--queries all is for autoregressive models; tiny-llada computes every query at every step.",
        ),
        (["tiny-llama", "--task", "tiny-gsm", "--workers", "3"], "--workers has no effect without --engine ray"),
        (["tiny-llama", "--task", "tiny-gsm", "--card", "a100"], "--card has no effect without --dry-run"),
        (["tiny-llama", "--task", "tiny-gsm", "--family", "lama"], "Nearest: llama"),
        (
            ["tiny-llama", "--task", "tiny-gsm", "--limit", "1", "--chat"],
            "the tokenizer of tiny-llama has no chat template",
        ),
        (["tiny-llada", "--task", "tiny-gsm", "--cache", "duel"], "no cache policy is called 'duel'; known: none, pre"),
        (
            ["tiny-llada", "--task", "tiny-gsm", "--cache", "keep-sinks:many"],
            "not a cache policy: write 'keep-sinks' alone",
        ),
        (
            ["tiny-llada", "tiny-llama", "--task", "tiny-gsm", "--cache", "dual"],
            "--cache is for models with bidirectional attention, not for tiny-llama.",
        ),
        (["tiny-llama", "--task", "tiny-gsm", "--prompts", "x.jsonl"], "--prompts replaces --task, --protocol"),
        (["tiny-llama", "--data", "x", "--prompts", "x.jsonl"], "--prompts replaces --task, --protocol and --data"),
        (["tiny-llama", "--prompts", "no.jsonl"], "could not read no.jsonl"),
        (["tiny-llama", "--task", "prompts"], "the task 'prompts' needs a file; give one (--prompts FILE)"),
        (
            ["tiny-llama", "--task", "tiny-gsm", "--block-length", "8"],
            "--block-length is not a setting of the autoregressive sampler, which tiny-llama uses; remove it.",
        ),
    ],
)
def test_an_invalid_call_prints_one_message_and_exits_with_code_one(tmp_path, capsys, arguments, text):
    code, _, printed = run(capsys, "evaluate", *arguments, "--out", tmp_path / "results")
    assert (code, printed.splitlines()[-1].startswith("sinklens: "), text in printed) == (1, True, True), printed
    assert "--cache" not in arguments or not (tmp_path / "results").exists()


@pytest.fixture(scope="module")
def no_tokenizer(tmp_path_factory):
    """A copy of tiny-llama's folder without its tokenizer."""
    folder = tmp_path_factory.mktemp("no-tokenizer") / "model"
    folder.mkdir()
    for file in find_checkpoint("tiny-llama", None).iterdir():
        if file.name in ("config.json", "generation_config.json") or file.suffix == ".safetensors":
            shutil.copy(file, folder)
    return folder


@pytest.mark.extended
def test_prompts_and_expected_answers_may_be_token_ids(tmp_path, capsys, no_tokenizer, tiny_llama):
    """A checkpoint without a tokenizer; the expected answers are those of the same model with its tokenizer."""
    problems = held_out(3)
    ids = [tiny_llama.to_tokens(problem.prompt)[0].tolist() for problem in problems]
    runs = [sinklens.generate(tiny_llama, problem.prompt, progress=False) for problem in problems]
    answers = [run.tokens[0, run.prompt_length :].tolist()[: run.answers[0].tokens] for run in runs]
    (end,) = tiny_llama.eos_token_ids
    expected = [answers[0], [*answers[1], end], answers[0]]  # the third is wrong
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    lines = [{"prompt": prompt, "expected": right} for prompt, right in zip(ids, expected, strict=True)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    call = ["evaluate", no_tokenizer, "--prompts", file, "--mask-sinks", 1, "--out", out]
    code, _, printed = run(capsys, *call, "--batch-size", 2)
    assert code == 0, printed
    found = records(out, "unmasked")
    assert [(one["sample"], one["verdict"]) for one in found] == [
        ("prompts/0", True), ("prompts/1", True), ("prompts/2", False),
    ]  # fmt: skip
    assert found[0]["tokens"][: len(answers[0])] == answers[0]
    assert "0.667" in run(capsys, "table", out)[1]
    lines[2]["expected"] = answers[2]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, _, printed = run(capsys, *call)
    assert "has a record of prompts/2 with another expected answer, so it was started with other data." in printed


@pytest.mark.extended
@pytest.mark.parametrize(
    ("prompt", "expected", "text"),
    [
        ("a", [5], "has no tokenizer, and the prompts of this task are text."),
        ([2, 5], "a", "or give prompts and expected answers as token ids (--prompts FILE)."),
        ([2, 5], [5] * 5, "prompts/0 expects 5 tokens, but answers of"),
        ([2, 99999], [5], "99999"),
    ],
)
def test_text_prompts_need_a_tokenizer_and_expected_ids_must_fit_the_answer_length(
    tmp_path, capsys, no_tokenizer, prompt, expected, text
):
    (file := tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "expected": expected}))
    call = ["evaluate", no_tokenizer, "--prompts", file, "--gen-length", 4, "--out", tmp_path / "out"]
    code, _, printed = run(capsys, *call)
    assert (code, text in printed) == (1, True), printed


def test_an_interrupt_says_that_finished_samples_are_kept(tmp_path, capsys, monkeypatch):
    import sinklens.evaluation.runner as evaluating

    monkeypatch.setattr(evaluating, "evaluate", lambda *given, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(SystemExit, match="130"):
        main(["evaluate", "tiny-llama", "--task", "tiny-gsm", "--out", str(tmp_path)])
    printed = capsys.readouterr().err
    assert f"interrupted; {tmp_path} keeps the finished samples. To resume:\n" in printed
    assert printed.endswith(f"  sinklens evaluate tiny-llama --task tiny-gsm --out {tmp_path}\n")


@pytest.mark.extended
def test_the_table_points_out_unfinished_conditions_and_sinks_that_escape_masking(tmp_path, capsys):
    unmasked, strongest, steady = masking([1], of_unmasked=True)
    planted_run(tmp_path, dict.fromkeys("abcd", True), unmasked)
    planted_run(tmp_path, dict.fromkeys("ab", True), strongest)
    _, out, _ = run(capsys, "table", tmp_path)
    assert "1.000 (2 of 4)" in out
    assert "--of-unmasked adds conditions that mask the sinks of the unmasked run" in out
    planted_run(tmp_path, dict.fromkeys("abcd", True), steady)
    assert "--of-unmasked" not in run(capsys, "table", tmp_path)[1]


@pytest.mark.extended
def test_cache_policies_stand_beside_the_exact_run_in_one_ledger_and_table(tmp_path, capsys):
    flags = ["--task", "tiny-gsm", "--limit", 2, "--steps", 6, "--out", tmp_path]
    policies = ["--cache", "prefix", "dual", "delayed", "keep-sinks:4"]
    assert run(capsys, "evaluate", "tiny-llada", *flags, *policies)[0] == 0
    code, out, _ = run(capsys, "table", tmp_path)
    assert code == 0
    assert "speed: seconds per sample of the exact unmasked run" in out
    names = ["unmasked", *(f"cache {name}" for name in policies[1:])]
    table = pd.read_csv(tmp_path / "table.csv").set_index("condition")
    assert sorted(table.index) == sorted(names)
    assert (table.loc[names[1:], "against_unmasked_total"] == 2).all()
    assert (table.loc[names[1:], "speed"] > 0).all()
    dual = sinklens.generate("tiny-llada", held_out(1)[0].prompt, steps=6, cache=DualCache())
    assert records(tmp_path, "cache dual")[0]["tokens"] == dual.tokens[0, dual.prompt_length :].tolist()
    assert run(capsys, "evaluate", "tiny-llada", *flags)[0] == 0  # the exact run is that of an evaluation without cache
    assert len(LedgerRun.all(tmp_path)) == 5


def records(ledger, condition):
    return next(one for one in LedgerRun.all(ledger) if one.what["condition"]["name"] == condition).records()


@pytest.mark.extended
def test_a_dry_run_needs_no_weights_plans_for_the_stated_card_and_writes_nothing(tmp_path, capsys):
    folder = tmp_path / "empty"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_checkpoint("tiny-llada") / name, folder)
    code, printed, _ = run(
        capsys, "evaluate", folder, "--task", "tiny-gsm", "--limit", 4, "--out", tmp_path / "out", "--dry-run",
        "--card", "a100", "--cards", 2, "--utilization", 0.5, "--mask-sinks", 1,
    )  # fmt: skip
    assert code == 0
    assert printed.startswith(f"{folder}\n  4 samples x 2 runs: ")
    assert not (tmp_path / "out").exists()
    assert "on 2 x A100 (80 GB) at 50% of 312 TFLOP/s" in printed


@pytest.mark.extended
def test_a_table_says_in_what_a_run_departs_before_its_numbers(tmp_path, capsys):
    for condition in masking([1]):
        planted_run(tmp_path, {"gsm8k/0": True}, condition, model="GSAI-ML/LLaDA-8B-Instruct",
                    protocol="llada-instruct-gsm8k-blocks")  # fmt: skip
    _, printed, _ = run(capsys, "table", tmp_path)
    text, _, tables = printed.partition(": accuracy")
    assert "departs from llada-instruct-gsm8k-blocks: gen_length 24, not 256; steps 24, not 256." in text
    assert "0.786 ML-GSAI/LLaDA, EVAL.md" in tables
    assert "1 sink" in tables
