"""Evaluations: nothing is lost and nothing is done twice, whatever happens in between."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import pytest
from building import shared_model

from sinklens.errors import LedgerError, PromptError, SettingError
from sinklens.evaluation import units
from sinklens.evaluation.conditions import UNMASKED, Condition, masking
from sinklens.evaluation.ledger import LedgerRun, Writer
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.runner import InProcess, estimate, evaluate
from sinklens.tasks import Sample, find_task
from sinklens.tasks.tiny_gsm import TinyGsm

CONDITIONS = masking([1])
TIMES = ("seconds", "batch", "sinks")  # the sinks' last bits depend on the batch
ARGUMENTS = ["evaluate", "tiny-llama", "--task", "tiny-gsm", "--mask-sinks", "1", "--limit", "10", "--batch", "1"]


class Counting(InProcess):
    """The engine of this process, which remembers what it did."""

    def __init__(self):
        super().__init__()
        self.did = []

    def carry_out(self, job, work):
        for batch, records in super().carry_out(job, work):
            self.did += [(batch.condition.name, record["sample"]) for record in records]
            yield batch, records


def contents(ledger):
    """Every record of every run but its timings; fails on one that is there twice."""
    found = {}
    for run in LedgerRun.all(ledger):
        lines = [line for shard in run.folder.glob("records-*.jsonl") for line in shard.read_bytes().splitlines()]
        records = run.records()
        assert len(lines) == len(records)
        found[run.folder.name] = [{k: v for k, v in record.items() if k not in TIMES} for record in records]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The ledger of a run that nothing happened to."""
    ledger = tmp_path_factory.mktemp("undisturbed")
    evaluate("tiny-llama", "tiny-gsm", CONDITIONS, ledger, limit=10)
    return contents(ledger)


def start(ledger, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "sinklens.cli", *ARGUMENTS, "--out", str(ledger), *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def size(ledger):
    return sum(shard.stat().st_size for shard in ledger.glob("run-*/records-*.jsonl"))


def kill_and_go_on(ledger, times, seed):
    """Kill an evaluation at random moments, some of them before its first record, and then let it finish."""
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
    _, told = process.communicate(timeout=300)
    assert process.returncode == 0, told[-2000:]


def test_two_kills_at_random_moments_change_nothing(tmp_path, undisturbed):
    kill_and_go_on(tmp_path, 2, seed=3)
    assert contents(tmp_path) == undisturbed


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(tmp_path, undisturbed):
    kill_and_go_on(tmp_path, 10, seed=4)
    assert contents(tmp_path) == undisturbed


def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path, undisturbed):
    """A real limit: the process may not write files beyond 3,000 bytes, and then again as it likes."""
    code = f"""
import resource, signal, sys
from sinklens.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
sys.exit(main({[*ARGUMENTS, "--out", str(tmp_path)]!r}))
"""
    full = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "All earlier records are whole; make room and start again." in full.stderr
    assert 0 < size(tmp_path) <= 3000
    engine = Counting()
    evaluate("tiny-llama", "tiny-gsm", CONDITIONS, tmp_path, limit=10, engine=engine)
    assert 0 < len(engine.did) < 20
    assert contents(tmp_path) == undisturbed


def test_what_is_done_is_not_done_again_and_more_samples_go_on(tmp_path, undisturbed):
    for limit, expected in ((4, 8), (4, 0), (10, 12)):
        engine = Counting()
        evaluate("tiny-llama", "tiny-gsm", CONDITIONS, tmp_path, limit=limit, engine=engine)
        assert len(engine.did) == expected
        assert len(set(engine.did)) == expected
    assert contents(tmp_path) == undisturbed


def test_shards_divide_the_samples_and_make_the_same_ledger(tmp_path, undisturbed):
    for number in range(3):
        engine = Counting()
        evaluate("tiny-llama", "tiny-gsm", CONDITIONS, tmp_path, limit=10, shard=(number, 3), engine=engine)
        assert len(engine.did) == 2 * len(range(number, 10, 3))
    assert contents(tmp_path) == undisturbed


def test_a_second_process_on_a_shard_is_told_so_and_does_no_harm(tmp_path, undisturbed, tiny_llama):
    evaluate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=2)
    run = LedgerRun.all(tmp_path)[0]
    with Writer(run), pytest.raises(LedgerError, match=r"another process is writing to .*records-0.jsonl"):
        evaluate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=10)
    evaluate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=10)
    assert contents(tmp_path) == undisturbed


def test_another_setting_is_another_run_and_never_mixes(tmp_path, tiny_llada):
    evaluate(tiny_llada, "tiny-gsm", [UNMASKED], tmp_path, limit=1)
    evaluate(tiny_llada, find_protocol("tiny-gsm").with_settings({"steps": 8}), [UNMASKED], tmp_path, limit=1)
    evaluate(tiny_llada, "tiny-gsm", [UNMASKED], tmp_path, limit=1, seed=1)
    assert [len(records) for records in contents(tmp_path).values()] == [1, 1, 1]


