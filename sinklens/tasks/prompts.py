"""Prompts from a file: one text per line, or JSON Lines whose prompts are texts or token ids.

In JSON Lines (``.jsonl``) each line is an object. Its key ``prompt`` (or ``question``) holds the prompt, a text or a
list of token ids. For a verdict it also needs the correct answer under ``expected``, a text or a list of token ids.
``id`` is optional and names the sample.

Pitfall: a file with another extension than ``.jsonl`` is plain text, and a JSON line in it would become a prompt
verbatim. A plain file whose first line is a JSON object with a prompt is therefore refused.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sinklens.errors import SinklensError, TaskError
from sinklens.tasks.base import CodeSample, CodeTask, Sample, Task, check_limit
from sinklens.tasks.published import read_file
from sinklens.tasks.verdicts import Verdict, unfenced

Ids = tuple[int, ...]
LINES = '{"prompt": [2, 287, 28], "expected": [260, 1]}, or texts in place of the ids'


def read_prompts(path: str | Path, limit: int | None = None) -> list[Any]:
    """Read prompts from a file: JSON Lines with a ``prompt`` or ``question``, or one prompt per non-empty line.

    In JSON Lines a prompt is a text or a list of token ids. Only a line feed ends a line.

    Raises:
        SinklensError: the file cannot be read or holds no prompt, or a line (named in the error) is invalid.
    """
    check_limit(limit)
    path = Path(path)
    lines = [*_lines(path)]
    if path.suffix == ".jsonl":
        return [_text_or_ids(_prompt(_entry(line, where), where), "prompt", where) for where, line in lines[:limit]]
    _refuse_json(path, lines[0][1])
    return [line for _, line in lines[:limit]]


def read_groups(path: str | Path, column: str, limit: int | None = None) -> list[str]:
    """The group of every prompt that `read_prompts` reads: what its line has under the key `column`, as text.

    Raises:
        SinklensError: the file is not JSON Lines, or a line (named in the error) lacks the key or has no text, number
            or truth value there.
    """
    check_limit(limit)
    path = Path(path)
    if path.suffix != ".jsonl":
        raise SinklensError(
            f"{path} has no columns, so none that names the groups of its prompts; write JSON Lines (*.jsonl) with "
            f"{column!r} in each line, or omit the group."
        )
    return [_group(_entry(line, where), column, where) for where, line in [*_lines(path)][:limit]]


def read_answers(path: str | Path, limit: int | None = None) -> dict[str, str]:
    """The expected answers in a file of prompts: prompt -> the text or number under ``expected`` or ``answer``.

    Empty for plain text and for lines without these keys; prompts and answers of token ids are left out.

    Raises:
        SinklensError: some lines have an answer and others do not, an answer is neither a text nor a number, or two
            lines expect different answers to one prompt.
    """
    check_limit(limit)
    path, found, missing = Path(path), dict[str, str](), []
    for where, line in [*_lines(path)][:limit] if path.suffix == ".jsonl" else []:
        entry = _entry(line, where)
        prompt, answer = _prompt(entry, where), entry.get("expected", entry.get("answer"))
        if not isinstance(prompt, str) or isinstance(answer, list):
            continue
        if answer is None:
            missing.append(where)
        elif isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise SinklensError(f"{where}: the answer is {_short(answer)}; give a text or a number.")
        elif found.setdefault(prompt, str(answer)) != str(answer):
            raise SinklensError(f"{where}: another line expects another answer to this prompt; keep one of them.")
    if found and missing:
        raise SinklensError(
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
    text = given if isinstance(given, str) else json.dumps(given)
    return hashlib.sha256((json.dumps([text, sample.suffix]) if sample.suffix else text).encode()).hexdigest()


def reference_hash(sample: Sample) -> str:
    """SHA-256 of the reference that the answer is compared with."""
    ids = sample.expected if isinstance(sample, IdSample) else None
    return hashlib.sha256((sample.reference if ids is None else json.dumps(ids)).encode()).hexdigest()


@dataclass(frozen=True)
class Prompts(Task):
    """Prompts and expected answers from a JSON Lines file.

    Without a verdict an answer is right if it equals the expected one: expected ids are compared with the generated
    ids, both up to the first end token, and an expected text with the answer's text, ignoring white space at both ends.

    Attributes:
        path: the file.
        by: how answers are compared with ``expected``; prompts are then texts.
    """

    path: Path | None = None
    by: Verdict | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", Path(self.path))

    @property
    def name(self) -> str:
        return "prompts" if self.by is None else f"prompts-{self.by.name}"

    def samples(self, limit: int | None = None) -> list[Sample]:
        check_limit(limit)
        if self.path is None:
            raise TaskError(
                f"the task {self.name!r} needs a file; give one (--prompts FILE) with lines such as {LINES}."
            )
        if self.path.suffix != ".jsonl":
            raise TaskError(f"{self.path} does not end in .jsonl; give a JSON Lines file with lines such as {LINES}.")
        lines = [*_lines(self.path)][:limit]
        return [self._sample(_entry(line, where), where, number) for number, (where, line) in enumerate(lines)]

    def _sample(self, entry: Mapping[str, Any], where: str, number: int) -> Sample:
        name = entry.get("id", f"{self.name}/{number}")
        if not isinstance(name, str) or not name:
            raise SinklensError(f"{where}: the id is {_short(name)}; give a non-empty text, or omit it.")
        if self.by is not None:
            return _judged(self.by, entry, where, name)
        prompt = _text_or_ids(_prompt(entry, where), "prompt", where)
        if "expected" not in entry:
            raise SinklensError(f"{where}: no 'expected'; write lines such as {LINES}.")
        expected = _text_or_ids(entry["expected"], "expected answer", where)
        (text, ids), (reference, expected_ids) = (
            (one, None) if isinstance(one, str) else ("", tuple(one)) for one in (prompt, expected)
        )
        return IdSample(name, text, reference, ids=ids, expected=expected_ids)

    def extract(self, text: str) -> str | None:
        return text.strip() or None

    def verdict(self, sample: Sample, text: str) -> bool | None:
        return (
            super().verdict(sample, text) if self.by is None else self.by.right(sample.prompt, text, sample.reference)
        )

    def malformed(self, sample: Sample, text: str) -> bool | None:
        return None if self.by is None else self.by.malformed(text, sample.reference)

    def judge(self, sample: Sample, text: str, ids: Sequence[int], end_ids: Collection[int]) -> bool | None:
        if isinstance(sample, IdSample) and sample.expected is not None:
            return tuple(ids) == before_end(sample.expected, end_ids)
        return self.verdict(sample, text)


@dataclass(frozen=True)
class CodePrompts(CodeTask):
    """Prompts from a JSON Lines file whose answers are programs: ``test`` defines check(candidate).

    The program is the first fenced block of an answer, or all of it.

    Attributes:
        path: the file, with ``prompt``, ``test`` and ``entry_point`` in each line.
    """

    path: Path | None = None

    @property
    def name(self) -> str:
        return "prompts-code"

    def extract(self, text: str) -> str:
        return unfenced(text)

    def samples(self, limit: int | None = None) -> list[CodeSample]:
        check_limit(limit)
        if self.path is None:
            raise TaskError("the task 'prompts-code' needs a file (--prompts FILE) with prompt, test and entry_point.")
        rows = read_file(Path(self.path), ("prompt", "test", "entry_point"))[:limit]
        return [
            CodeSample(f"prompts-code/{number}", row["prompt"], "", test=row["test"], entry_point=row["entry_point"])
            for number, row in enumerate(rows)
        ]


def before_end(ids: Ids, end_ids: Collection[int]) -> Ids:
    """`ids` up to the first end token.

    >>> before_end((260, 1, 1), {1})
    (260,)
    """
    return tuple(takewhile(lambda token: token not in end_ids, ids))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every non-empty line, preceded by its location for error messages."""
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read prompts from {path}: {error}") from error
    if not content.strip():
        raise SinklensError(f"{path} holds no prompt; write one per line, or JSON Lines with a 'prompt' in each line.")
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line.removesuffix("\r")


