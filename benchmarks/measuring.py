"""Ratios in time and memory between two implementations of the same work, and the hardware they were measured on.

Timing waits for the GPU: the clock starts when the device is idle and stops when it is idle again.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

CPU = torch.device("cpu")
HEAD = "| A ÷ B | median | range | A | B |"


@dataclass(frozen=True)
class Ratio:
    """One measured ratio.

    Attributes:
        what: A ÷ B in words.
        median, low, high: median and range of the pairwise ratios.
        pairs: number of pairs.
        a, b: medians of A and B, which show the scale; quote the ratio.
        unit: unit of `a` and `b`, "s", "MB" or what is counted.
    """

    what: str
    median: float
    low: float
    high: float
    pairs: int
    a: float
    b: float
    unit: str = "s"


def compare(
    what: str,
    a: Callable[[], object],
    b: Callable[[], object],
    pairs: int,
    less: float = 0.0,
    device: torch.device = CPU,
) -> Ratio:
    """Time `a` and `b` in turn, after one warm-up run of each; `less` seconds are subtracted from every time."""
    first, second = in_turn((a, b), pairs, device)
    return ratio_of(what, [time - less for time in first], [time - less for time in second])


def in_turn(works: Iterable[Callable[[], object]], rounds: int, device: torch.device = CPU) -> list[list[float]]:
    """The times of each work, timed in turn after one warm-up run of each."""
    works = [*works]
    for work in works:
        work()
    times = [[seconds(work, device) for work in works] for _ in range(rounds)]
    return [[*of_one] for of_one in zip(*times, strict=True)]


def cpu_times(works: Iterable[Callable[[], object]], rounds: int) -> list[list[float]]:
    """The CPU times of each work, taken in turn after one warm-up run of each."""

    def spent(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    works = [*works]
    times = [[spent(work) for work in works] for _ in range(rounds + 1)]
    return [[*of_one] for of_one in zip(*times[1:], strict=True)]


def ratio_of(what: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    """The ratio of times that were measured in turn."""
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    median = statistics.median(ratios)
    return Ratio(what, median, ratios[0], ratios[-1], len(ratios), statistics.median(a), statistics.median(b))


def seconds(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Wall time of `work`, including its work on `device`."""
    settle(device)
    started = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - started


def settle(device: torch.device) -> None:
    """Wait until `device` is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Peak memory of the tensors that `work` allocates, in MB."""
    if device.type == "cuda":
        settle(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        settle(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    allocated, most = 0, 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    return most / 1e6


def compare_peaks(
    what: str,
    a: Callable[[], object],
    b: Callable[[], object],
    above: float = 0.0,
    device: torch.device = CPU,
) -> Ratio:
    """The ratio of the peak memory of `a` and `b`, each minus `above`; peaks do not vary, so each is measured once."""
    a(), b()
    first, second = peak(a, device) - above, peak(b, device) - above
    ratio = first / second
    return Ratio(what, ratio, ratio, ratio, 1, first, second, "MB")


def hardware() -> dict[str, str]:
    """The hardware and package versions of the measurements."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), model
        )
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "nnsight", "transformer-lens")},
    }


def table(results: dict[str, dict]) -> list[str]:
    """All results as the lines of a Markdown table."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for r in results.values():
        sizes = " | ".join(
            f"{r[s] * 1e3:.0f} ms" if r["unit"] == "s" else f"{r[s]:.1f} {r['unit']}" for s in ("a", "b")
        )
        spread = f"{r['median']:.3f} | {r['low']:.2f}–{r['high']:.2f}" if r["pairs"] > 1 else f"{r['median']:.3f} | "
        lines.append(f"| {r['what']} | {spread} | {sizes} |")
    return lines
