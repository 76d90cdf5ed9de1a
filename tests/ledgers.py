"""Ledgers with records made by hand: what tables and scores say of them is known."""

import hashlib
import sqlite3

from sinklens.evaluation import UNMASKED, LedgerRun
from sinklens.evaluation.ledger import Writer
from sinklens.evaluation.protocols import find_protocol

HAND = {"kind": "", "empty": False, "ended": True, "masks": 0, "steps": 4, "device": "cpu"}


def forget(run):
    """Delete the records of a run, and keep its verdicts on programs."""
    with sqlite3.connect(run.folder / "ledger.sqlite") as database:
        database.execute("DELETE FROM records WHERE run = ? AND kind = 'records'", [run.name])


def planted_run(ledger, verdicts, condition=UNMASKED, *, model="tiny-llada", protocol="tiny-gsm", **changes):
    """A run with these verdicts, by sample; `changes` are of what the run is, or else of its records."""
    asked = find_protocol(protocol)
    what = {
        "model": model, "family": "llada", "sampler": "llada", "revision": "", "weights": "0", "dtype": "float32",
        "condition": condition.described(), "protocol": {"name": asked.name} | asked.what,
        "settings": {"gen_length": 24, "steps": 24}, "seed": 0,
    }  # fmt: skip
    run = LedgerRun.of(ledger, {name: changes.pop(name, value) for name, value in what.items()}).begin()
    made = {"text": "", "seconds": 0.5, "sinks": {"per_head": 1.0}} | changes
    with Writer(run) as writer:
        writer.add(*(HAND | {"sample": sample, "verdict": verdict} | made for sample, verdict in verdicts.items()))
    return run


def answered(run, task, texts):
    """Write one record for each sample of a code task that is in `texts`."""
    with Writer(run) as writer:
        for sample in task.samples():
            if sample.id in texts:
                digest = hashlib.sha256((sample.prompt + sample.opening).encode()).hexdigest()
                writer.add(HAND | {
                    "sample": sample.id, "verdict": None, "text": texts[sample.id], "prompt_sha256": digest,
                    "seconds": 0.5, "sinks": {"per_head": 1.0},
                })  # fmt: skip
    return run
