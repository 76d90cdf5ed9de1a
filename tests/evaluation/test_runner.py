"""Evaluations: no sample is lost or repeated, whatever interrupts the run."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass

import pytest

from sinklens.analyses import find
from sinklens.errors import ControlWarning, LedgerError, SinklensError
from sinklens.evaluation import UNMASKED, Condition, LedgerRun, evaluate, frame, masking, units
from sinklens.evaluation.ledger import holds_runs
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.units import Job
from sinklens.interventions import AblateHeads
from sinklens.tasks import Sample, find_task
from sinklens.tasks.word_problems import TinyGsm

CONDITIONS = masking([1])
PROMPT = "Question: 1 + 2\nAnswer:"
VARYING = ("seconds", "batch", "sinks")  # the sinks' last bits depend on the batch
ARGUMENTS = ["evaluate", "tiny-llama", "--task", "tiny-gsm", "--mask-sinks", "1", "--limit", "10", "--batch-size", "1"]


@pytest.fixture
def ran(monkeypatch):
    """The condition and sample of every unit that this process runs."""
    found, carry_out = [], Job.carry_out

    def noting(job, batch):
        found.extend((batch.condition.name, sample.id) for sample in batch.samples)
        return carry_out(job, batch)

    monkeypatch.setattr(Job, "carry_out", noting)
    return found


def contents(ledger):
    """Every record of every run without its varying fields."""
    found = {}
    for run in LedgerRun.all(ledger):
        found[run.name] = [{k: v for k, v in record.items() if k not in VARYING} for record in run.records()]
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The ledger of an uninterrupted evaluation."""
    ledger = tmp_path_factory.mktemp("uninterrupted")
    evaluate("tiny-llama", "tiny-gsm", CONDITIONS, ledger, limit=10)
    return contents(ledger)