@dataclass(frozen=True)
class Asked(TinyGsm):
    """The task with other data: what its samples ask."""

    asked: tuple[str, ...] = ()

    def samples(self, limit=None):
        return [Sample(f"tiny-gsm/{number}", text, " 5") for number, text in enumerate(self.asked)][:limit]


def test_a_ledger_that_was_begun_with_other_data_is_refused(tmp_path, tiny_llama, monkeypatch):
    one, other = Asked(("Question: 2 + 3?", "Question: 3 + 3?")), Asked(("Question: 2 + 3?", "Question: 4 + 3?"))
    monkeypatch.setattr(units, "_task_settings", lambda task: {})  # as for tasks whose only setting is a file path
    evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=one)
    evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=other, limit=1)
    with pytest.raises(LedgerError, match=r"an answer to tiny-gsm/1, but to another prompt: it was begun with other"):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=other)


def test_samples_of_one_name_are_refused(tmp_path, tiny_llama):
    class Twice(TinyGsm):
        def samples(self, limit=None):
            return [Sample("same", "Question: 2 + 3?", " 5")] * 2

    with pytest.raises(SettingError, match=r"has several samples called 'same'"):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, task=Twice())


def test_rows_of_a_masked_run_with_a_threshold_do_not_wait_for_each_other(tmp_path, tiny_llada):
    """A row that waits has more steps than alone, and masks by the step before act on them."""
    fast = find_protocol("tiny-gsm").with_settings({"threshold": 0.8, "block_length": 8})
    both = [evaluate(tiny_llada, fast, masking([5]), tmp_path / str(size), limit=4, batch=size) for size in (1, 4)]
    alone, together = ([[record["tokens"] for record in run.records()] for run in runs] for runs in both)
    assert alone == together
    assert [{record["batch"] for record in run.records()} for run in both[1]] == [{4}, {1}]


def test_progress_tells_what_was_done_before(tmp_path, tiny_llama):
    told = []
    for limit in (2, 3):
        evaluate(tiny_llama, "tiny-gsm", [UNMASKED], tmp_path, limit=limit, batch=1,
                 progress=lambda condition, done, total: told.append((condition.name, done, total)))  # fmt: skip
    assert told == [("unmasked", done, total) for done, total in [(0, 2), (1, 2), (2, 2), (2, 3), (3, 3)]]


def test_an_estimate_writes_nothing_and_counts_what_is_left(tmp_path, tiny_llama):
    told = estimate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=6, batch=3)
    assert (told.units, told.measured) == (12, 6)
    assert told.seconds > 0
    assert not list(tmp_path.iterdir())
    evaluate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=4)
    assert estimate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=6, batch=3).units == 4
    runs = evaluate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=6)
    took = sum(len(record["tokens"]) for run in runs for record in run.records())
    assert told.tokens == told.passes == pytest.approx(took, rel=0.5)  # one token per pass
    assert estimate(tiny_llama, "tiny-gsm", CONDITIONS, tmp_path, limit=6).units == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"shard": (3, 3)}, r"shards of 3 are numbered 0 to 2; got 3"),
        ({"batch": 0}, r"a batch holds at least 1 sample; got 0"),
        ({"conditions": []}, r"needs conditions of different names; got \[\]"),
        ({"conditions": [UNMASKED, Condition("unmasked")]}, r"conditions of different names"),
        ({"task": find_task("tiny-code")}, r"the protocol tiny-gsm is for the task tiny-gsm; got tiny-code"),
        ({"limit": 1, "shard": (1, 2)}, r"there is no sample for shard 1 of 2"),
    ],
)
def test_bad_calls_say_what_is_allowed(tmp_path, tiny_llama, arguments, text):
    given = {"conditions": CONDITIONS, "limit": 2} | arguments
    with pytest.raises(SettingError, match=text):
        evaluate(tiny_llama, "tiny-gsm", ledger=tmp_path, **given)


def test_a_model_without_a_tokenizer_is_refused_before_anything_is_written(tmp_path):
    model = shared_model()
    with pytest.raises(PromptError, match=r"has no tokenizer, and the prompts of this task are text\. Put the files"):
        evaluate(model, "tiny-gsm", CONDITIONS, tmp_path / "results", limit=2)
    assert not (tmp_path / "results").exists()


@dataclass(frozen=True)
class OtherAnswers(TinyGsm):
    """The same prompts, and other right answers."""

    def samples(self, limit=None):
        return [replace(sample, reference="#### 1") for sample in super().samples(limit)]


def test_data_with_other_answers_are_refused(tmp_path):
    """Else the verdicts on the old answers would stand."""
    evaluate("tiny-llama", "tiny-gsm", [UNMASKED], tmp_path, limit=1)
    with pytest.raises(LedgerError, match=r"to tiny-gsm/0, but to another expected answer: it was begun with other"):
        evaluate("tiny-llama", "tiny-gsm", [UNMASKED], tmp_path, limit=1, task=OtherAnswers())
