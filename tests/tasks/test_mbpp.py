"""MBPP: prompts equal those of the harness's YAML, and programs run with the published tests."""

import ast
import json
from pathlib import Path

import pytest
from programs import program

from sinklens.errors import TaskError
from sinklens.tasks import find_task
from sinklens.tasks.mbpp import Mbpp

TWICE = {
    "task_id": 11, "text": "Write a function to double a number.", "code": "def twice(x):\r\n  return 2 * x",
    "test_list": ["assert twice(3) == 6", "assert twice(0) == 0", "assert set([twice(1)]) == {2}"],
    "test_setup_code": "", "challenge_test_list": [],
}  # fmt: skip
LAST = TWICE | {"task_id": 511}


def write(folder, *rows):
    (folder / "mbpp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def harness_task():
    """The examples, and the YAML's text of a prompt and an answer, read without importing code that downloads."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")
    yaml = pytest.importorskip("yaml")
    folder = Path(next(iter(lm_eval.__path__))) / "tasks" / "mbpp"
    listed = next(
        node for node in ast.walk(ast.parse((folder / "utils.py").read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "list_fewshot_samples"
    )  # fmt: skip
    examples = ast.literal_eval(next(node for node in ast.walk(listed) if isinstance(node, ast.Return)).value)
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: node.value)
    return examples, yaml.load((folder / "mbpp.yaml").read_text(), loader)


def test_prompts_equal_those_of_the_harness(tmp_path):
    jinja2 = pytest.importorskip("jinja2")
    examples, task = harness_task()

    def rendered(template, row):
        return jinja2.Template(template, keep_trailing_newline=True).render(**row)

    shown = [
        rendered(task["doc_to_text"], row) + rendered(task["doc_to_target"], row) + "\n\n" for row in examples
    ]  # fmt: skip
    rows = [{"challenge_test_list": []} | row for row in examples]
    (sample,) = Mbpp(write(tmp_path, *rows, TWICE)).samples()
    assert sample.prompt == "".join(shown) + rendered(task["doc_to_text"], TWICE)
    assert tuple(task["generation_kwargs"]["until"]) == Mbpp().stop
    assert Mbpp(tmp_path, shots=0).samples()[0].prompt == rendered(task["doc_to_text"], TWICE)


@pytest.mark.parametrize(
    ("text", "passes"),
    [(TWICE["code"], True), ("def twice(x):\n    return x + 3\n[DONE] def twice(x): return 2 * x", False)],
)
def test_programs_run_with_the_published_tests(tmp_path, text, passes):
    task = Mbpp(write(tmp_path, TWICE, LAST), shots=0)
    (sample,) = task.samples()
    assert (sample.id, sample.entry_point, task.verdict(sample, text)) == ("mbpp/11", "twice", None)
    code = program(task, sample, text)
    if passes:
        exec(code, {})
    else:
        with pytest.raises(AssertionError, match=r"^$"):
            exec(code, {})


def test_a_setup_runs_before_the_tests(tmp_path):
    row = TWICE | {"test_setup_code": "import math\nlimit = math.floor(6.5)", "test_list": ["assert twice(3) == limit"]}
    with_setup, without = Mbpp(write(tmp_path, row, row | {"task_id": 12, "test_setup_code": ""}), shots=0).samples()
    exec(program(Mbpp(), with_setup, row["code"]), {})
    with pytest.raises(NameError, match="limit"):
        exec(program(Mbpp(), without, row["code"]), {})


@pytest.mark.parametrize(
    ("row", "given", "message"),
    [
        (TWICE, {}, r"lacks the examples \[2, 3, 4\]; give the complete file, or shots=0"),
        (TWICE | {"test_list": ["x = 3"]}, {"shots": 0}, r"problem 11: its first test calls no function of its own"),
        (
            TWICE | {"task_id": "11"},
            {"shots": 0},
            r"line 1 has no usable task_id; it needs task_id \(int\), text \(str\)",
        ),
        (TWICE, {"shots": 4}, r"shots is 4; MBPP has 0 to 3 examples"),
    ],
)
def test_data_that_cannot_be_used_are_refused(tmp_path, row, given, message):
    with pytest.raises(TaskError, match=message):
        find_task("mbpp", path=write(tmp_path, row), **given).samples()


def test_without_data_the_error_says_what_to_give():
    with pytest.raises(TaskError, match=r"mbpp needs its data \(--data FILE\)"):
        find_task("mbpp").samples()