def start(ledger, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "sinklens.cli", *ARGUMENTS, "--out", str(ledger), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def size(ledger):
    """Number of records."""
    return sum(len(run.done()) for run in LedgerRun.all(ledger)) if holds_runs(ledger) else 0


def kill_and_resume(ledger, times, seed):
    """Kill an evaluation at random moments, some before its first record, and then let it finish."""
    rng = random.Random(seed)
    for _ in range(times):
        process, before = start(ledger), size(ledger)
        for _ in range(rng.randint(0, 3)):
            until = time.monotonic() + 60
            while size(ledger) == before and process.poll() is None and time.monotonic() < until:
                time.sleep(0.002)
            before = size(ledger)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    process = start(ledger)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr[-2000:]


@pytest.mark.parametrize(("times", "seed"), [(2, 3), pytest.param(10, 4, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(tmp_path, uninterrupted, times, seed):
    kill_and_resume(tmp_path, times, seed)
    assert contents(tmp_path) == uninterrupted


def test_an_evaluation_resumes_after_the_disk_was_full(tmp_path, uninterrupted, ran):
    """A real limit: the first process cannot write files beyond 36,000 bytes, the second can."""
    code = f"""
import resource, signal, sys
from sinklens.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # Python would keep the truncated files and fail on them later
resource.setrlimit(resource.RLIMIT_FSIZE, (36_000, resource.RLIM_INFINITY))
sys.exit(main({[*ARGUMENTS, "--out", str(tmp_path)]!r}))
"""
    full = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "All earlier records are complete; free some space and rerun." in full.stderr
    assert 0 < size(tmp_path) < 20
    evaluate("tiny-llama", "tiny-gsm", CONDITIONS, tmp_path, limit=10)
    assert 0 < len(ran) < 20
    assert contents(tmp_path) == uninterrupted


def test_finished_samples_are_skipped_and_shards_and_a_higher_limit_add_samples(tmp_path, uninterrupted, ran):
    for given, expected in (({"limit": 4}, 8), ({"limit": 4}, 0), ({"shard": (2, 3)}, 4), ({}, 8)):
        ran.clear()
        evaluate("tiny-llama", "tiny-gsm", CONDITIONS, tmp_path, **{"limit": 10} | given)
        assert len(ran) == len(set(ran)) == expected
    assert contents(tmp_path) == uninterrupted


@dataclass(frozen=True)
class OtherPrompts(TinyGsm):
    """The task with the given prompts."""

    prompts: tuple[str, ...] = ()

    def samples(self, limit=None):
        return [Sample(f"tiny-gsm/{number}", text, " 5") for number, text in enumerate(self.prompts)][:limit]


def test_a_ledger_started_with_other_data_is_refused(tmp_path, tiny_llama, monkeypatch):
    one = OtherPrompts(("Question: 2 + 3?", "Question: 3 + 3?"))
    other = OtherPrompts(("Question: 2 + 3?", "Question: 4 + 3?"))
    monkeypatch.setattr(units, "_task_settings", lambda task: {})  # as for tasks whose only setting is a file path
    evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=one)
    evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=other, limit=1)
    with pytest.raises(
        LedgerError, match=r"a record of tiny-gsm/1 with another prompt, so it was started with other data"
    ):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=other)


class Repeating(TinyGsm):
    """Two samples of the same id."""

    def samples(self, limit=None):
        return [Sample("same", "Question: 2 + 3?", " 5")] * 2


@pytest.mark.parametrize("rule", [{"threshold": 0.8}, {"factor": 1.6}], ids=str)
def test_rows_of_a_masked_run_that_ends_early_do_not_wait_for_each_other(tmp_path, tiny_llada, rule):
    """A row that waits has more steps than alone, and masks based on the previous step act in them."""
    fast = find_protocol("tiny-gsm").with_settings({**rule, "block_length": 8})
    both = [evaluate(tiny_llada, fast, masking([5]), tmp_path / str(size), limit=4, batch_size=size) for size in (1, 4)]
    alone, together = ([[record["tokens"] for record in run.records()] for run in runs] for runs in both)
    assert alone == together
    assert [{record["batch"] for record in run.records()} for run in both[1]] == [{4}, {1}]


def test_progress_starts_with_the_finished_samples(tmp_path, tiny_llama):
    reports = []
    for limit in (2, 3):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, limit=limit, batch_size=1,
                 progress=lambda condition, done, total: reports.append((condition.name, done, total)))  # fmt: skip
    assert reports == [("unmasked", done, total) for done, total in [(0, 2), (1, 2), (2, 2), (2, 3), (3, 3)]]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"limit": "2"}, "limit must be an integer or None; got '2'"),
        ({"batch_size": 1.5}, "batch_size must be an integer of at least 1; got 1.5"),
        ({"shard": "0/2"}, r"shard must be two integers, \(0, 4\) for the first of four; got '0/2'"),
        ({"seed": 1.5}, "seed must be an integer from 0"),
        ({"shard": (3, 3)}, r"shard must be two integers, .*; got \(3, 3\)"),
        ({"batch_size": 0}, r"batch_size must be an integer of at least 1; got 0"),
        ({"conditions": []}, r"at least one condition, each with a different name; got \[\]"),
        ({"conditions": [UNMASKED, Condition("unmasked")]}, r"each with a different name"),
        ({"task": find_task("tiny-code")}, r"the protocol tiny-gsm is for the task tiny-gsm; got tiny-code"),
        ({"task": Repeating()}, r"has several samples with the id 'same'"),
        ({"limit": 1, "shard": (1, 2)}, r"the task tiny-gsm has too few samples for shard 1 of 2"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path, tiny_llama, arguments, text):
    given = {"protocol": "tiny-gsm", "conditions": [UNMASKED], "ledger": tmp_path / "new"} | arguments
    with pytest.raises(SinklensError, match=text):
        evaluate(tiny_llama, **given)
    assert not (tmp_path / "new").exists()


def test_a_ledger_and_a_study_do_not_share_a_folder(tmp_path, tiny_llama):
    evaluate(tiny_llama, "tiny-gsm", UNMASKED, tmp_path / "evaluation", limit=1, batch_size=1)
    study = find("existence")(settings={"gen_length": 2})
    with pytest.raises(SinklensError, match="holds an evaluation already; choose another folder for a study"):
        study.run([tiny_llama], [PROMPT], tmp_path / "evaluation")
    study.run([tiny_llama], [PROMPT], tmp_path / "study")
    with pytest.raises(SinklensError, match="study holds a study already; choose another folder for an evaluation"):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path / "study", limit=1)


def test_a_control_of_a_condition_that_is_not_evaluated_warns(tmp_path, tiny_llama):
    control = Condition("control", (AblateHeads(heads=[0]),), control_of="mine")
    with pytest.warns(ControlWarning, match="'control' is a control of 'mine', which is not evaluated"):
        evaluate(tiny_llama, "tiny-gsm", [control], tmp_path, limit=1)
    with warnings.catch_warnings():  # a condition evaluated later finds its control in the ledger
        warnings.simplefilter("error", ControlWarning)
        evaluate(tiny_llama, "tiny-gsm", [Condition("mine", (AblateHeads(heads=[1]),))], tmp_path, limit=1)
        evaluate(tiny_llama, "tiny-gsm", [control], tmp_path, limit=1)
    assert sorted(frame(tmp_path)["condition"]) == ["control", "mine"]
