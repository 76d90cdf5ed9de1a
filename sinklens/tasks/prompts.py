"""Prompts from a file: one text per line, or JSON Lines whose prompts are texts or token ids.

In JSON Lines (``.jsonl``) each line is an object. Its key ``prompt`` (or ``question``) holds the prompt, a text or a
list of token ids. For a verdict it also needs the correct answer under ``expected``, a text or a list of token ids.
``id`` is optional and names the sample.

Pitfall: a file with another extension than ``.jsonl`` is plain text, and a JSON line in it would become a prompt
verbatim. A plain file whose first line is a JSON object with a prompt is therefore refused.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from sinklens.errors import TaskError, require
from sinklens.tasks.base import Sample, Task, check_limit
from sinklens.tasks.published import json_lines, text_lines

Ids = tuple[int, ...]
LINES = '{"prompt": [2, 287, 28], "expected": [260, 1]}, or texts in place of the ids'


def read_prompts(path: str | Path, limit: int | None = None) -> list[Any]:
    """Read prompts from a file: JSON Lines with a ``prompt`` or ``question``, or one prompt per non-empty line.

    In JSON Lines a prompt is a text or a list of token ids. Only a line feed ends a line.

    Raises:
        TaskError: the file cannot be read or holds no prompt, or a line (named in the error) is invalid.
    """
    check_limit(limit)
    path = Path(path)
    if path.suffix == ".jsonl":
        return [_prompt(entry, where) for where, entry in islice(json_lines(path), limit)]
    lines = [line for _, line in text_lines(path)]
    require(
        not re.match(r'\s*\{.*"(prompt|question)"\s*:', lines[0]),
        f"{path} contains JSON Lines but does not end in .jsonl, so it would be read as plain text; rename it to "
        f"*.jsonl.",
        TaskError,
    )
    return lines[:limit]


def read_groups(path: str | Path, column: str, limit: int | None = None) -> list[str]:
    """The group of every prompt that `read_prompts` reads: what its line has under the key `column`, as text.

    Raises:
        TaskError: the file is not JSON Lines, or a line (named in the error) lacks the key or has no text, number
            or truth value there.
    """
    check_limit(limit)
    path, found = Path(path), []
    require(
        path.suffix == ".jsonl",
        f"{path} has no columns, so none that names the groups of its prompts; write JSON Lines (*.jsonl) with "
        f"{column!r} in each line, or omit the group.",
        TaskError,
    )
    for where, entry in islice(json_lines(path), limit):
        group = entry.get(column)
        if not isinstance(group, str | int | float) or not str(group).strip():
            raise TaskError(
                f"{where}: the group of the prompt is {_short(group)}; give a text or a number under {column!r} in "
                f"every line (its keys: {', '.join(entry)})."
            )
        found.append(str(group))
    return found


def read_answers(path: str | Path, limit: int | None = None) -> dict[str, str]:
    """The expected answers in a file of prompts: prompt -> the text or number under ``expected`` or ``answer``.

    Empty for plain text and for lines without these keys; prompts and answers of token ids are left out.

    Raises:
        TaskError: some lines have an answer and others do not, an answer is neither a text nor a number, or two
            lines expect different answers to one prompt.
    """
    check_limit(limit)
    path, found, missing = Path(path), dict[str, str](), []
    for where, entry in islice(json_lines(path), limit) if path.suffix == ".jsonl" else ():
        prompt, answer = _prompt(entry, where), entry.get("expected", entry.get("answer"))
        if not isinstance(prompt, str) or isinstance(answer, list):
            continue
        if answer is None:
            missing.append(where)
        elif isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise TaskError(f"{where}: the answer is {_short(answer)}; give a text or a number.")
        else:
            require(
                found.setdefault(prompt, str(answer)) == str(answer),
                f"{where}: another line expects another answer to this prompt; keep one of them.",
                TaskError,
            )
    if found and missing:
        raise TaskError(
            f"{missing[0]}: no 'expected' or 'answer', which other lines have; give every line one, or none."
        )
    return found


@dataclass(frozen=True)
class IdSample(Sample):
    """A sample from a file, whose prompt and expected answer may be token ids.

    Attributes:
        ids: the prompt as token ids; None if it is text.
        expected: the correct answer as token ids; None if it is text.
    """

    ids: Ids | None = None
    expected: Ids | None = None


def model_input(sample: Sample) -> str | Ids:
    """What the model is given: text or token ids."""
    ids = sample.ids if isinstance(sample, IdSample) else None
    return sample.prompt + sample.opening if ids is None else ids


def prompt_hash(sample: Sample) -> str:
    """SHA-256 of the model's input; distinguishes different samples with the same id."""
    given = model_input(sample)
    return hashlib.sha256((given if isinstance(given, str) else json.dumps(given)).encode()).hexdigest()


