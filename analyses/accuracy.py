"""How many of the held-out word problems does a model answer exactly?

    python -m sinklens.analyses.accuracy tiny-llada tiny-llama
    python -m sinklens.analyses.accuracy tiny-llada tiny-llama --ranges [--out FILE.csv]

The first form uses the held-out problems, the second one-step problems with numbers inside and outside of the ranges
that the shipped models were trained on (`sinklens.tasks.word_problems.RANGES`).

A problem counts as right if the number after ``####`` is correct. The interval is Wilson's, 95 %. Answers that are
empty or still hold masks count as wrong and are reported.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.errors import PromptError, SettingError, SinklensError
from sinklens.model import load
from sinklens.runs import generate
from sinklens.tasks.word_problems import RANGES, Problem, held_out, in_range, read_answer
from sinklens.utils.escaping import in_csv, say
from sinklens.utils.estimates import Estimate, proportion

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class ProblemAccuracy:
    """Exact-match accuracy of one model.

    Attributes:
        right, total: number of problems answered correctly, and in total.
        empty: answers without any text.
        masked: answers with positions still masked.
        by_kind: problem kind -> (right, total).
    """

    right: int
    total: int
    empty: int
    masked: int
    by_kind: dict[str, tuple[int, int]]

    @property
    def share(self) -> Estimate:
        """Share of right answers with Wilson's 95 % limits."""
        return proportion(self.right, self.total)


def measure(model: Any, problems: Sequence[Problem], batch: int = 100, **settings: Any) -> ProblemAccuracy:
    """Let `model` answer `problems` with its default settings (one token committed per step), or with `settings`.

    Raises:
        PromptError: the model has no tokenizer.
    """
    model = load(model)
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, and the held-out problems are text.")
    tally: dict[str, tuple[int, int]] = {}
    empty = masked = 0
    ordered = sorted(problems, key=lambda problem: len(model.tokenizer(problem.prompt).input_ids))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        run = generate(model, [p.prompt for p in part], record_sinks=False, **settings)
        for problem, answer in zip(part, run.answers, strict=True):
            right, total = tally.get(problem.kind, (0, 0))
            tally[problem.kind] = (right + (read_answer(answer.text or "") == problem.result), total + 1)
            empty, masked = empty + answer.empty, masked + (answer.masks > 0)
    return ProblemAccuracy(sum(r for r, _ in tally.values()), len(ordered), empty, masked, dict(sorted(tally.items())))


def by_range(models: Sequence[Any], size: int = 50) -> "DataFrame":
    """Accuracy by kind of one-step problem and range of its two numbers.

    Args:
        size: problems per kind and range; fewer where no more are distinct.

    Returns:
        One row per model, kind and range: "model", "kind", "low", "high", "right", "total" and Wilson's 95 % interval,
        "share", "share_low", "share_high".
    """
    from pandas import DataFrame

    rows = []
    for model in map(load, models):
        for kind, ranges in RANGES.items():
            for low, high in ranges:
                found = measure(model, in_range(kind, low, high, size))
                share = found.share
                counts = [model.name, kind, low, high, found.right, found.total]
                rows.append([*counts, share.value, share.low, share.high])
    columns = ["model", "kind", "low", "high", "right", "total", "share", "share_low", "share_high"]
    return DataFrame(rows, columns=columns)


def main() -> None:
    """Print the accuracy of each model named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m sinklens.analyses.accuracy", description=__doc__)
    parser.add_argument("models", nargs="+", help="names or folders, as sinklens.load takes them")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems (default 500)")
    parser.add_argument("--ranges", action="store_true", help="problems by the size of their numbers (default: no)")
    parser.add_argument("--size", type=int, default=50, help="with --ranges: problems per range (default 50)")
    parser.add_argument("--out", type=Path, help="with --ranges: CSV file for the table")
    options = parser.parse_args()
    try:
        if options.ranges:
            _print_ranges(options.models, options.size, options.out)
            return
        _print(options.models, held_out(options.problems))
    except SinklensError as error:
        say(f"sinklens: {error}", to=sys.stderr)
        parser.exit(1)


def _print_ranges(models: Sequence[str], size: int, out: Path | None) -> None:
    if size < 1:
        raise SettingError(f"--size must be at least 1; got {size}.")
    table = by_range(models, size)
    if out is not None:
        out.write_text(in_csv(table, "%.6g"))
    for row in table.itertuples():
        share = proportion(row.right, row.total)
        say(f"{row.model:18s} {row.kind:7s} {row.low:3d} to {row.high:3d}  {share}")


def _print(models: Sequence[str], problems: Sequence[Problem]) -> None:
    if not problems:
        raise SettingError("accuracy needs at least one problem; give --problems of 1 or more.")
    for name in models:
        result = measure(name, problems)
        say(f"{name}: {result.share} ({result.empty} empty, {result.masked} with leftover masks)")
        for kind, (right, total) in result.by_kind.items():
            say(f"  {kind:18s} {right}/{total}")


if __name__ == "__main__":
    main()
