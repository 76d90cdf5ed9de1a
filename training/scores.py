"""The scores of a finished checkpoint on everything that its recipe trains, for its model card.

Word problems, the functions of tiny-code, the exercises of the four skills and captioned pictures, each on held-out
samples, with the checkpoint's defaults (greedy, one token per step). Functions are scored only on request, because that
executes what the model wrote; it runs in isolation (`sinklens.evaluation.sandbox`).

Caveat: the samples follow the templates of the training data, so the scores measure what a model retained, not what it
understands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.evaluation.sandbox import Limits, run_program
from sinklens.families import family_named
from sinklens.model import load
from sinklens.runs import generate
from sinklens.tasks import find_task
from sinklens.tasks.base import CodeSample, CodeTask, Sample, Task
from sinklens.utils.estimates import Estimate, proportion
from training.pictures import held_out
from training.recipes import Recipe
from training.skills import SKILLS, Skill

if TYPE_CHECKING:
    from sinklens.model import Model

LABELS = {"tiny-gsm": "word problems"}


@dataclass(frozen=True)
class Score:
    """One line of a model card.

    Attributes:
        what: the task.
        accuracy: on its held-out samples.
        chance: accuracy of a guess that does everything except the skill.
    """

    what: str
    accuracy: Estimate
    chance: float = 0.0


def scores(
    recipe: Recipe, checkpoint: Path, *, run_generated_code: bool = False, limit: int | None = None
) -> Iterator[Score]:
    """Yield the scores of a checkpoint of `recipe`, one per task.

    Args:
        run_generated_code: also complete functions and **execute what the model wrote**, in isolation.
        limit: samples per task; all by default.

    Raises:
        SinklensError: programs would have to run and isolation is not available.
    """
    model = load(checkpoint)
    tasks = [find_task("tiny-gsm")]
    if recipe.code and run_generated_code:
        tasks += [find_task("tiny-code")]
    if recipe.skills:
        tasks += map(Skill, SKILLS)
    for task in tasks:
        label, chance = LABELS.get(task.name, task.name), task.chance if isinstance(task, Skill) else 0.0
        for mode in scored_modes(recipe):
            what = label if mode is None else f"{label}, {mode}"
            yield Score(what, task_accuracy(model, task, limit, mode), chance)
    if recipe.pictures:
        pictures = held_out() if limit is None else held_out(limit)
        yield Score("captions drawn", _exact(model, [picture.to_draw for picture in pictures]))
        yield Score("pictures described", _exact(model, [picture.to_describe for picture in pictures]))


def training_score(checkpoint: Path, problems: int = 100) -> dict[str, int]:
    """Score one kept checkpoint of a run, for `training.curve.accuracy_curve`.

    Returns:
        ``right`` and ``total`` of the first held-out word problems.
    """
    found = task_accuracy(load(checkpoint), find_task("tiny-gsm"), problems)
    return {"right": round(found.value * found.n), "total": found.n}


def scored_modes(recipe: Recipe) -> list[str | None]:
    """The modes of a recipe's model whose texts differ, so not speculation; None for a model that has one mode."""
    return [mode for mode in family_named(recipe.family).modes if mode != "speculation"] or [None]


def task_accuracy(model: "Model", task: Task, limit: int | None = None, mode: str | None = None) -> Estimate:
    """Share of a task's samples that `model` answers correctly; generated programs run in isolation."""
    samples = task.samples(limit)
    texts = _answers(model, [sample.prompt for sample in samples], mode=mode)
    return proportion(sum(_right(task, *pair) for pair in zip(samples, texts, strict=True)), len(samples))


def _right(task: Task, sample: Sample, text: str) -> bool:
    if not isinstance(task, CodeTask):
        return bool(task.verdict(sample, text))
    assert isinstance(sample, CodeSample)
    program = f"{sample.stub}{task.extract(text)}"
    return run_program(program, sample.test, sample.entry_point, helpers=sample.stub, limits=Limits()).passed


def _exact(model: "Model", texts: Sequence[tuple[str, str]]) -> Estimate:
    """Share of answers that equal the expected text exactly, up to the end token."""
    given = _answers(model, [prompt for prompt, _ in texts])
    return proportion(sum(text == expected for text, (_, expected) in zip(given, texts, strict=True)), len(texts))


def _answers(model: "Model", prompts: Sequence[str], batch: int = 100, mode: Any = None) -> list[str]:
    """The answer to each prompt; prompts of similar length share a batch."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    texts = dict[int, str]()
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        answers = generate(model, [prompts[n] for n in part], record_sinks=False, progress=False, mode=mode).answers
        texts |= {n: answer.text or "" for n, answer in zip(part, answers, strict=True)}
    return [texts[number] for number in range(len(prompts))]
