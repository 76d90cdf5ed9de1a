"""Ledgers: records persist, and no sample counts twice; test_runner.py kills evaluations and fills their disk."""

import json
import random
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sinklens.errors import LedgerError
from sinklens.evaluation import LedgerRun
from sinklens.evaluation.ledger import Writer, export, holds_runs, merge

WHAT = {"model": "tiny", "condition": {"name": "unmasked"}, "seed": 0}
ENTRIES = [{"sample": f"s{number:03d}", "text": "→ “\n\t” " * 3, "verdict": number % 2 == 0} for number in range(40)]

NESTED = LedgerRun.of(Path(), {"settings": json.loads("[" * 70 + "]" * 70)})

WORKER = """
import sys
from pathlib import Path
from sinklens.evaluation.ledger import LedgerRun, Writer
with Writer(LedgerRun.of(Path(sys.argv[1]), {"seed": 0}), int(sys.argv[2])) as writer:
    for number in range(40):
        writer.add({"sample": f"{sys.argv[2]}-{number:03d}"})
"""


def written(folder, records, what=WHAT, kind="records"):
    """A run with these records."""
    run = LedgerRun.of(folder, what)
    with Writer(run, kind=kind) as writer:
        writer.add(*records)
    return run


def test_records_are_read_unchanged_and_sorted_by_sample(tmp_path):
    run = written(tmp_path, ENTRIES[::-1])
    assert (run.records(), run.done()) == (ENTRIES, {entry["sample"] for entry in ENTRIES})
    assert [found.what for found in LedgerRun.all(tmp_path)] == [WHAT]


def test_another_setting_makes_another_run_and_the_same_settings_find_the_same_run(tmp_path):
    first, other = LedgerRun.of(tmp_path, WHAT).begin(), LedgerRun.of(tmp_path, WHAT | {"seed": 1}).begin()
    assert first.name == LedgerRun.of(tmp_path, dict(reversed(WHAT.items()))).begin().name != other.name
    assert len(LedgerRun.all(str(tmp_path))) == 2


def test_a_shard_has_one_writer_at_a_time_and_another_writer_takes_another_shard(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT)
    with Writer(run) as first:
        with pytest.raises(LedgerError, match=r"another process is writing to .*records, shard 0\); wait until"):
            Writer(run).__enter__()
        with Writer(run, shard=1) as second:
            first.add(ENTRIES[0])
            second.add(ENTRIES[1])
            second.add(ENTRIES[0] | {"verdict": "a later one"})
    with Writer(run):  # the lock was released
        pass
    assert run.records() == ENTRIES[:2]


@pytest.mark.parametrize(("kind", "kept"), [("records", 1), ("verdicts", 2)])
def test_a_sample_keeps_its_first_record_and_its_last_verdict(tmp_path, kind, kept):
    for verdict in (1, 2):
        run = written(tmp_path, [{"sample": "s", "verdict": verdict}], kind=kind)
    assert run.records(kind) == [{"sample": "s", "verdict": kept}]


def test_records_added_together_are_stored_together_or_not_at_all(tmp_path):
    run = LedgerRun.of(tmp_path, WHAT)
    with Writer(run) as writer:
        writer.add(*ENTRIES[:2])
        with pytest.raises(KeyError, match="sample"):
            writer.add(ENTRIES[2], {"no sample": 1})
        with pytest.raises(LedgerError, match="surrogates not allowed"):  # after the first was inserted
            writer.add(ENTRIES[3], {"sample": "\ud800"})
        assert run.records() == ENTRIES[:2]
        writer.add(ENTRIES[4])
    assert run.records() == [*ENTRIES[:2], ENTRIES[4]]


@pytest.mark.extended
def test_many_processes_create_and_fill_one_ledger_at_once(tmp_path):
    arguments = [[sys.executable, "-c", WORKER, str(tmp_path), str(shard)] for shard in range(8)]
    processes = [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for call in arguments]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr[-1500:]
    (run,) = LedgerRun.all(tmp_path)
    assert [record["sample"] for record in run.records()] == [f"{n}-{m:03d}" for n in range(8) for m in range(40)]


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3" "$1"
"""
READING = """
import sys
from pathlib import Path
from sinklens.evaluation.ledger import LedgerRun
(run,) = LedgerRun.all(Path(sys.argv[1]))
print(len(run.records()), len(run.done()))
run.begin()
"""


def test_a_ledger_on_read_only_media_can_be_read_and_not_written(tmp_path):
    """A real read-only mount."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let its users mount a folder (unshare -rm)")
    written(tmp_path, ENTRIES[:6])
    call = ["unshare", "-rm", "sh", "-c", READ_ONLY, "sh", str(tmp_path), sys.executable, READING]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["6", "6"]
    assert re.search("LedgerError: could not write to .* complete; remove the cause and rerun", done.stderr)


OLD = [{"sample": f"s{number}", "prompt_sha256": "0", "verdict": True} for number in range(4)]


