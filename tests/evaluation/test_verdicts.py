"""Verdicts in an evaluation: from the command line, with functions, in gaps, and with programs in the sandbox."""

import json

import pytest
from ledgers import answered, planted_run

import sinklens
from sinklens.cli import main
from sinklens.errors import SettingError
from sinklens.evaluation import UNMASKED, LedgerRun, evaluate
from sinklens.evaluation.scoring import score
from sinklens.evaluation.units import batches
from sinklens.interventions import Suffix
from sinklens.tasks import find_task
from sinklens.tasks.prompts import Prompts
from sinklens.tasks.verdicts import Refusal

QUESTION = "Question: Kim has 20 balls. She buys 18 more. How many balls does Kim have now?\nAnswer:"


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_verdict_is_chosen_on_the_command_line(tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", {"prompt": QUESTION, "expected": "38"}, {"prompt": QUESTION, "expected": "37"})
    asked = ["evaluate", "tiny-llada", "--prompts", str(file), "--out", str(tmp_path / "out")]
    assert main([*asked, "--verdict", "extraction"]) == 0
    (run,) = LedgerRun.all(tmp_path / "out")
    assert [record["verdict"] for record in run.records()] == [True, False]
    assert run.what["protocol"]["task"] == "prompts-extraction"
    assert main([*asked, "--verdict", "extracting"]) == 1
    assert "no verdict is called 'extracting'; known: exact," in capsys.readouterr().err
    assert main(["evaluate", "tiny-llada", "--task", "tiny-gsm", "--verdict", "exact", "--out", str(tmp_path)]) == 1
    assert "--verdict is for the answers to --prompts FILE" in capsys.readouterr().err


def mentions_balls(prompt, text):
    return "balls" in text


def test_a_judge_function_is_part_of_a_runs_identity(tmp_path, tiny_llada):
    file = write(tmp_path / "p.jsonl", {"prompt": QUESTION, "expected": True})
    task = Prompts(file, by=Refusal(judge=mentions_balls))
    for chosen in (task, find_task("prompts-refusal", path=file), task):
        evaluate(tiny_llada, "prompts-refusal", [UNMASKED], tmp_path / "out", task=chosen)
    runs = LedgerRun.all(tmp_path / "out")
    assert sorted(run.records()[0]["verdict"] for run in runs) == [False, True]


def test_the_span_between_prefix_and_suffix_is_generated_and_scored(tmp_path, tiny_llada):
    suffix = " balls."
    plain = sinklens.generate(tiny_llada, QUESTION, hooks=[Suffix(text=suffix)], record_sinks=False)
    span = plain.answers[0].text
    lines = [
        {"prompt": QUESTION, "suffix": suffix, "expected": span},
        {"prompt": QUESTION, "suffix": " coins.", "expected": "x"},
    ]
    task = find_task("prompts-infilling", path=write(tmp_path / "p.jsonl", *lines))
    (run,) = evaluate(tiny_llada, "prompts-infilling", [UNMASKED], tmp_path / "out", task=task)
    records = {record["sample"]: record for record in run.records()}
    assert records["prompts-infilling/0"]["text"] == span
    assert [records[f"prompts-infilling/{n}"]["verdict"] for n in (0, 1)] == [True, False]
    assert [len(batch.samples) for batch in batches(UNMASKED, task.samples(), 8)] == [1, 1]
    with pytest.raises(SettingError, match=r"does not see text after its answer, so it cannot fill a gap"):
        evaluate("tiny-llama", "prompts-infilling", [UNMASKED], tmp_path / "causal", task=task)


@pytest.mark.usefixtures("isolation")
def test_programs_of_a_file_run_in_the_sandbox(tmp_path):
    test = {"prompt": "Twice.", "test": "def check(candidate):\n    assert candidate(3) == 6\n", "entry_point": "twice"}
    file = write(tmp_path / "programs.jsonl", test, test)
    task = find_task("prompts-code", path=file)
    first, second = task.samples()
    run = planted_run(tmp_path / "out", {}, protocol="prompts-code")
    answered(run, task, {first.id: "def twice(x):\n    return x + x\n", second.id: "def twice(x):\n    return 3\n"})
    assert score(tmp_path / "out", paths={"prompts-code": file}) == 2
    found = {record["sample"]: record["status"] for record in run.records("verdicts")}
    assert found == {first.id: "passed", second.id: "failed"}
