"""HumanEval with the prompts of lm-evaluation-harness 0.4: the tasks humaneval and humaneval_instruct.

In the style ``humaneval`` the prompt is the signature and docstring, and the answer continues with the body. In the
style ``humaneval-instruct`` the prompt requests a solution and the answer is forced to begin with the signature in a
code block, so the model again generates the body. A completion ends at the first line outside the function (starting
with ``class``, ``def``, ``#``, ``if`` or ``print``), in the instruct style also at the end of the code block.

Only running a completion with its test shows whether it is correct. `sinklens.evaluation` does this in isolation,
because a model's program may do anything.

Limitation: helper functions in the prompt are kept, but a helper that a completion defines at the start of a line is
cut off.
Source: Chen et al. 2021 (arXiv 2107.03374); EleutherAI/lm-evaluation-harness.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sinklens.tasks.base import CodeSample, CodeTask, check_limit
from sinklens.tasks.published import DataRow, HubSet, read_published
from sinklens.utils.arguments import check_arguments

FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
STYLES = ("humaneval", "humaneval-instruct")
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
ASK = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```\n"
OPENING = "Here is the completed function:\n```python\n{}\n"


@dataclass(frozen=True)
class HumanEval(CodeTask):
    """The 164 problems.

    Attributes:
        path: a JSON Lines file, optionally gzipped, or the folder of ``HumanEval.jsonl``; None downloads
            openai/openai_humaneval from the hub.
        style: one of `STYLES`.
    """

    path: Path | None = None
    style: Literal["humaneval", "humaneval-instruct"] = "humaneval"

    def __post_init__(self) -> None:
        check_arguments(self)

    @property
    def name(self) -> str:
        return self.style

    @property
    def stop(self) -> tuple[str, ...]:
        return STOP if self.style == "humaneval" else (*STOP, "```")

    def samples(self, limit: int | None = None) -> list[CodeSample]:
        check_limit(limit)
        hub = HubSet("openai/openai_humaneval", "openai_humaneval", "test")
        records = read_published(self.path, ("HumanEval.jsonl", "HumanEval.jsonl.gz"), hub, FIELDS)
        return [self._sample(record) for record in records[:limit]]

    def _sample(self, record: DataRow) -> CodeSample:
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
