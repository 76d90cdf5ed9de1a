"""Problems and table cells for the scripts in this folder, whose prompts share templates.

The shipped word problems come from seven templates. An interval over prompts is too narrow for other templates if they
differ, so means have the t interval over the means of the templates (docs/concepts/error-rates.md). Right and wrong
answers have score intervals over prompts instead, which stay within their range.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

import sinklens
from sinklens.analyses.estimates.deciding import in_groups
from sinklens.analyses.estimates.ratios import geometric as geometric_interval
from sinklens.analyses.estimates.ratios import median
from sinklens.evaluation.verification import mean_of
from sinklens.families.samplers import settings_for
from sinklens.tasks.word_problems import PROBLEM_KINDS, Problem, held_out
from sinklens.utils.estimates import Estimate, outcomes

RANDOM = {"remasking": "random", "alg": "origin", "order": "random"}
"""The settings, each of other samplers, by which positions are decided in random order."""


class Call(NamedTuple):
    """What a script is asked to measure.

    Attributes:
        models: names of models.
        problems: the problems, equally many of each template.
        settings: sampler settings of its runs.
    """

    models: Sequence[str]
    problems: list[Problem]
    settings: dict[str, Any]


def call(given: Sequence[str], models: Sequence[str], each: int = 0) -> Call:
    """The arguments of a script: ``[MODEL ...] [each=N] [SETTING=VALUE ...]``, or ``--help``.

    Args:
        models, each: models, and problems of each template, if none are given; without `each`, the script takes models
            only.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(models)}")
    given = parser.parse_args(given).models
    settings = {name: read(value) for name, _, value in (one.partition("=") for one in given if "=" in one)}
    if settings and not each:
        parser.error(f"this script takes models only; got {', '.join(settings)}.")
    problems = balanced(settings.pop("each", each))
    return Call([one for one in given if "=" not in one] or models, problems, settings)


def read(value: str) -> Any:
    """The value of a setting: parsed as JSON, or else the text itself."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def loaded(name: str, masks: bool = False, shuffles: bool = False, words: Iterable[str] = ()) -> sinklens.Model:
    """A model; the script ends with the reason if the model lacks what it needs.

    Args:
        masks: whether the script needs a mask token.
        shuffles: whether it needs a random order (`RANDOM`).
        words: texts that must be single tokens.
    """
    model = sinklens.load(name)
    parted = [word for word in words if len(model.encode(word, prepend_bos=False).ids[0]) != 1]
    lacks = {
        "a mask token": masks and model.mask_token_id is None,
        "a sampler with a random order": shuffles and not having(model, RANDOM),
        f"single tokens for {', '.join(map(repr, parted))}": parted,
    }
    for lack, holds in lacks.items():
        if holds:
            sys.exit(f"{name} lacks what this script needs: {lack}.")
    return model


def having(model: sinklens.Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that the model's sampler has."""
    known = settings_for(model, {}).settings()
    return {name: value for name, value in settings.items() if name in known}


def balanced(
    per_template: int, kinds: Iterable[str] = PROBLEM_KINDS, among: Sequence[Problem] | None = None
) -> list[Problem]:
    """The first problems of every template, or of some, equally many of each: held-out problems unless `among` says."""
    among = held_out() if among is None else among
    return [one for kind in sorted(kinds) for one in [p for p in among if p.kind == kind][:per_template]]


def mean(
    values: Float[np.ndarray, " prompt"],
    asked: Sequence[Problem],
    form: str = ".1f",
    within: tuple[float, float] = (-np.inf, np.inf),
) -> str:
    """``mean [low, high]`` over the means of the templates; NaN values are left out.

    Args:
        asked: the problem of each value.
        form: format of the numbers.
        within: range of possible values, at which the interval is cut.
    """
    found = mean_of(_by_template(values, asked).tolist())
    return _text(np.clip((found.value, found.low, found.high), *within), form)


def geometric(values: Float[np.ndarray, " prompt"], asked: Sequence[Problem], form: str = ".1f") -> str:
    """As `mean`, of the logarithm: a geometric mean, for values above 0."""
    if not (np.asarray(values) > 0).all():
        return "a value is 0"
    return _text(_numbers(geometric_interval(_by_template(np.log(values), asked))), form)


def middle(values: Float[np.ndarray, " prompt"], form: str = ".1f") -> str:
    """The median with its distribution-free 95 % interval over prompts, for heavy tails."""
    return _text(_numbers(median(values)), form)


def answers(values: Float[np.ndarray, " prompt"], lowest: int = 0) -> str:
    """Right answers (0 or 1), or with `lowest` −1 answers lost, in percent with a 95 % score interval over prompts."""
    return _text((100 * number for number in _numbers(outcomes(values, lowest, 1))), ".0f")


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def _by_template(values: Float[np.ndarray, " prompt"], asked: Sequence[Problem]) -> Float[np.ndarray, " template"]:
    return in_groups(np.asarray(values, dtype=float), [problem.kind for problem in asked])


def _numbers(found: Estimate) -> Iterable[float]:
    return (float(number) for number in (found.value, found.low, found.high))


def _text(numbers: Iterable[float], form: str) -> str:
    estimate, low, high = (f"{number:{form}}".replace("-", "−") for number in numbers)
    return f"{estimate} [{low}, {high}]"
