"""Tasks of lm-evaluation-harness on local data: its own YAML, whose data are replaced, or one written here."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval import evaluator  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = Path(next(iter(lm_eval.__path__))) / "tasks"


def local_task(folder, name, documents, original=None, **more):
    """Write a task on `documents` (split -> list, or file), which includes the harness's task `original`."""
    files = {}
    for split, listed in documents.items():
        files[split] = str(folder / f"{name}-{split}.jsonl")
        if isinstance(listed, list):
            Path(files[split]).write_text("".join(json.dumps(one) + "\n" for one in listed))
        else:
            files[split] = str(listed)
    task = {} if original is None else {"include": str(TASKS / original).removesuffix(".yaml") + ".yaml"}
    if str(original).endswith("_yaml"):
        task["include"] = str(TASKS / original)  # a template without an extension
    data = {"data_files": files, "cache_dir": str(folder / "cache")}
    task |= {"task": name, "dataset_path": "json", "dataset_name": None, "dataset_kwargs": data} | more
    (folder / f"{name}.yaml").write_text(json.dumps(task))
    return name


@contextmanager
def offline():
    """No network, and no slow inspection of the machine for the header of the results."""
    with (
        patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}),
        patch.object(evaluator, "add_env_info"),
    ):
        yield


def evaluated(model, folder, names, **given):
    """The harness's results of tasks in a folder."""
    with offline():
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        return lm_eval.simple_evaluate(
            model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, log_samples=True, **given
        )
