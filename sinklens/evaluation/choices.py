"""Multiple choice by likelihood: which answer does a model find most probable, and what does masking sinks change?

Every condition gets the same questions, and in a diffusion model the same mask draws, so accuracies and log-likelihoods
are compared question by question. In a diffusion model, masked sinks are those of the same pass (``same_step``); in an
autoregressive model, those of the token before.

Pitfall: longer answers are less probable. Give a `Question` answers of similar length: as in the harness's plain
``acc``, nothing is normalized by length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from sinklens.errors import ControlWarning, SettingError, TaskError, warn_caller
from sinklens.evaluation.conditions import CONTROLS, Condition, unpaired
from sinklens.experiments.nll.estimate import LikelihoodRequest, likelihoods, pairs_of
from sinklens.experiments.nll.result import Difference, Likelihood, likelihood_difference
from sinklens.interventions import Intervention, MaskKeys
from sinklens.interventions.rules import as_rule
from sinklens.model import Model
from sinklens.tasks.base import check_limit
from sinklens.tasks.published import json_lines
from sinklens.tasks.word_problems import Problem, held_out
from sinklens.utils.estimates import Estimate, Paired, paired, proportion
from sinklens.utils.progress import Progress

AT_ONCE = 16  # questions
APART = (1, -1, 10)  # how far wrong results of `word_problem_choices` are from the right one


@dataclass(frozen=True)
class Question:
    """A multiple-choice question.

    Attributes:
        prompt: the text before the answers.
        choices: the answers, each as it follows the prompt.
        right: index of the right one.
    """

    prompt: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class ChoiceResult:
    """The answers of one model under one condition.

    Attributes:
        condition: the condition.
        likelihoods: those of every choice, by question.
        right: index of the right choice, by question.
    """

    condition: Condition
    likelihoods: tuple[tuple[Likelihood, ...], ...]
    right: tuple[int, ...]

    @property
    def verdicts(self) -> Bool[np.ndarray, " question"]:
        """Whether the right choice is the most probable one; the first of equals counts."""
        chosen = [int(np.argmax([one.value for one in choices])) for choices in self.likelihoods]
        return np.array(chosen) == np.array(self.right)

    @property
    def accuracy(self) -> Estimate:
        """Share of questions whose right choice is the most probable one."""
        return proportion(int(self.verdicts.sum()), len(self.right))

    @property
    def of_right(self) -> list[Likelihood]:
        """The likelihoods of the right choices."""
        return [choices[right] for choices, right in zip(self.likelihoods, self.right, strict=True)]

    def accuracy_against(self, base: "ChoiceResult") -> Paired:
        """The difference of the accuracies, this one minus that of `base`, paired by question."""
        return paired(base.verdicts, self.verdicts)

    def likelihood_against(self, base: "ChoiceResult") -> Difference:
        """The mean difference of the right choices' log-likelihoods in nats, paired by question and mask draw."""
        return likelihood_difference(base.of_right, self.of_right)


def word_problem_choices(limit: int | None = None) -> list[Question]:
    """The held-out word problems with four worked answers that differ in the result; the right one is the first."""
    check_limit(limit)
    return [_question(problem) for problem in held_out()[:limit]]


def _question(problem: Problem) -> Question:
    results = [problem.result, *(n if (n := problem.result + apart) >= 0 else problem.result + 2 for apart in APART)]
    steps, _, _ = problem.answer.rpartition(f"= {problem.result}")
    end = problem.answer[len(steps) + len(f"= {problem.result}") :].rpartition("#### ")[0]
    return Question(problem.prompt, tuple(f" {steps}= {result}{end}#### {result}" for result in results), 0)


def read_choices(file: Path, limit: int | None = None) -> list[Question]:
    """Questions from JSON Lines with "prompt", "choices" (a list of texts) and "answer" (the index of the right one).

    A choice that does not begin with a space gets one, as in the harness.

    Raises:
        TaskError: the file is missing, or a line is malformed.
    """
    check_limit(limit)
    return [_question_of(entry, where) for where, entry in islice(json_lines(file), limit)]


def _question_of(entry: dict[str, Any], where: str) -> Question:
    match entry:
        case {"prompt": str(prompt), "choices": [_, _, *_] as choices, "answer": right} if (
            all(isinstance(one, str) and one for one in choices) and type(right) is int and 0 <= right < len(choices)
        ):
            return Question(prompt, tuple(one if one[0].isspace() else f" {one}" for one in choices), right)
    raise TaskError(
        f"{where} must have prompt, a text; choices, two or more texts; and answer, the index of the right one, from "
        f"0; got {entry!r:.80}."
    )


def answer_questions(
    model: Model,
    questions: Sequence[Question],
    conditions: Sequence[Condition],
    request: LikelihoodRequest,
    progress: bool | None = None,
) -> list[ChoiceResult]:
    """Score every choice under every condition; `request` has no hooks of its own.

    Raises:
        SettingError: a condition has a cache policy or takes the sinks of another run, or see `likelihoods`.

    Warns:
        ControlWarning: a condition is a control of one that is not among these.
    """
    if note := unpaired({one.name: one.control_of for one in conditions}, {one.name for one in conditions}):
        warn_caller(note, ControlWarning)
    several = [pairs_of(model, question.prompt, list(question.choices), False) for question in questions]
    hooks = [_hooks(condition, model) for condition in conditions]
    found: list[ChoiceResult] = []
    with Progress(len(conditions) * len(questions), progress, "scoring") as bar:
        for condition, entries in zip(conditions, hooks, strict=True):
            under, scored = replace(request, hooks=entries), list[tuple[Likelihood, ...]]()
            for start in range(0, len(several), AT_ONCE):
                pairs = several[start : start + AT_ONCE]
                bar.before(len(found) * len(questions) + len(scored), None)
                each = iter(likelihoods(model, [*chain(*pairs)], under))
                scored += [tuple(islice(each, len(choices))) for choices in pairs]
                bar.after(len(found) * len(questions) + len(scored) - 1, None)
            found.append(ChoiceResult(condition, tuple(scored), tuple(question.right for question in questions)))
    return found


def treatment_of(control: ChoiceResult, results: Iterable[ChoiceResult]) -> ChoiceResult | None:
    """The result that `control` is a control of: the one it names, or that with as many sinks masked; else None."""
    named, pick, masked = control.condition.control_of, control.condition.pick, control.condition.masked
    for one in results:
        if one.condition.name == named:
            return one
        if not named and pick in CONTROLS and one.condition.pick == "strongest" and one.condition.masked == masked:
            return one
    return None


def _hooks(condition: Condition, model: Model) -> list[Any]:
    """The interventions of a condition; in a diffusion model, masks of sinks are those of the same pass."""
    if condition.cache is not None or condition.of_unmasked:
        raise SettingError(
            f"{condition.name!r} needs earlier steps or another run, which a likelihood does not have; leave cache= "
            f"and of_unmasked= out."
        )
    return [_of_the_pass(hook) if not model.causal else hook for hook in condition.hooks]


def _of_the_pass(hook: Intervention) -> Intervention:
    """`hook`; a mask of sinks by their scores takes those of the pass itself."""
    if not isinstance(hook, MaskKeys) or hook.where is None:
        return hook
    return replace(hook, where=as_rule(hook.where).mapped(lambda where: replace(where, same_step=True)))