def _refuse_json(path: Path, first: str) -> None:
    try:
        found = json.loads(first)
    except ValueError:
        return
    if isinstance(found, dict) and ("prompt" in found or "question" in found):
        raise SinklensError(
            f"{path} contains JSON Lines but does not end in .jsonl, so it would be read as plain text; rename it to "
            f"*.jsonl."
        )


def _entry(line: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise SinklensError(f"{where}: not JSON ({error}); write one object per line.") from error
    if not isinstance(found, dict):
        raise SinklensError(f"{where}: expected a JSON object with a 'prompt' or a 'question'; got {_short(found)}.")
    return found


def _prompt(entry: Mapping[str, Any], where: str) -> Any:
    if "prompt" not in entry and "question" not in entry:
        raise SinklensError(
            f"{where}: expected a JSON object with a 'prompt' or a 'question'; its keys: {', '.join(entry)}."
        )
    return entry["prompt"] if "prompt" in entry else entry["question"]


def _group(entry: Mapping[str, Any], column: str, where: str) -> str:
    found = entry.get(column)
    if isinstance(found, str | int | float) and str(found).strip():
        return str(found)
    raise SinklensError(
        f"{where}: the group of the prompt is {_short(found)}; give a text or a number under {column!r} in every line "
        f"(its keys: {', '.join(entry)})."
    )


def _text_or_ids(found: Any, key: str, where: str) -> str | list[int]:
    if isinstance(found, str) and found.strip():
        return found
    if isinstance(found, list) and found and all(type(token) is int for token in found):
        return found
    raise SinklensError(
        f"{where}: the {key} is {_short(found)}; give a text, or a list of token ids such as [2, 287, 28]."
    )


def _judged(verdict: Verdict, entry: Mapping[str, Any], where: str, name: str) -> Sample:
    """The sample of a line, whose prompt is a text; the reference is what the verdict makes of ``expected``."""
    prompt, expected, suffix = _prompt(entry, where), verdict.read(entry.get("expected")), entry.get("suffix", "")
    if not isinstance(prompt, str) or not isinstance(suffix, str) or expected is None:
        raise SinklensError(
            f"{where}: the verdict {verdict.name} needs a text as prompt and {verdict.form} as expected; got "
            f"{_short(prompt)} and {_short(entry.get('expected'))}."
        )
    if bool(suffix) != (verdict.name == "infilling"):
        raise SinklensError(
            f"{where}: a suffix, the text after the gap, belongs to the verdict infilling, which needs one; the "
            f"verdict is {verdict.name} and the suffix {_short(suffix)}."
        )
    return Sample(name, prompt, expected, suffix=suffix)


def _short(found: Any) -> str:
    text = json.dumps(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
