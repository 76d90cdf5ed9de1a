"""Find tasks by name.

A name identifies a task class and, for a class with several styles, the style. Settings are the fields of the class.
Pitfall: silently ignoring a setting that a task does not have would hide a typo, so it is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sinklens.errors import TaskError, nearest
from sinklens.tasks.base import Task
from sinklens.tasks.countdown import Countdown
from sinklens.tasks.gsm8k import STYLES as GSM8K_STYLES
from sinklens.tasks.gsm8k import Extractor, Gsm8k
from sinklens.tasks.humaneval import STYLES as HUMANEVAL_STYLES
from sinklens.tasks.humaneval import HumanEval
from sinklens.tasks.mbpp import Mbpp
from sinklens.tasks.prompts import CodePrompts, JudgedPrompts, Prompts
from sinklens.tasks.skills import SKILLS, Skill
from sinklens.tasks.sudoku import Sudoku
from sinklens.tasks.tiny_code import TinyCode
from sinklens.tasks.tiny_gsm import TinyGsm
from sinklens.tasks.verdicts import VERDICTS


@dataclass(frozen=True)
class _Entry:
    """A task class, and the fields that the name determines."""

    make: Callable[..., Task]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> list[str]:
        return [entry.name for entry in fields(self.make) if entry.name not in self.fixed]  # type: ignore[arg-type]


_ENTRIES = {
    "tiny-gsm": _Entry(TinyGsm),
    "tiny-code": _Entry(TinyCode),
    **{f"skill-{skill}": _Entry(Skill, {"skill": skill}) for skill in SKILLS},
    **{style: _Entry(Gsm8k, {"style": style}) for style in GSM8K_STYLES},
    **{style: _Entry(HumanEval, {"style": style}) for style in HUMANEVAL_STYLES},
    "mbpp": _Entry(Mbpp),
    "countdown": _Entry(Countdown),
    "sudoku": _Entry(Sudoku),
    "prompts": _Entry(Prompts),
    **{f"prompts-{name}": _Entry(JudgedPrompts, {"by": verdict}) for name, verdict in VERDICTS.items()},
    "prompts-code": _Entry(CodePrompts),
}
NAMES = tuple(_ENTRIES)


def find_task(
    name: str,
    *,
    path: Path | str | None = None,
    shots: int | None = None,
    extractor: Extractor | None = None,
    examples: Path | str | None = None,
) -> Task:
    """The task called `name`.

    Args:
        name: one of `NAMES`.
        path: a published task's data (see `Gsm8k` and `HumanEval`), or the file of `Prompts`.
        shots, extractor, examples: settings of `Gsm8k`. None leaves a setting at its default.

    Raises:
        TaskError: no task has this name, or it does not have a setting that was given.
    """
    if name not in _ENTRIES:
        raise TaskError(f"no task is called {name!r}; known: {', '.join(NAMES)}.{nearest(name, NAMES)}")
    entry = _ENTRIES[name]
    given: dict[str, Any] = {
        "path": None if path is None else Path(path),
        "shots": shots,
        "extractor": extractor,
        "examples": None if examples is None else Path(examples),
    }
    given = {setting: value for setting, value in given.items() if value is not None}
    for setting in given:
        if setting not in entry.settings:
            has = ", ".join(entry.settings) or "none"
            raise TaskError(f"the task {name!r} has no setting {setting!r}; its settings: {has}.")
    return entry.make(**entry.fixed, **given)


def reads_files(name: str) -> bool:
    """Whether the problems of the task called `name` are read from a file or the hub; others ship with sinklens."""
    return name in _ENTRIES and "path" in _ENTRIES[name].settings
