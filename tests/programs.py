"""Complete programs of code tasks, put together as HumanEval does."""

from typing import Any

from sinklens.tasks.base import CodeSample, CodeTask


def program(task: CodeTask, sample: CodeSample, text: str) -> str:
    """Stub, completion, test and the call of the test; runs without an error if the completion is right."""
    return f"{sample.stub}{task.extract(text)}\n{sample.test}\ncheck({sample.entry_point})\n"


def passes(code: str, scope: dict[str, Any]) -> bool:
    """Whether a program runs without an error; only published solutions and lines in the test files are run."""
    try:
        exec(code, scope)
    except Exception:  # noqa: BLE001 - a wrong body may raise anything
        return False
    return True
