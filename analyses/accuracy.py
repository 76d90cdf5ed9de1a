"""How many of the held-out word problems does a model answer exactly?

    python -m sinklens.analyses.accuracy tiny-llada tiny-llama

A problem counts as right if the number after ``####`` is correct. The interval is Wilson's, 95 %. Answers that are
empty or still hold masks count as wrong and are reported.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinklens.errors import PromptError, SettingError, SinklensError
from sinklens.evaluation import statistics
from sinklens.model import load
from sinklens.tasks.word_problems import Problem, held_out, read_answer
from sinklens.tracing import generate


@dataclass(frozen=True)
class Accuracy:
    """Exact-match accuracy of one model.

    Attributes:
        right, total: number of problems.
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
    def share(self) -> float:
        """Right answers, in [0, 1]."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of `share`."""
        return statistics.Accuracy(self.right, self.total).interval

    @property
    def summary(self) -> str:
        """Share, interval and number of problems."""
        low, high = self.interval
        return f"{self.share:.3f} [{low:.3f}, {high:.3f}] of {self.total}"


def measure(model: Any, problems: Sequence[Problem], batch: int = 100, **settings: Any) -> Accuracy:
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
    return Accuracy(sum(r for r, _ in tally.values()), len(ordered), empty, masked, dict(sorted(tally.items())))


def main() -> None:
    """Print the accuracy of each model named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m sinklens.analyses.accuracy", description=__doc__)
    parser.add_argument("models", nargs="+", help="names or folders, as sinklens.load takes them")
    parser.add_argument("--problems", type=int, default=500, help="held-out problems (default 500)")
    options = parser.parse_args()
    try:
        _print(options.models, held_out(options.problems))
    except SinklensError as error:
        parser.exit(1, f"sinklens: {error}\n")


def _print(models: Sequence[str], problems: Sequence[Problem]) -> None:
    if not problems:
        raise SettingError("accuracy needs at least one problem; give --problems of 1 or more.")
    for name in models:
        result = measure(name, problems)
        print(f"{name}: {result.summary} ({result.empty} empty, {result.masked} with leftover masks)")
        for kind, (right, total) in result.by_kind.items():
            print(f"  {kind:18s} {right}/{total}")


if __name__ == "__main__":
    main()
