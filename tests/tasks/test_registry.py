"""Tasks by name: each task is found, and the error for an unknown name or setting names it."""

import pytest

from sinklens.errors import TaskError
from sinklens.tasks import NAMES, find_task
from sinklens.tasks.base import Task
from sinklens.tasks.gsm8k import Gsm8k


@pytest.mark.parametrize("name", NAMES)
def test_every_name_finds_its_task(name):
    task = find_task(name)
    assert isinstance(task, Task)
    assert (task.name, task, hash(task)) == (name, find_task(name), hash(find_task(name)))


GENERATED = [name for name in NAMES if name.startswith("tiny-")]


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tasks_have_distinct_samples(name):
    task = find_task(name)
    samples = task.samples()
    assert len({sample.id for sample in samples}) == len({sample.prompt for sample in samples}) == len(samples) >= 200
    assert all(sample.id == f"{name}/{number}" for number, sample in enumerate(samples))
    assert list(task.samples(7)) == list(samples[:7])
    assert {task.verdict(sample, sample.reference) for sample in samples} == {None if name == "tiny-code" else True}


def test_settings_reach_the_task(tmp_path):
    task = find_task("gsm8k-cot", path=str(tmp_path), shots=0, extractor="strict")
    assert task == Gsm8k(tmp_path, "gsm8k-cot", 0, "strict") != find_task("gsm8k-cot", path=tmp_path, shots=0)


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("gsm8k_cot", {}, r"no task is called 'gsm8k_cot'; known: tiny-gsm, .* Nearest: gsm8k-cot"),
        ("tiny-code", {"shots": 3}, r"the task 'tiny-code' has no setting 'shots'; its settings: none"),
        ("humaneval", {"extractor": "strict"}, r"'humaneval' has no setting 'extractor'; its settings: path"),
        *((name, {}, "limit is -1; give the number of samples, at least 1, or None for all") for name in GENERATED),
    ],
)
def test_errors_for_unknown_tasks_and_settings_name_them(name, settings, text):
    with pytest.raises(TaskError, match=text):
        find_task(name, **settings).samples(-1)
