"""Fixtures of the reference data: a module names its folder as ``FOLDER``.

`make test` compares each family's config and passes with its reference, and one run; `make check` all runs, caches,
batches and interventions.
"""

from pathlib import Path

import pytest

PASSES = ("test_every_stored_run_", "test_the_config_is_", "test_logits_", "test_a_pass_")
RUNS = ("test_every_canvas_", "test_canvases_are_equal_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what belongs to `make check` alone: all but `PASSES` and one of the `RUNS` of each family."""
    seen = set()
    for item in items:
        if item.path.parent != Path(__file__).parent or item.name.startswith(PASSES):
            continue
        family = item.path, getattr(item, "callspec", None) and item.callspec.params.get("name")
        if not item.name.startswith(RUNS) or family in seen:
            item.add_marker(pytest.mark.extended)
        else:
            seen.add(family)


@pytest.fixture(scope="module")
def reference(request, conformance):
    from stored.runs import open_folder  # here, as pytest may read this file before Triton's interpreter is chosen

    return open_folder(conformance / request.module.FOLDER)
