"""What the tests of papers' measurements share."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "papers"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A script of benchmarks/papers, by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module
