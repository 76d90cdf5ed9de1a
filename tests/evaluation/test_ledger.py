"""Ledgers: records persist, a kill loses at most the record in flight, and no sample counts twice."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest

from sinklens.errors import LedgerError
from sinklens.evaluation.ledger import LedgerRun, Writer

WHAT = {"model": "tiny", "condition": {"name": "unmasked"}, "seed": 0}
ENTRIES = [{"sample": f"s{number:03d}", "text": "→ “\n\t” " * 3, "verdict": number % 2 == 0} for number in range(40)]

WORKER = """
import sys, time
from pathlib import Path
from sinklens.evaluation.ledger import LedgerRun, Writer
run = LedgerRun.of(Path(sys.argv[1]), {"model": "tiny", "condition": {"name": "unmasked"}, "seed": 0}).begin()
done = run.done()
with Writer(run) as writer:
    for number in range(40):
        sample = f"s{number:03d}"
        if sample not in done:
            writer.add({"sample": sample, "text": "→ “\\n\\t” " * 3, "verdict": number % 2 == 0})
            print(sample, flush=True)
            time.sleep(0.01)
"""


def worker(ledger):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(ledger)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_records_are_read_unchanged_and_sorted_by_sample(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT).begin()
    with Writer(run) as writer:
        for entry in reversed(ENTRIES):
            writer.add(entry)
    assert run.records() == ENTRIES
    assert run.done() == {entry["sample"] for entry in ENTRIES}
    assert [found.what for found in LedgerRun.all(tmp_path)] == [WHAT]


def test_another_setting_makes_another_run_and_the_same_settings_find_the_same_run(tmp_path):
    first, other = LedgerRun.of(tmp_path, WHAT).begin(), LedgerRun.of(tmp_path, WHAT | {"seed": 1}).begin()
    again = LedgerRun.of(tmp_path, dict(reversed(WHAT.items()))).begin()
    assert first.folder == again.folder != other.folder
    assert len(LedgerRun.all(tmp_path)) == 2


def test_the_next_writer_drops_a_partial_last_record(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT).begin()
    with Writer(run) as writer:
        for entry in ENTRIES[:3]:
            writer.add(entry)
    complete = writer.path.read_bytes()
    last = complete.splitlines(keepends=True)[-1]
    for kept in range(1, len(last)):  # cut at every byte of the last line
        writer.path.write_bytes(complete[: -len(last) + kept])
        assert run.records() == ENTRIES[:2]
    with Writer(run) as writer:
        writer.add(ENTRIES[3])
    assert run.records() == [*ENTRIES[:2], ENTRIES[3]]


def test_a_damaged_record_in_the_middle_raises_an_error_that_names_the_line(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT).begin()
    with Writer(run) as writer:
        for entry in ENTRIES[:3]:
            writer.add(entry)
    lines = writer.path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"s001", b"s777")
    writer.path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"records-0.jsonl, line 2: the checksum does not match"):
        run.records()
    with pytest.raises(LedgerError, match=r"line 2"), Writer(run):
        pass


def test_a_shard_has_one_writer_at_a_time_and_another_writer_takes_another_shard(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT).begin()
    with Writer(run) as first:
        with pytest.raises(LedgerError, match=r"another process is writing to .*records-0.jsonl; wait until"):
            Writer(run).__enter__()
        with Writer(run, shard=1) as second:
            first.add(ENTRIES[0])
            second.add(ENTRIES[1])
            second.add(ENTRIES[0] | {"verdict": "a later one"})
    with Writer(run):  # the lock was released
        pass
    assert run.records() == ENTRIES[:2]


def test_two_processes_on_one_ledger_do_not_corrupt_it(tmp_path):
    """This process writes for as long as the other takes to start, and to find it."""
    run = LedgerRun.of(tmp_path, WHAT).begin()
    with Writer(run) as writer:
        for entry in ENTRIES[:20]:
            writer.add(entry)
        _, stderr = worker(tmp_path).communicate(timeout=60)
    assert b"another process is writing" in stderr
    worker(tmp_path).communicate(timeout=60)
    assert run.records() == ENTRIES


def test_kills_at_random_moments_lose_and_repeat_no_sample(tmp_path):
    rng = random.Random(5)
    for _ in range(10):
        process = worker(tmp_path)
        for _ in range(rng.randint(1, 4)):
            process.stdout.readline()
        time.sleep(rng.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    worker(tmp_path).communicate(timeout=60)
    run = LedgerRun.of(tmp_path, WHAT).begin()
    assert run.records() == ENTRIES
    lines = (run.folder / "records-0.jsonl").read_bytes().splitlines()
    assert len(lines) == len(ENTRIES)


def test_a_full_disk_leaves_no_partial_record(tmp_path):
    """A real limit: the process cannot write files beyond 1,000 bytes."""
    code = f"""
import resource, signal, sys
from pathlib import Path
from sinklens.errors import LedgerError
from sinklens.evaluation.ledger import LedgerRun, Writer
run = LedgerRun.of(Path(r"{tmp_path}"), {WHAT!r}).begin()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # Python would keep the truncated files and fail on them later
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with Writer(run) as writer:
    written = 0
    try:
        for number in range(40):
            writer.add({{"sample": str(number), "text": "x" * 150}})
            written += 1
    except LedgerError as error:
        print("refused:", "All earlier records are complete" in str(error), written, len(run.records()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.add({{"sample": "after", "text": ""}})
print(len(run.records()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[:2] == ["refused: True 5 5", "6"], done.stderr[-1500:]


def test_a_folder_without_runs_or_with_a_broken_one_is_refused(tmp_path):
    with pytest.raises(LedgerError, match=r"holds no run; create one with `sinklens evaluate"):
        LedgerRun.all(tmp_path)
    note = LedgerRun.of(tmp_path, WHAT).begin().folder / "run.json"
    note.write_text(note.read_text()[:20])
    with pytest.raises(LedgerError, match=r"cannot be read .* restore the file or delete its folder"):
        LedgerRun.all(tmp_path)
    note.write_text(json.dumps({"format": "something else", "what": {}}))
    with pytest.raises(LedgerError, match=r"has format 'something else'; this version reads"):
        LedgerRun.all(tmp_path)
