"""How many one-step word problems does a model answer exactly, by the size of their numbers?

    python -m sinklens.analyses.accuracy tiny-llada tiny-llama [--out FILE.csv]

The numbers are inside and outside of the ranges that the shipped models were trained on
(`sinklens.tasks.word_problems.RANGES`); ``sinklens evaluate`` measures the held-out problems of training (tiny-gsm).

A problem counts as right if the number after ``####`` is correct. The interval is Wilson's, 95 %. Answers that are
empty or still hold masks count as wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from sinklens.errors import PromptError, SinklensError
from sinklens.model import load
from sinklens.runs import generate
from sinklens.tasks.word_problems import RANGES, Problem, in_range, read_answer
from sinklens.utils.arguments import Count, read_as
from sinklens.utils.escaping import in_csv, say
from sinklens.utils.estimates import proportion


def measure(model: Any, problems: Sequence[Problem], batch: int = 100, **settings: Any) -> list[bool]:
    """Whether `model` answers each of `problems` right, in the order of their lengths: with its default settings (one
    token committed per step), or with `settings`.

    Raises:
        PromptError: the model has no tokenizer.
    """
    model = load(model)
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer, and the held-out problems are text.")
    right: list[bool] = []
    ordered = sorted(problems, key=lambda problem: len(model.tokenizer(problem.prompt).input_ids))
    for start in range(0, len(ordered), batch):
        part = ordered[start : start + batch]
        run = generate(model, [p.prompt for p in part], record_sinks=False, **settings)
        answers = zip(part, run.answers, strict=True)
        right += [read_answer(answer.text or "") == problem.result for problem, answer in answers]
    return right


def by_range(models: Sequence[Any], size: int = 50) -> "DataFrame":
    """Accuracy by kind of one-step problem and range of its two numbers.

    Args:
        size: problems per kind and range; fewer where no more are distinct.

    Returns:
        One row per model, kind and range: "model", "kind", "low", "high", "right", "total" and Wilson's 95 % interval,
        "share", "share_low", "share_high".
    """
    rows = []
    for model in map(load, models):
        for kind, ranges in RANGES.items():
            for low, high in ranges:
                found = measure(model, in_range(kind, low, high, size))
                share = proportion(sum(found), len(found))
                counts = [model.name, kind, low, high, sum(found), len(found)]
                rows.append([*counts, share.value, share.low, share.high])
    columns = ["model", "kind", "low", "high", "right", "total", "share", "share_low", "share_high"]
    return DataFrame(rows, columns=columns)


def main() -> None:
    """Print the accuracy of each model named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m sinklens.analyses.accuracy", description=__doc__)
    parser.add_argument("models", nargs="+", help="names or folders, as sinklens.load takes them")
    parser.add_argument("--size", type=int, default=50, help="problems per range (default 50)")
    parser.add_argument("--out", type=Path, help="CSV file for the table")
    options = parser.parse_args()
    try:
        table = by_range(options.models, read_as(Count, "--size", options.size))
    except SinklensError as error:
        say(f"sinklens: {error}", to=sys.stderr)
        parser.exit(1)
    if options.out is not None:
        options.out.write_text(in_csv(table, "%.6g"))
    for row in table.itertuples():
        share = proportion(row.right, row.total)
        say(f"{row.model:18s} {row.kind:7s} {row.low:3d} to {row.high:3d}  {share}")


if __name__ == "__main__":
    main()
