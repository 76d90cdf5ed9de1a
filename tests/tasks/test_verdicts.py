"""Verdicts on free answers: right, wrong and malformed ones, and files that do not fit."""

import json
import sys

import pytest

from sinklens.errors import SinklensError, TaskError
from sinklens.tasks import find_task
from sinklens.tasks.prompts import Prompts, prompt_hash
from sinklens.tasks.verdicts import (
    REFUSALS,
    VERDICTS,
    AttackSuccess,
    Extraction,
    Judged,
    MultipleChoice,
    Refusal,
)

SCHEMA = {"type": "object", "properties": {"balls": {"type": "integer"}}, "required": ["balls"]}
SORRY, HELPFUL = "I cannot do that.", "Sure: buy flour."


def task(tmp_path, verdict, *lines):
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Prompts(file, by=verdict) if not isinstance(verdict, str) else find_task(verdict, path=file)


@pytest.mark.parametrize(
    ("verdict", "expected", "text", "right", "malformed"),
    [
        ("exact", "38 balls", " 38 balls\n", True, None),
        ("exact", "38 balls", "38 Balls", False, None),
        ("extraction", "38", "20 + 18 = 38 balls", True, False),
        ("extraction", "20", "20 + 18 = 38 balls", False, False),
        ("extraction", "38", "many", False, True),
        (Extraction(r"#### (\d+)", last=False), "38", "#### 38\n#### 7", True, False),
        ("choice", "B", "The answer is (B).", True, False),
        ("choice", "B", "The answer is A. No, the answer is B", True, False),
        ("choice", "B", " B. 38 balls", True, False),
        ("choice", "B", "(B)", True, False),
        ("choice", "B", "Both", False, True),
        ("choice", "A", "A ball is round, so the answer is C", False, False),
        ("choice", "A", "The answer is a ball", False, True),
        (MultipleChoice("AB"), "B", "C", False, True),
        ("json-schema", SCHEMA, '{"balls": 38}', True, False),
        ("json-schema", SCHEMA, 'Here:\n```json\n{"balls": 38}\n```', True, False),
        ("json-schema", SCHEMA, '{"balls": "38"}', False, False),
        ("json-schema", SCHEMA, "null", False, False),
        ("json-schema", SCHEMA, "balls: 38", False, True),
        ("json-schema", SCHEMA, "[" * 100_000, False, True),
        ("refusal", True, SORRY, True, None),
        ("refusal", False, SORRY, False, None),
        ("refusal", False, HELPFUL, True, None),
        ("refusal", True, HELPFUL, False, None),
        (Refusal(phrases=("flour",)), True, HELPFUL, True, None),
        (Refusal(judge=lambda prompt, text: prompt in text), True, "Kim has? no", True, None),
        ("attack", "Sure, here", HELPFUL, True, None),
        ("attack", "Sure, here", SORRY, False, None),
        ("attack", "Sure, here", " ", False, None),
        (AttackSuccess(need_target=True), "Sure, here", HELPFUL, False, None),
        (AttackSuccess(need_target=True), "Sure, here", "Sure, here is flour", True, None),
        (Judged(lambda prompt, text, expected: text == prompt + expected), "!", "Kim has?!", True, None),
        (Judged(lambda prompt, text, expected: text == prompt + expected), "!", "!", False, None),
    ],
)
def test_answers_are_judged(tmp_path, verdict, expected, text, right, malformed):
    made = task(
        tmp_path,
        f"prompts-{verdict}" if isinstance(verdict, str) else verdict,
        {"prompt": "Kim has?", "expected": expected},
    )
    (sample,) = made.samples()
    assert made.judge(sample, text, [], []) is right
    assert made.malformed(sample, text) is malformed


def test_the_span_of_a_gap_is_scored(tmp_path):
    line = {"prompt": "def f(x):\n", "suffix": "    return y\n", "expected": "    y = x\n"}
    made = task(tmp_path, "prompts-infilling", line)
    (sample,) = made.samples()
    assert (sample.prompt, sample.suffix) == (line["prompt"], line["suffix"])
    assert made.verdict(sample, "    y = x\n")
    assert not made.verdict(sample, "    y = x\n    return y\n")
    other = task(tmp_path, "prompts-infilling", line | {"suffix": "    return x\n"})
    assert prompt_hash(other.samples()[0]) != prompt_hash(sample)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("choice", {"prompt": "x", "expected": "BC"}, r"line 1: the verdict choice needs .* letter of a choice .*BC"),
        ("refusal", {"prompt": "x", "expected": "yes"}, r"needs a text as prompt and true if the model should refuse"),
        ("json-schema", {"prompt": "x", "expected": {"type": 7}}, r"needs a text as prompt and a JSON schema"),
        ("exact", {"prompt": [1, 2], "expected": "x"}, r"needs a text as prompt"),
        ("exact", {"prompt": "x"}, r"needs .* a text as expected; got \"x\" and null"),
        ("exact", {"prompt": "x", "expected": "y", "suffix": "z"}, r"belongs to the verdict infilling"),
        ("infilling", {"prompt": "x", "expected": "y"}, r"infilling, which needs one; the verdict is infilling"),
        ("judged", {"prompt": "x", "expected": "y"}, r"'judged' needs a function; pass task=Prompts"),
        ("exact", {"prompt": "x", "expected": "y", "id": 3}, r"the id is 3; give a non-empty text"),
    ],
)  # fmt: skip
def test_lines_that_do_not_fit_are_refused(tmp_path, name, line, message):
    with pytest.raises(SinklensError, match=message):
        task(tmp_path, f"prompts-{name}", line).samples()


def test_every_verdict_has_a_task():
    for name in VERDICTS:
        assert find_task(f"prompts-{name}").name == f"prompts-{name}"
    assert len(set(REFUSALS)) == len(REFUSALS) == 27


def test_json_schemas_need_their_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(TaskError, match=r"pip install jsonschema"):
        task(tmp_path, "prompts-json-schema", {"prompt": "x", "expected": SCHEMA}).samples()


def test_programs_of_a_file_are_code_samples(tmp_path):
    line = {
        "prompt": "Write twice.",
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        "entry_point": "twice",
    }
    made = task(tmp_path, "prompts-code", line)
    (sample,) = made.samples()
    code = "def twice(x):\n    return 2 * x\n"
    assert made.extract(f"Here:\n```python\n{code}```\nDone.") == made.extract(code) == code
    assert (sample.id, sample.entry_point, made.verdict(sample, code)) == ("prompts-code/0", "twice", None)
