"""HumanEval: prompts and programs are assembled as in the harness, and completions end with the function."""

import json

import pytest
from programs import passes, program

from sinklens.errors import SettingError
from sinklens.tasks import find_task
from sinklens.tasks.humaneval import HumanEval

RECORD = {
    "task_id": "HumanEval/7",
    "prompt": 'def twice(x):\n    """Two times x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "\ndef check(candidate):\n    assert candidate(3) == 6\n",
    "entry_point": "twice",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "HumanEval.jsonl"
    path.write_text(json.dumps(RECORD) + "\n")
    return path


def test_a_program_continues_the_prompt_and_calls_the_check(file):
    task = HumanEval(file)
    (sample,) = task.samples()
    assert (sample.id, sample.prompt, sample.opening) == ("humaneval/7", RECORD["prompt"], "")
    assert program(task, sample, sample.reference) == (
        'def twice(x):\n    """Two times x."""\n    return 2 * x\n\n\n'
        "def check(candidate):\n    assert candidate(3) == 6\n\ncheck(twice)\n"
    )
    assert task.verdict(sample, sample.reference) is None


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("    return 2 * x\n\nclass A:\n    pass", "    return 2 * x\n"),
        ("    return 2 * x\ndef other():\n    pass", "    return 2 * x"),
        ("    return 2 * x\n# done", "    return 2 * x"),
        ("    return 2 * x\nif __name__ == '__main__':", "    return 2 * x"),
        ("    return 2 * x\nprint(twice(2))", "    return 2 * x"),
        (
            "    # twice\n    if x:\n        print(x)\n    return x",
            "    # twice\n    if x:\n        print(x)\n    return x",
        ),
        ("    return 2 * x\n```\nDone.", "    return 2 * x\n```\nDone."),
    ],
)
def test_a_completion_ends_with_the_function(file, text, kept):
    task = HumanEval(file)
    assert task.extract(text) == kept
    assert kept + "\n" in program(task, task.samples()[0], text)


def test_in_the_instruct_style_the_answer_begins_with_the_signature_and_ends_with_the_code_block(file):
    task = find_task("humaneval-instruct", path=file)
    (sample,) = task.samples()
    assert (sample.prompt, sample.opening) == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        '```python\ndef twice(x):\n    """Two times x."""\n\n```\n',
        'Here is the completed function:\n```python\ndef twice(x):\n    """Two times x."""\n\n',
    )
    text = "    return 2 * x\n```\nIt doubles x."
    assert task.extract(text) == "    return 2 * x\n"
    assert program(task, sample, text) == program(HumanEval(file), sample, "    return 2 * x\n")


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_style_is_refused(file):
    with pytest.raises(SettingError, match="style must be one of humaneval, humaneval-instruct; got 'chat'"):
        HumanEval(file, "chat")


def test_published_solutions_pass_and_a_wrong_one_fails(shared):
    task = HumanEval(shared / "data" / "humaneval")
    samples = task.samples()
    assert len(samples) == len({sample.id for sample in samples}) == 164
    for sample in samples:
        assert task.extract(sample.reference) == sample.reference, "it is cut"
        assert passes(program(task, sample, sample.reference), {"__name__": "program"}), sample.id
        assert not passes(program(task, sample, "    return object()\n"), {"__name__": "program"}), sample.id