def test_merging_copies_every_run_and_record_once(tmp_path):
    """Two of the ledgers overlap."""
    other = WHAT | {"seed": 1}
    written(tmp_path / "old", [{"sample": "s0", "verdict": False}], kind="verdicts")
    for folder, what, records in (
        ("old", WHAT, OLD[:2]),
        ("new", WHAT, OLD[1:3]),
        ("new", other, OLD[:1]),
        ("out", WHAT, OLD[3:]),
    ):
        written(tmp_path / folder, records, what)
    assert [merge([tmp_path / "old", tmp_path / "new"], tmp_path / "out") for _ in range(2)] == [5, 0]
    merged = {run.what["seed"]: run for run in LedgerRun.all(tmp_path / "out")}
    assert merged[0].records() == OLD
    assert merged[0].records("verdicts") == [{"sample": "s0", "verdict": False}]
    assert merged[1].records() == OLD[:1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt_sha256": "1"}, "another prompt"),
        ({"reference_sha256": "1"}, "another expected answer"),
        ({"verdict": False, "text": "other"}, "another verdict"),
        ({"text": "other"}, "another text"),
    ],
)
def test_ledgers_that_contradict_each_other_are_not_merged(tmp_path, changes, text):
    for folder, more in (("a", {}), ("b", changes)):
        written(tmp_path / folder, [OLD[0] | {"reference_sha256": "0"} | more])
    with pytest.raises(LedgerError, match=rf"a and .*b have records of s0 in run-.* with {text}.*; keep them apart"):
        merge([tmp_path / "a"], tmp_path / "b")
    for order in ("ab", "ba"):  # nothing is copied first
        with pytest.raises(LedgerError, match=rf"{order[1]} and .*{order[0]} have records of s0 in run-.* with {text}"):
            merge([tmp_path / name for name in order], tmp_path / "out")
    assert not holds_runs(tmp_path / "out")


def test_an_export_holds_every_record_with_its_run(tmp_path):
    run = written(tmp_path, ENTRIES)
    written(tmp_path, ENTRIES[:1], kind="verdicts")
    assert export(tmp_path, tmp_path / "all.jsonl") == 41
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [line.pop("record") for line in lines] == [*ENTRIES, ENTRIES[0]]
    assert lines == [{"run": run.name, "what": WHAT, "kind": kind} for kind in ["records"] * 40 + ["verdicts"]]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(LedgerError, match=r"holds no run; create one with `sinklens evaluate"):
        LedgerRun.all(tmp_path)
    assert not holds_runs(tmp_path)


def edited(change):
    """The file after SQL statements."""

    def changed(content):
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(content)
            database.executescript(change)
            return database.serialize()

    return changed


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        (lambda content: content[:4096] + b"?" * (len(content) - 4096), r"cannot be read \(.*malformed\); restore it"),
        (lambda content: b"no database" * 100, r"(cannot be read|could not write to) .*file is not a database"),
        (edited("PRAGMA user_version = 4"), r"ledger.sqlite has format 4; this version reads 3"),
    ],
    ids=["malformed", "another file", "newer"],
)
def test_a_damaged_or_newer_database_is_refused(tmp_path, damaged, text):
    run, file = written(tmp_path, ENTRIES), tmp_path / "ledger.sqlite"
    file.write_bytes(damaged(file.read_bytes()))
    for use in (run.records, run.done, Writer(run).__enter__):
        with pytest.raises(LedgerError, match=text if use == run.records else "ledger.sqlite"):
            use()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda content: content.replace(b'"verdict": true', b'"verdict":false', 1), r"record of 's0\d\d' in"),
        (edited("UPDATE records SET record = CAST(record AS BLOB) WHERE sample = 's003'"), "the record of 's003'"),
        (edited("UPDATE records SET sample = 's100' WHERE sample = 's003'"), "the record of 's100'"),
        (edited("UPDATE records SET run = '../x' WHERE sample = 's003'"), r"place of records \('records' of '../x'\)"),
        (edited("UPDATE records SET kind = 'others' WHERE sample = 's003'"), r"place of records \('others'"),
        (edited("UPDATE runs SET what = replace(what, 'tiny', 'huge')"), "the description of 'run-"),
        (edited("UPDATE runs SET name = '../x'"), "the description of '../x'"),
        (edited("UPDATE runs SET what = replace(what, '0', '" + "9" * 5000 + "')"), "the description of 'run-"),
        (edited("PRAGMA user_version = 0"), "has format 0"),
        (edited(f"INSERT INTO runs VALUES ('{NESTED.name}', '{json.dumps(NESTED.what)}')"), "the description of 'run-"),
    ],
)  # fmt: skip
def test_what_was_damaged_or_edited_is_refused_and_named(tmp_path, change, text):
    written(tmp_path, ENTRIES)
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(LedgerError, match=rf"ledger\.sqlite.*{text}"):
        export(tmp_path, tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_no_flipped_or_lost_byte_changes_what_is_read(tmp_path):
    written(tmp_path / "a", ENTRIES[:8])
    written(tmp_path / "a", ENTRIES[:2], kind="verdicts")
    content, bad, file = (tmp_path / "a" / "ledger.sqlite").read_bytes(), tmp_path / "b", tmp_path / "all.jsonl"
    export(tmp_path / "a", file)
    sound, rng, refused = file.read_text(), random.Random(0), 0
    bad.mkdir()
    for trial in range(300):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content)) if trial % 3 else rng.randrange(100)] ^= 1 << rng.randrange(8)
        (bad / "ledger.sqlite").write_bytes(flipped if trial % 5 else content[: rng.randrange(len(content))])
        try:
            export(bad, file)
            assert file.read_text() == sound
        except LedgerError:
            refused += 1
    assert 50 < refused < 300


def test_merging_keeps_the_sound_records_of_a_damaged_ledger_and_says_what_was_lost(tmp_path):
    written(tmp_path / "a", ENTRIES)
    file = tmp_path / "a" / "ledger.sqlite"
    file.write_bytes(file.read_bytes().replace(b'"verdict": true', b'"verdict":false', 1))
    with pytest.raises(LedgerError, match=r"39 sound records were copied to .*out, and others were lost: .*'s0\d\d'"):
        merge([tmp_path / "a"], tmp_path / "out")
    (run,) = LedgerRun.all(tmp_path / "out")
    assert len(run.records()) == 39
    assert all(record in ENTRIES for record in run.records())
