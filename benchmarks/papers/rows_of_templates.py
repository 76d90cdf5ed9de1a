"""Means with intervals for prompts that share templates, and table rows of them.

The shipped word problems come from seven templates. An interval over prompts says nothing about further templates, so
the rows here have the t interval over the means of the templates (docs/concepts/error-rates.md); for measures that
cannot be negative, on the log scale. Right and wrong answers have score intervals over prompts instead, which stay
within their range.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float
from scipy.stats import t

from sinklens.analyses.intervals import outcomes
from sinklens.analyses.medians import median_interval
from sinklens.tasks.word_problems import Problem, held_out


def problems(per_template: int) -> list[Problem]:
    """The first held-out problems of every template, equally many of each."""
    found: dict[str, list[Problem]] = {}
    for problem in held_out():
        found.setdefault(problem.kind, []).append(problem)
    return [problem for kind in sorted(found) for problem in found[kind][:per_template]]


def mean(values: Float[np.ndarray, " prompt"], asked: Sequence[Problem], digits: int = 1) -> str:
    """``mean [low, high]`` over the means of the templates; NaN values are left out."""
    return _text(_interval(values, asked), digits)


def geometric(values: Float[np.ndarray, " prompt"], asked: Sequence[Problem], digits: int = 1) -> str:
    """As `mean`, of the logarithm: a geometric mean, for values above 0."""
    return _text(np.exp(_interval(np.log(values), asked)), digits)


def middle(values: Float[np.ndarray, " prompt"], digits: int = 1) -> str:
    """The median with its distribution-free 95 % interval over prompts, for heavy tails."""
    return _text(median_interval(values), digits)


def answers(values: Float[np.ndarray, " prompt"], lowest: int = 0) -> str:
    """Right answers (0 or 1), or with `lowest` −1 answers lost, in percent with a 95 % score interval over prompts."""
    found = outcomes(values, lowest, 1)
    return _text((100 * float(found.estimate), 100 * float(found.low), 100 * float(found.high)), 0)


def _interval(values: Float[np.ndarray, " prompt"], asked: Sequence[Problem]) -> Float[np.ndarray, "3"]:
    kinds, known = np.array([problem.kind for problem in asked]), ~np.isnan(values)
    means = np.array([values[known & (kinds == kind)].mean() for kind in sorted(set(kinds[known]))])
    half = t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else np.nan
    return means.mean() + np.array([0.0, -half, half])


def _text(numbers: Iterable[float], digits: int) -> str:
    parts = [f"{number:.{digits}f}".replace("-", "−") for number in numbers]
    return f"{parts[0]} [{parts[1]}, {parts[2]}]"


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
