"""What every test shares."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():  # now: the conftest of a folder may import the package before any hook is called
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, by whichever library
import typechecks

torch.set_num_threads(1)  # tiny models gain nothing from more and, beside other processes, lose twentyfold

if TYPE_CHECKING:
    from browser import Browser

    from sinklens import Model

collect_ignore = ["gpu"]  # the check of a device has its own settings and starts its own process (make gpu)
SHARED = Path(__file__).resolve().parents[2] / "shared"
TESTS = Path(__file__).resolve().parent
EXTENDED = (  # files and folders that `make test` leaves to `make check`: real processes, training, studies, documents
    "analyses", "cli/test_studies.py", "cli/test_testing.py", "evaluation/sandbox", "utils/test_coverage.py",
    "evaluation/test_distributed.py", "evaluation/test_harness",
    "evaluation/test_ray_gpus.py", "evaluation/test_runner.py", "evaluation/test_tables.py", "evaluation/test_units.py",
    "experiments/test_sweeps.py", "features/test_probe_tables.py",
    "hooks/test_column_sums_triton.py",
    "hooks/test_fused.py", "papers", "test_benchmarks.py", "test_docs.py", "test_gpu_check.py", "test_tutorials.py",
    "training", "views/test_report.py",
)  # fmt: skip


def is_extended(path: Path) -> bool:
    """Whether a file or folder belongs to `make check` alone."""
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix().startswith(EXTENDED)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread whose tests the markers would drop, unless the command line names them."""
    if "not extended" not in config.option.markexpr or not is_extended(collection_path):
        return None
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(is_extended(path) for path in named) else True


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skip where generated programs are not run."""
    from sinklens.evaluation.sandbox import available_isolation

    found = available_isolation()
    if not found.layers:
        pytest.skip(str(found))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what belongs to `make check` alone, before the markers select."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if is_extended(item.path) or item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.extended)
        elif item.get_closest_marker("fast_cases"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for several in cases.values():
        mark_all_but_some(several)


def mark_all_but_some(cases: list[pytest.Item]) -> None:
    """Leave as many cases as the marker `fast_cases` says to `make test`, from the first to the last."""
    (number,) = cases[0].get_closest_marker("fast_cases").args
    fast = {round(n * (len(cases) - 1) / max(1, number - 1)) for n in range(number)}
    for place, case in enumerate(cases):
        if place not in fast:
            case.add_marker(pytest.mark.extended)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of garbage collection, which takes a twelfth of the time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # by default after every 700 objects


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data that lies beside some checkouts."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def conformance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of reference data, unpacked once and kept between test runs if pytest keeps a cache."""
    from references import unpack

    cache = getattr(request.config, "cache", None)
    return unpack(tmp_path_factory.mktemp("references") if cache is None else cache.mkdir("references"))


@pytest.fixture(autouse=True)
def _begin() -> None:
    """The same random numbers and type checks whichever tests run, and in whatever order."""

    torch.manual_seed(0)
    typechecks.begin_test()


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    """No figure outlives its test; pyplot keeps every one until it is closed."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session", autouse=True)
def _check_equal_models_once() -> None:
    """Skip `sinklens.load`'s self-check of a model whose weights and config passed it before in this process."""
    import model_checks

    model_checks.check_equal_models_once()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of the messages users see: the test run's own type checks would fail first."""
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def families() -> Iterator[None]:
    """The tables of families, samplers and architectures are afterwards as they were."""
    from sinklens.families import FAMILIES, SAMPLERS
    from sinklens.hooks.architectures import ARCHITECTURES

    tables = FAMILIES, SAMPLERS, ARCHITECTURES
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(scope="session")
def tiny_llada() -> "Model":
    """The shipped diffusion model."""
    import sinklens

    return sinklens.load("tiny-llada")


@pytest.fixture(scope="session")
def tiny_llama() -> "Model":
    """Its autoregressive twin."""
    import sinklens

    return sinklens.load("tiny-llama")


@pytest.fixture(scope="session")
def two_modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained checkpoint that decodes in two modes."""
    from training import RECIPES, write_untrained

    sizes = {"problems": 200, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "block_length": 4}
    return write_untrained(replace(RECIPES["tiny-two-modes"], **sizes), tmp_path_factory.mktemp("two-modes"))


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """A headless browser, one for all tests of pages."""
    from browser import Browser

    window = Browser()
    yield window
    window.close()


@pytest.fixture
def architecture() -> str:
    """That of the fixture `model`, where the parameters of a test name no other."""
    return "llama"


@pytest.fixture
def causal() -> bool:
    """The direction of the fixture `model`, where the parameters of a test name no other."""
    return False


@pytest.fixture
def model(worded: "Callable[..., Model]", architecture: str, causal: bool) -> "Iterator[Model]":
    """A random model that reads words, left without a hook; in the folders of hooks and of models, it reads ids."""
    from watching import unwatched

    yield (made := worded(architecture, causal))
    assert unwatched(made)


@pytest.fixture
def ids() -> torch.Tensor:
    """Two rows of seven random token ids."""
    from building import random_ids

    return random_ids()


@pytest.fixture
def shipped(request: pytest.FixtureRequest, name: str) -> "Model":
    """The shipped model that a test's parameter `name` names, as its fixture does."""
    return request.getfixturevalue(name)


@pytest.fixture(scope="session")
def worded(tmp_path_factory: pytest.TempPathFactory) -> "Callable[..., Model]":
    """Random models that read words, so that prompts of different length can be given: ``worded("qwen3", True)``.

    "dream" has Dream's sampler and shift, "sdar" has blocks of four, "qwen3_moe" has experts.
    """
    from building import random_hf
    from layouts import word_tokenizer, write_family

    import sinklens

    @cache
    def make(architecture: str = "llama", causal: bool = False) -> "Model":
        folder = tmp_path_factory.mktemp("model")
        words = word_tokenizer(folder / "words")
        if architecture == "sdar":
            return sinklens.load(random_hf("qwen3", causal), tokenizer=words, family="sdar", block_length=4)
        if architecture != "dream":
            family = {False: "llada-moe", True: "qwen3-moe"}[causal] if architecture == "qwen3_moe" else None
            return sinklens.load(random_hf(architecture, causal), tokenizer=words, family=family)
        write_family(folder, "dream")
        return sinklens.load(folder, tokenizer=words)

    return make
