"""Find tasks by name.

A name identifies a task class and, for a class with several styles, the style. Settings are the fields of the class.
Pitfall: silently ignoring a setting that a task does not have would hide a typo, so it is refused.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

from sinklens.errors import TaskError, nearest, require
from sinklens.tasks.base import Task
from sinklens.tasks.gsm8k import STYLES as GSM8K_STYLES
from sinklens.tasks.gsm8k import Extractor, Gsm8k
from sinklens.tasks.humaneval import STYLES as HUMANEVAL_STYLES
from sinklens.tasks.humaneval import HumanEval
from sinklens.tasks.prompts import Prompts
from sinklens.tasks.tiny_code import TinyCode
from sinklens.tasks.word_problems import TinyGsm
from sinklens.utils.arguments import checked

TASKS: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "tiny-gsm": (TinyGsm, {}),
    "tiny-code": (TinyCode, {}),
    **{style: (Gsm8k, {"style": style}) for style in GSM8K_STYLES},
    **{style: (HumanEval, {"style": style}) for style in HUMANEVAL_STYLES},
    "prompts": (Prompts, {}),
}
"""Name -> the class of the task, and the fields that the name determines."""
NAMES = tuple(TASKS)


@checked
def find_task(
    name: str,
    *,
    path: Path | str | None = None,
    shots: int | None = None,
    extractor: Extractor | None = None,
) -> Task:
    """The task called `name`.

    Args:
        name: one of `NAMES`.
        path: a published task's data (see `Gsm8k` and `HumanEval`), or the file of `Prompts`.
        shots, extractor: settings of `Gsm8k`. None leaves a setting at its default.

    Raises:
        TaskError: no task has this name, or it does not have a setting that was given.
    """
    require(name in TASKS, f"no task is called {name!r}; known: {', '.join(NAMES)}.{nearest(name, NAMES)}", TaskError)
    make, fixed = TASKS[name]
    given = {
        "path": path and Path(path),
        "shots": shots,
        "extractor": extractor,
    }
    given = {setting: value for setting, value in given.items() if value is not None}
    for setting in given:
        if setting not in _settings(name):
            has = ", ".join(_settings(name)) or "none"
            raise TaskError(f"the task {name!r} has no setting {setting!r}; its settings: {has}.")
    return make(**fixed, **given)


def _settings(name: str) -> list[str]:
    make, fixed = TASKS[name]
    return [entry.name for entry in fields(make) if entry.name not in ("by", *fixed)]  # type: ignore[arg-type]


def reads_files(name: str) -> bool:
    """Whether the problems of the task called `name` are read from a file or the hub; others ship with sinklens."""
    return name in TASKS and "path" in _settings(name)
