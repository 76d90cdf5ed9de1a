"""HumanEval, asked as lm-evaluation-harness 0.4 does: the tasks humaneval and humaneval_instruct.

In the style ``humaneval`` the prompt is signature and docstring, and the answer goes on with the body. In the style
``humaneval-instruct`` the prompt asks for a solution and the answer is made to open with the function in a code block,
so that what is generated is again the body. A completion ends at the first line that is no longer part of the function
(``class``, ``def``, ``#``, ``if`` or ``print`` at its start), in the instruct style also where the code block ends.

Whether it is right is only known by running it with its test, which `sinklens.evaluation` does in isolation: a model's
program may do anything.

One way this fails: a prompt that defines helper functions of its own is kept whole, but a completion that adds one at
the start of a line loses it.
Source: Chen et al. 2021 (arXiv 2107.03374); EleutherAI/lm-evaluation-harness.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sinklens.errors import TaskError
from sinklens.tasks.base import CodeSample, CodeTask, check_limit
from sinklens.tasks.published import HubSet, Record, choose, read_file, read_hub

FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
STYLES = ("humaneval", "humaneval-instruct")
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"
OPENING = "Here is the completed function:\n```python\n{}\n"


@dataclass(frozen=True)
class HumanEval(CodeTask):
    """The 164 problems.

    Attributes:
        path: a JSON Lines file, gzipped or not, or the folder of ``HumanEval.jsonl``; None fetches
            openai/openai_humaneval from the hub.
        style: one of `STYLES`.
    """

    path: Path | None = None
    style: str = "humaneval"

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise TaskError(f"style is {self.style!r}; allowed: {', '.join(STYLES)}.")

    @property
    def name(self) -> str:
        return self.style

    @property
    def stop(self) -> tuple[str, ...]:
        return STOP if self.style == "humaneval" else (*STOP, "```")

    def samples(self, limit: int | None = None) -> list[CodeSample]:
        check_limit(limit)
        if self.path is None:
            records = read_hub(HubSet("openai/openai_humaneval", "openai_humaneval", "test"), FIELDS)
        else:
            records = read_file(choose(self.path, ("HumanEval.jsonl", "HumanEval.jsonl.gz")), FIELDS)
        samples = [self._sample(record) for record in records]
        _require_distinct(samples, records)
        return samples[:limit]

    def _sample(self, record: Record) -> CodeSample:
        stub, instruct = record["prompt"], self.style == "humaneval-instruct"
        return CodeSample(
            f"{self.style}/{record['task_id'].rpartition('/')[2]}",
            ASK.format(stub) if instruct else stub,
            record["canonical_solution"],
            opening=OPENING.format(stub) if instruct else "",
            stub=stub,
            test=record["test"],
            entry_point=record["entry_point"],
        )


def _require_distinct(samples: Sequence[CodeSample], records: Sequence[Record]) -> None:
    """Refuse records that would be one sample: what is recorded of one would be taken for the other.

    Raises:
        TaskError: two `task_id` end alike.
    """
    first: dict[str, str] = {}
    for sample, record in zip(samples, records, strict=True):
        if sample.id in first:
            raise TaskError(
                f"the task_id {first[sample.id]!r} and {record['task_id']!r} both make the sample {sample.id}; what "
                f"follows the last '/' of a task_id is in no other. Number the records anew."
            )
        first[sample.id] = record["task_id"]
