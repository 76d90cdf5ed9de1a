"""Complete programs of code tasks, put together as HumanEval does."""

from sinklens.tasks.base import CodeSample, CodeTask


def program(task: CodeTask, sample: CodeSample, text: str) -> str:
    """Stub, completion, test and the call of the test; runs without an error if the completion is right."""
    return f"{sample.stub}{task.extract(text)}\n{sample.test}\ncheck({sample.entry_point})\n"
