"""The check of a device: its options, the device under test, and the choice of tests for it.

``make gpu``, or ``python -m pytest -c tests/gpu/pytest.ini tests/gpu [--out FILE] [--device D] [--minutes N]
[--only TEXT] …`` from the root. ``make gpu`` measures first, alone on the device, and then checks with four workers;
each of the two starts no test after `--minutes`. The exit status is 1 if a test about correctness failed. Without an
accelerator the tests run on the CPU, at small sizes, and report what they could not check. sinklens is imported from
the checkout, installed or not.

Tests marked `large` take sizes that need an accelerator, tests marked `small` those for a CPU; `cuda` says why a test
needs a CUDA device. Each test also has the name of its part as a marker: ``-m "kernels or hooking"``.
"""

import inspect
import math
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import sinklens

ROOT = Path(__file__).resolve().parents[2]
if find_spec("sinklens.hooks") is None:  # sinklens is not installed: its other two folders are beside it
    sinklens.__path__.append(str(ROOT))

from gpu.report import PARTS, Report, part_of  # noqa: E402
from references import unpack  # noqa: E402

from benchmarks.measuring import settle  # noqa: E402

OPTIONS: dict[str, tuple[Any, str]] = {  # the default, and the help
    "device": ("", "e.g. cuda:1 or cpu; by default this machine's accelerator"),
    "out": ("sinklens-check.json", "JSON file (default: %(default)s)"),
    "minutes": (1.4, "start no test after this time (default: %(default)s)"),
    "stage": ("", "figures: only those that decide; checks: only the rest; by default both, the figures first"),
    "only": ("", "only tests whose part or description contains this text"),
}
UNTIL = pytest.StashKey[float]()
MARKERS = {
    "figures": "decides, and runs first",
    "large": "only with an accelerator",
    "small": "only on a CPU",
    "cuda(reason)": "needs CUDA",
} | PARTS


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the check."""
    group = parser.getgroup("sinklens")
    for name, (default, text) in OPTIONS.items():
        group.addoption(f"--{name}", type=type(default), default=default, help=text)


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name, OPTIONS[name][0])


def _device(config: pytest.Config) -> torch.device:
    """The device that was asked for, or the accelerator of this machine, or the CPU."""
    if name := _option(config, "device"):
        return torch.device(name)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu" if found is None else "cuda:0" if found.type == "cuda" else found.type)


def _worker(config: pytest.Config) -> dict[str, Any] | None:
    """What pytest-xdist gave this process if it is a worker; None if it is not."""
    return getattr(config, "workerinput", None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the deadline."""
    node.workerinput["until"] = node.config.stash[UNTIL]


def pytest_configure(config: pytest.Config) -> None:
    """Before Triton is imported and anything is computed: its interpreter without a GPU, no TF32; then the report."""
    for name, about in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {about}")
    device = _device(config)
    if device.type == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = "1"
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # tiny models gain nothing from more
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if (worker := _worker(config)) is not None:
        config.stash[UNTIL] = worker.get("until", math.inf)
    else:
        config.stash[UNTIL] = time.time() + 60 * _option(config, "minutes")
        config.pluginmanager.register(Report(Path(_option(config, "out")), str(device)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests for the device, describe them, and order them by part."""
    device = _device(config)
    other, stage, only = "large" if device.type == "cpu" else "small", _option(config, "stage"), _option(config, "only")
    dropped = {
        item for item in items
        if item.get_closest_marker(other)
        or (stage and (stage == "figures") != bool(item.get_closest_marker("figures")))
        or only not in f"{part_of(item.path)}: {_sentence(item)}"
    }  # fmt: skip
    config.hook.pytest_deselected(items=[*dropped])
    items[:] = [item for item in items if item not in dropped]
    order = ["speed", *PARTS]
    items.sort(key=lambda item: (not item.get_closest_marker("figures"), order.index(part_of(item.path))))
    for item in items:
        item.add_marker(part_of(item.path))
        item.user_properties.append(("what", _sentence(item)))
        needs = item.get_closest_marker("cuda")
        if needs and device.type != "cuda":
            item.add_marker(pytest.mark.skip(reason=needs.args[0]))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Plain names for types, cases and sizes."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype | tuple) else None


def _sentence(item: pytest.Item) -> str:
    """The first line of a test's docstring with the values of its parameters."""
    assert isinstance(item, pytest.Function)
    line = (inspect.getdoc(item.function) or item.name).split("\n")[0].removesuffix(".")
    return line.format(**item.callspec.params).replace("torch.", "") if hasattr(item, "callspec") else line


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; the CPU if there is no accelerator."""
    return _device(request.config)


@pytest.fixture(autouse=True)
def _usable(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Start no test once the time is over, and none on a device that an error has left unusable."""
    if time.time() > request.config.stash[UNTIL]:
        pytest.skip("the time of the check was over; --minutes gives it more")
    yield
    try:
        settle(device)
    except RuntimeError as error:
        if _worker(request.config) is not None:
            os._exit(1)  # another worker continues
        pytest.exit(f"{device} is unusable after {request.node.nodeid}: {error}", returncode=1)


@pytest.fixture
def finding(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Record the detail of this test, or a figure and its aim: ``finding("5 pairs", value=1.01, aim=1.05)``."""

    def record(detail: str, value: float | None = None, aim: float | None = None) -> None:
        for name, content in (("detail", detail), ("value", value), ("aim", aim)):
            record_property(name, content)

    return record


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of reference data."""
    return unpack(tmp_path_factory.mktemp("references"))
