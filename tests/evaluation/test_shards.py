"""Shards as real processes, as an array job starts them: killed in mid-run, they resume, and the ledger is complete."""

import os
import signal
import subprocess
import sys

import pytest
from ledgers import repeats

from sinklens.evaluation.conditions import masking
from sinklens.evaluation.ledger import LedgerRun
from sinklens.evaluation.runner import evaluate

COMMAND = (
    "exec {python} -m sinklens.cli evaluate tiny-llada --task tiny-gsm --limit 9 --batch 1 --mask-sinks 1 "
    "--shard $SLURM_ARRAY_TASK_ID/3 --out {out}"
)


def start(number, out):
    """The array task `number`: its process, whose progress can be read."""
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "OMP_NUM_THREADS": "1"}
    line = COMMAND.format(python=sys.executable, out=out)
    return subprocess.Popen(["bash", "-c", line], env=environment, stderr=subprocess.PIPE, text=True)


def reproducible(run):
    return [{k: v for k, v in record.items() if k not in ("seconds", "batch")} for record in run.records()]


@pytest.mark.slow
def test_array_tasks_that_are_killed_resume_and_the_ledger_equals_that_of_one_process(tmp_path):
    out = tmp_path / "shared"
    for number in range(2):
        task = start(number, out)
        seen = []
        for line in task.stderr:
            seen.append(line)
            if "1 of 3" in line:  # its first sample is recorded, the others are not
                break
        else:
            pytest.fail("".join(seen))
        os.kill(task.pid, signal.SIGKILL)
        assert task.wait() == -signal.SIGKILL, f"task {number} was not killed in mid-run"
    assert 2 <= sum(len(run.done()) for run in LedgerRun.all(out)) < 12

    again = [start(number, out) for number in range(3)]
    assert [task.wait() for task in again] == [0, 0, 0], [task.stderr.read() for task in again]
    alone = evaluate("tiny-llada", "tiny-gsm", masking([1]), tmp_path / "alone", limit=9, batch=1)
    for reference in alone:
        run = next(one for one in LedgerRun.all(out) if one.name == reference.name)
        assert reproducible(run) == reproducible(reference)
        assert repeats(run) == 0
