"""GSM8K with the prompts and verdicts of lm-evaluation-harness 0.4: gsm8k, gsm8k_cot and gsm8k_cot_zeroshot.

A *style* is the wording of the prompt and the sentence that the answer ends with. Two extractors read a number from an
answer: *strict* looks for that sentence (``#### 42``, ``The answer is 42.``) and takes its first occurrence, *flexible*
takes the last number. Commas, dollar signs and one final full stop are removed from both numbers, and the rest is
compared as text: ``42.0`` is not ``42``, a unit after the number is ignored, and of a fraction the flexible extractor
sees only the denominator.

Few-shot examples: in the style ``gsm8k``, problem i follows the i-th draw of five training problems from a generator
seeded with 1234, as in a complete run of the harness. The chain-of-thought styles have none, because the harness's
fixed list is not included here.

Pitfall: the draw depends on the order of the training file. Use the published one.
Source: Cobbe et al. 2021 (arXiv 2110.14168); EleutherAI/lm-evaluation-harness.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from sinklens.errors import TaskError, require
from sinklens.tasks.base import Sample, Task, check_limit, cut
from sinklens.tasks.published import DataRow, HubSet, read_published
from sinklens.utils.arguments import check_arguments

FIELDS = ("question", "answer")
FEW_SHOT_SEED = 1234
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")

Extractor = Literal["strict", "flexible"]


class Style(NamedTuple):
    """The wording of prompts and answers.

    Attributes:
        question: the prompt, with ``{}`` for the question.
        ending: pattern of the sentence that the strict extractor looks for; its group is the number.
        sentence: format of that sentence, with ``{}`` for the number.
        stop: texts that end an answer.
        shots: default number of examples in the prompt.
    """

    question: str
    ending: re.Pattern[str]
    sentence: str
    stop: tuple[str, ...]
    shots: int


_THE_ANSWER_IS = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_TURN_ENDS = ("</s>", "<|im_end|>")
STYLES = {
    "gsm8k": Style(
        "Question: {}\nAnswer:",
        re.compile(r"#### (\-?[0-9\.\,]+)"),
        "#### {}",
        ("Question:", *_TURN_ENDS),
        shots=5,
    ),
    "gsm8k-cot": Style("Q: {}\nA:", _THE_ANSWER_IS, "The answer is {}.", ("Q:", *_TURN_ENDS), shots=0),
    "gsm8k-cot-zeroshot": Style(
        "Q: {}\nA: Let's think step by step.",
        _THE_ANSWER_IS,
        "The answer is {}.",
        ("Q:", *_TURN_ENDS),
        shots=0,
    ),
}


@dataclass(frozen=True)
class Gsm8k(Task):
    """The 1,319 test problems.

    Attributes:
        path: the test set as a JSON Lines file, or a folder with ``test.jsonl`` (and ``train.jsonl``); None downloads
            openai/gsm8k from the hub.
        style: one of `STYLES`.
        shots: examples in the prompt; None for the harness's default.
        extractor: which number of an answer counts, "strict" or "flexible".
    """

    path: Path | None = None
    style: Literal["gsm8k", "gsm8k-cot", "gsm8k-cot-zeroshot"] = "gsm8k"
    shots: Annotated[int, Ge(0)] | None = None
    extractor: Extractor = "flexible"

    def __post_init__(self) -> None:
        check_arguments(self)
        require(
            not self.shots or self._style.shots,
            f"the examples of the style {self.style!r} are not included; set shots=0.",
            TaskError,
        )

    @property
    def name(self) -> str:
        return self.style

    @property
    def stop(self) -> tuple[str, ...]:
        return self._style.stop

    @property
    def _style(self) -> Style:
        return STYLES[self.style]

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        kept = _records(self.path, "test")[:limit]
        return [
            Sample(
                f"{self.style}/{number}", before + self._style.question.format(record["question"]), self._worked(record)
            )
            for number, (record, before) in enumerate(zip(kept, self._before(len(kept)), strict=True))
        ]

    def _worked(self, record: DataRow) -> str:
        """The worked answer, ending in the style's sentence."""
        work, _, number = record["answer"].rpartition("#### ")
        return f" {work}{self._style.sentence.format(number.strip())}"

    def _before(self, count: int) -> list[str]:
        """The text before each problem's question: its examples, each followed by an empty line."""
        shots = self._style.shots if self.shots is None else self.shots
        if shots == 0:
            return [""] * count
        pool = _records(self.path and (self.path if self.path.is_dir() else self.path.parent), "train")
        require(
            len(pool) >= shots,
            f"shots is {shots}, but there are only {len(pool)} examples; give fewer shots or more examples.",
            TaskError,
        )
        written = [f"{self._style.question.format(one['question'])} {one['answer']}\n\n" for one in pool]
        rng = random.Random(FEW_SHOT_SEED)
        return ["".join(rng.sample(written, shots)) for _ in range(count)]

    def extract(self, text: str) -> str | None:
        """The number in the form that the harness compares; None if the extractor finds none."""
        answer = cut(text, self.stop)
        found = find(self._style.ending, answer) if self.extractor == "strict" else flexible(answer)
        return None if found is None else normal(found)

    def verdict(self, sample: Sample, text: str) -> bool:
        """Whether the extracted number equals the correct one as text."""
        number = find(self._style.ending, sample.reference, last=True)
        return number is not None and self.extract(text) == normal(number)


def _records(path: Path | None, split: str) -> list[DataRow]:
    """The records of a split, from a file or folder, or from the hub without one."""
    return read_published(path, (f"{split}.jsonl", f"{split}.jsonl.gz"), HubSet("openai/gsm8k", "main", split), FIELDS)


def find(pattern: re.Pattern[str], text: str, last: bool = False) -> str | None:
    """The first match of `pattern` in `text`, or the last: its first group, or all of it; None without one.

    >>> find(re.compile(r"#### (-?[0-9.,]+)"), "16 - 7 = 9 eggs, so $18.\\n#### 18 dollars")
    '18'
    """
    matches = list(pattern.finditer(text))
    return matches[-1 if last else 0][pattern.groups and 1] if matches else None


def flexible(text: str) -> str | None:
    """The last number in `text`; None if it has no such number.

    A number is two or more of the characters ``$0-9.,``, or digits, with or without a minus sign; ``$5`` counts, and so
    does ``..``, as in the harness.

    >>> flexible("She makes 9 * 2 = $18 every day, not 20%.")
    '20'
    """
    return find(FLEXIBLE, text, last=True)


def normal(number: str) -> str:
    """Normalize `number` for comparison: drop commas, dollar signs, anything up to ``####`` and one final full stop.

    >>> normal("$1,234.")
    '1234'
    """
    return re.sub(r"\.$", "", re.sub(r"(?s).*#### ", "", re.sub(r"[,$]", "", number))).lower()