def reference_hash(sample: Sample) -> str:
    """SHA-256 of the reference that the answer is compared with."""
    ids = sample.expected if isinstance(sample, IdSample) else None
    return hashlib.sha256((sample.reference if ids is None else json.dumps(ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Prompts(Task):
    """Prompts and expected answers from a JSON Lines file.

    An answer is right if it equals the expected one: expected ids are compared with the generated ids, both up to the
    first end token, and an expected text with the answer's text, ignoring white space at both ends.

    Attributes:
        path: the file.
        by: another judge of text: a function of the prompt, the answer and ``expected`` -> whether the answer is right.
    """

    path: Path | None = None
    by: Callable[[str, str, str], bool] | None = None

    name = "prompts"

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        if self.path is None:
            raise TaskError(f"the task 'prompts' needs a file; give one (--prompts FILE) with lines such as {LINES}.")
        require(
            self.path.suffix == ".jsonl",
            f"{self.path} does not end in .jsonl; give a JSON Lines file with lines such as {LINES}.",
            TaskError,
        )
        return [
            _sample(entry, where, number) for number, (where, entry) in enumerate(islice(json_lines(self.path), limit))
        ]

    def extract(self, text: str) -> str | None:
        return text.strip() or None

    def verdict(self, sample: Sample, text: str) -> bool | None:
        if self.by is not None:
            return bool(self.by(sample.prompt, text, sample.reference))
        return super().verdict(sample, text)

    def malformed(self, sample: Sample, text: str) -> None:
        """Always None: answers have no form."""

    def judge(self, sample: Sample, text: str, ids: Sequence[int], end_ids: Collection[int]) -> bool | None:
        if isinstance(sample, IdSample) and sample.expected is not None:
            return tuple(ids) == before_end(sample.expected, end_ids)
        return self.verdict(sample, text)


def before_end(ids: Ids, end_ids: Collection[int]) -> Ids:
    """`ids` up to the first end token.

    >>> before_end((260, 1, 1), {1})
    (260,)
    """
    return tuple(takewhile(lambda token: token not in end_ids, ids))


def _sample(entry: Mapping[str, Any], where: str, number: int) -> Sample:
    name = entry.get("id", f"prompts/{number}")
    require(
        isinstance(name, str) and name,
        f"{where}: the id is {_short(name)}; give a non-empty text, or omit it.",
        TaskError,
    )
    prompt = _prompt(entry, where)
    require("expected" in entry, f"{where}: no 'expected'; write lines such as {LINES}.", TaskError)
    expected = _text_or_ids(entry["expected"], "expected answer", where)
    (text, ids), (reference, expected_ids) = (
        (one, None) if isinstance(one, str) else ("", tuple(one)) for one in (prompt, expected)
    )
    return IdSample(name, text, reference, ids=ids, expected=expected_ids)


def _prompt(entry: Mapping[str, Any], where: str) -> str | list[int]:
    require(
        "prompt" in entry or "question" in entry,
        f"{where}: expected a JSON object with a 'prompt' or a 'question'; its keys: {', '.join(entry)}.",
        TaskError,
    )
    return _text_or_ids(entry["prompt"] if "prompt" in entry else entry["question"], "prompt", where)


def _text_or_ids(found: Any, key: str, where: str) -> str | list[int]:
    ids = isinstance(found, list) and found and all(type(token) is int for token in found)
    if ids or (isinstance(found, str) and found.strip()):
        return found
    raise TaskError(f"{where}: the {key} is {_short(found)}; give a text, or a list of token ids such as [2, 287, 28].")


def _short(found: Any) -> str:
    text = json.dumps(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
