"""Means with intervals for prompts that share templates: k templates are k observations, however many the prompts.

Prompts of the shipped tasks come from seven templates. An interval over prompts is too narrow for other templates if
they differ; the t interval over template means is not (docs/concepts/error-rates.md).
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import t

from sinklens.tasks.word_problems import PROBLEM_KINDS, Problem, held_out, template_of


def over_templates(
    values: Sequence[float], problems: Sequence[Problem], low: float = -np.inf, high: float = np.inf
) -> str:
    """``mean [low, high]`` over the means of the templates; NaN values are left out.

    Args:
        low, high: range of possible values, at which the interval is cut.
    """
    values, kinds = np.asarray(values, dtype=float), np.array([template_of(problem.prompt) for problem in problems])
    known = ~np.isnan(values)
    means = np.array([values[known & (kinds == kind)].mean() for kind in sorted(set(kinds[known]))])
    half = t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means))
    return f"{means.mean():.2f} [{max(low, means.mean() - half):.2f}, {min(high, means.mean() + half):.2f}]"


def balanced(per_template: int, kinds: Sequence[str] = PROBLEM_KINDS) -> list[Problem]:
    """The first held-out problems of every template, or of some, equally many of each."""
    found: dict[str, list[Problem]] = {}
    for problem in held_out():
        found.setdefault(problem.kind, []).append(problem)
    return [problem for kind in sorted(kinds) for problem in found[kind][:per_template]]
