"""Host memory while the sinks of many runs are recorded and read: does it grow with the number of runs?

    python -m benchmarks.many_runs [--runs 1000] [--keep all top sinks]

`collect_sinks` records tiny-llada on word problems, 8 tokens in 8 steps, into shards of 256 KiB, so that hundreds of
shards are written. The resident memory of the process is read every 100 runs. Then a process of its own opens the store
and reads one run after the other, as a track. Each measurement is a process of its own.

The memory after the first 100 runs is compared with that after the last: by then, libraries are imported and
allocators have their pools. Anonymous memory excludes pages of memory-mapped files, which the system takes back.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sinklens
from benchmarks.measuring import Ratio
from sinklens.features import collect_sinks
from sinklens.sinks import RunStore, run_store
from sinklens.tasks.word_problems import training

EVERY = 100
GIVEN = {"gen_length": 8, "steps": 8, "block_length": 8}
Series = dict[int, tuple[float, float]]
"""Number of runs -> resident and anonymous memory in MB."""


def resident() -> tuple[float, float]:
    """Resident memory of this process, and the anonymous part of it, in MB."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    found = {line[0]: int(line[1]) / 1e3 for line in lines if line[0] in ("VmRSS:", "RssAnon:")}
    return found["VmRSS:"], found["RssAnon:"]


def record(path: Path, runs: int, keep: Any) -> Series:
    """Memory while `runs` runs are recorded."""
    run_store.SHARD = 2**18
    model, found = sinklens.load("tiny-llada", check=False), {}
    prompts = [problem.prompt for problem in training(seed=3, size=runs)]

    def report(done: int, total: int) -> None:
        if done // EVERY > max(found, default=0) // EVERY:
            found[done] = resident()

    collect_sinks(model, prompts, path, keep=keep, batch=5, report=report, **GIVEN)
    return found


def read(path: Path, runs: int, keep: Any) -> Series:
    """Memory while the runs of a store are read, one at a time."""
    store, found, total = RunStore(path), {}, 0.0
    for run in range(runs):
        if keep == "all":
            total += float(store.track(run).scores().sum())
        elif keep == "top":
            total += float(store.dataset()["top_score"].isel(batch=run).sum())
        else:
            total += float(store.sinks(run)["score"].sum())
        if (run + 1) % EVERY == 0:
            found[run + 1] = resident()
    assert total > 0
    return found


def apart(work: Callable[..., Series], *given: object) -> Series:
    """The result of `work` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


def many_runs(runs: int, kept: tuple[str, ...] = ("all", "top", "sinks")) -> Iterator[Ratio]:
    """Anonymous memory after `runs` runs ÷ after the first 100, recording and reading."""
    for keep in kept:
        with tempfile.TemporaryDirectory() as folder:
            for verb, work in (("recorded", record), ("read", read)):
                found = apart(work, Path(folder) / "runs.zarr", runs, keep)
                for number, (whole, own) in found.items():
                    print(
                        f"{keep}, {number} {verb}: {whole:.1f} MB, {own:.1f} MB anonymous", file=sys.stderr, flush=True
                    )
                first, last = (found[number][1] for number in (min(found), max(found)))
                what = f"memory after {max(found):,} runs {verb} ÷ after {min(found)} (tiny-llada, keep={keep!r})"
                yield Ratio(what, last / first, last / first, last / first, 1, last, first, "MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--keep", nargs="+", default=["all", "top", "sinks"])
    options = parser.parse_args()
    for ratio in many_runs(options.runs, tuple(options.keep)):
        print(f"{ratio.what}: {ratio.median:.3f} ({ratio.a:.1f} ÷ {ratio.b:.1f} MB)")
