"""MBPP with the prompts of lm-evaluation-harness 0.4: the task mbpp, three examples, answers that end at "[DONE]".

The harness runs answers in its own process. Here `sinklens.evaluation` runs them in a sandbox, as HumanEval's.

The test problems are those with the numbers 11 to 510, and the examples those with 2, 3 and 4, as published.

Source: Austin et al. 2021 (arXiv 2108.07732); EleutherAI/lm-evaluation-harness.
"""

import ast
import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklens.errors import TaskError
from sinklens.tasks.base import CodeSample, CodeTask, check_limit
from sinklens.tasks.published import choose, read_objects

KINDS = {"task_id": int, "text": str, "code": str, "test_list": list}
TESTS = range(11, 511)
EXAMPLES = (2, 3, 4)
ASK = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n"
    "{tests}\n[BEGIN]\n"
)


@dataclass(frozen=True)
class Mbpp(CodeTask):
    """The 500 test problems.

    Attributes:
        path: ``mbpp.jsonl`` of the published data set, optionally gzipped, or its folder; required.
        shots: number of examples in the prompt, at most 3.
    """

    path: Path | None = None
    shots: int = 3

    def __post_init__(self) -> None:
        if self.shots not in range(len(EXAMPLES) + 1):
            raise TaskError(f"shots is {self.shots!r}; MBPP has 0 to {len(EXAMPLES)} examples.")

    @property
    def name(self) -> str:
        return "mbpp"

    @property
    def stop(self) -> tuple[str, ...]:
        return ("[DONE]",)

    def samples(self, limit: int | None = None) -> list[CodeSample]:
        check_limit(limit)
        if self.path is None:
            raise TaskError(
                "mbpp needs its data (--data FILE): mbpp.jsonl of google-research's data set, 974 problems."
            )
        rows = read_objects(choose(self.path, ("mbpp.jsonl", "mbpp.jsonl.gz")), KINDS)
        problems = {row["task_id"]: row for row in rows}
        lacking = [number for number in EXAMPLES[: self.shots] if number not in problems]
        if lacking:
            raise TaskError(f"{self.path} lacks the examples {lacking}; give the complete file, or shots=0.")
        shown = [problems[number] for number in EXAMPLES[: self.shots]]
        before = "".join(f"{_asked(example)}{example['code']}\n[DONE]\n\n" for example in shown)
        return [_sample(problems[number], before) for number in TESTS if number in problems][:limit]


def _asked(row: Mapping[str, Any]) -> str:
    return ASK.format(text=row["text"], tests="\n".join(map(str, row["test_list"][:3])))


def _sample(row: Mapping[str, Any], before: str) -> CodeSample:
    number, entry = row["task_id"], _entry_point(row)
    lines = [*row.get("test_setup_code", "").splitlines(), f"{entry} = candidate", *map(str, row["test_list"])]
    body = "\n".join(f"    {line}" for line in lines)
    return CodeSample(
        f"mbpp/{number}", before + _asked(row), row["code"], test=f"def check(candidate):\n{body}\n", entry_point=entry
    )


def _entry_point(row: Mapping[str, Any]) -> str:
    """The function that the first test calls.

    Raises:
        TaskError: the test is not Python, or calls no function.
    """
    try:
        nodes = ast.walk(ast.parse(str(row["test_list"][0])))
        calls = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        return next(name for name in calls if not hasattr(builtins, name))
    except (SyntaxError, IndexError, StopIteration) as error:
        raise TaskError(f"problem {row['task_id']}: its first test calls no function of its own.") from error
