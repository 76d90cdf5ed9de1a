"""Scoring: each program is run exactly once to judge it, and a hostile one does not pass."""

import gzip
import json

import pytest
from ledgers import answered, forget, planted_run

from sinklens.errors import LedgerError
from sinklens.evaluation import score
from sinklens.evaluation.scoring import verdicts
from sinklens.tasks import find_task

TASK = find_task("tiny-code")
SAMPLES = TASK.samples(6)
FORGED = "    import os, sys\n    sys.stdout.write('passed')\n    os._exit(0)\n"


@pytest.fixture
def coded(tmp_path):
    """A run with two right programs, a wrong one, one that ends the process, and one that is empty."""
    right, right_with_more, wrong, forged, empty = SAMPLES[:5]
    run = planted_run(tmp_path, {}, protocol="tiny-code")
    texts = {
        right.id: right.reference, right_with_more.id: right_with_more.reference + "\nprint('more')",
        wrong.id: "    return 'wrong'\n", forged.id: FORGED, empty.id: "",
    }  # fmt: skip
    return answered(run, TASK, texts)


@pytest.mark.usefixtures("isolation")
def test_running_the_programs_decides_and_the_record_says_how(tmp_path, coded):
    assert (verdicts(coded), score(tmp_path)) == ({}, 5)
    found = {record["sample"]: record for record in coded.records("verdicts")}
    ids = [sample.id for sample in SAMPLES[:5]]
    assert [found[i]["verdict"] for i in ids] == [True, True, False, False, False]
    assert [found[i]["status"] for i in ids[:3]] == ["passed", "passed", "failed"]
    assert all(found[i]["isolation"] and found[i]["seconds"] > 0 for i in ids)
    assert verdicts(coded) == dict(zip(ids, [True, True, False, False, False], strict=True))


@pytest.mark.usefixtures("isolation")
def test_a_second_start_runs_only_the_missing_programs(tmp_path, coded):
    reports = []
    score(tmp_path)
    answered(coded, TASK, {SAMPLES[5].id: SAMPLES[5].reference})
    assert score(tmp_path, progress=lambda run, done, total: reports.append((done, total))) == 1
    assert (reports, score(tmp_path), len(coded.records("verdicts"))) == ([(6, 6)], 0, 6)


@pytest.mark.usefixtures("isolation")
def test_a_regenerated_program_is_judged_again(tmp_path, coded):
    score(tmp_path)
    forget(coded)
    answered(coded, TASK, {SAMPLES[0].id: "    return 'wrong'\n", SAMPLES[1].id: SAMPLES[1].reference})
    assert (verdicts(coded), score(tmp_path)) == ({}, 2)
    assert verdicts(coded) == {SAMPLES[0].id: False, SAMPLES[1].id: True}


def test_runs_of_tasks_without_programs_are_not_scored(tmp_path):
    run = planted_run(tmp_path, {"tiny-gsm/0": True})
    assert score(tmp_path) == 0
    assert (verdicts(run), run.records("verdicts")) == ({"tiny-gsm/0": True}, [])


@pytest.mark.usefixtures("isolation")
def test_data_changed_since_the_evaluation_are_refused(tmp_path, coded, shared):
    """One prompt of HumanEval's file changes between the evaluation and scoring, and one is missing."""
    with gzip.open(shared / "data" / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        first, second = file.read().splitlines()[:2]
    other = json.loads(first)
    more = json.dumps(other | {"prompt": other["prompt"] + "    # more\n"})
    local, changed = tmp_path / "HumanEval.jsonl", tmp_path / "changed.jsonl"
    local.write_text(f"{first}\n{second}\n")
    task = find_task("humaneval", path=local)
    run = planted_run(tmp_path / "ledger", {}, protocol="humaneval")
    answered(run, task, {sample.id: sample.reference for sample in task.samples()})
    for lines, text in ((more, "had another prompt when it was evaluated"), (second, "is not in the task humaneval")):
        changed.write_text(f"{lines}\n")
        with pytest.raises(LedgerError, match=f"sample humaneval/0 {text}"):
            score(tmp_path / "ledger", data=changed)
    assert score(tmp_path / "ledger", data=local) == 2
    assert verdicts(run) == {"humaneval/0": True, "humaneval/1": True}
