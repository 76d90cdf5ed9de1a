"""pyproject.toml, constraints.txt and the folders agree."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from contracts import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from test_layers import MODULES

from sinklens import interventions
from sinklens.cli.app import COMMANDS
from sinklens.sinks import detectors
from sinklens.utils.progress import Progress

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("transformer_lens", "datasets", "matplotlib", "circuitsvis")
SLOW = ("transformers", "xarray", "pandas", "ray")
WITH_SETTINGS = ("trace", "analyse", "evaluate", "reproduce", "plan", "verify")  # modules that read the samplers


def _imports(path: Path) -> Iterator[str]:
    """The modules that a file names in its import statements, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_every_package_folder_is_listed_and_every_listed_package_has_a_folder():
    """A folder without `__init__.py` works in the repository but is missing from the wheel."""
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    assert all((path.parent / "__init__.py").exists() for path in MODULES.values())


def test_no_source_file_imports_relatively_or_a_second_copy_of_hooks_or_analyses():
    named = {(name, module) for name, path in MODULES.items() for module in _imports(path)}
    assert [one for one in named if one[1].split(".")[0] in ("", "hooks", "analyses")] == []


@pytest.mark.extended
def test_imports_and_help_load_no_slow_library_until_a_name_is_used(tmp_path):
    """One process, without the type checks of this test run: what one step loads, the steps after it report too."""
    script = f"""
import sys
def loaded(step, names={(*HEAVY, *SLOW)}):
    print("loaded by", step, [name for name in names if name in sys.modules], file=sys.stderr)
import sinklens
loaded("sinklens")
from sinklens.cli import main
for command in {[[], *([name] for name in COMMANDS if name not in WITH_SETTINGS)]}:
    assert main([*command, "--help"]) == 0
    loaded(f"help of {{command}}", {("torch", *HEAVY, *SLOW)})
import sinklens.analyses, sinklens.evaluation, sinklens.hooks, sinklens.sinks
loaded("packages of lazy names")
sinklens.lab
loaded("the lab", ("starlette", "uvicorn"))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    steps = done.stderr.splitlines()
    assert len(steps) == 2 + 1 + len(COMMANDS) - len(WITH_SETTINGS) + 1
    assert [step for step in steps if not step.endswith(" []")] == []


def test_every_public_name_exists():
    modules = [importlib.import_module(package) for package in PROJECT["tool"]["setuptools"]["packages"]]
    assert [(module.__name__, name) for module in modules for name in module.__all__ if not hasattr(module, name)] == []


def _signatures() -> Iterator[tuple[str, inspect.Signature]]:
    """Every public function, class and method of the project's own, by its public name."""
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, Exception):
                continue  # built in Python's own code, without a signature
            if inspect.isfunction(value) or inspect.isclass(value):
                yield name, inspect.signature(value)
            for method, code in inspect.getmembers(value, inspect.isroutine) if inspect.isclass(value) else ():
                if not method.startswith("_") and str(getattr(code, "__module__", "")).startswith("sinklens"):
                    yield f"{name}.{method}", inspect.signature(code)


@pytest.mark.parametrize(
    ("wrong", "right", "allowed"),
    [
        ("batch index at_once n_rows", "row or batch_size", ()),
        (
            "to dest destination folder directory filename",
            "out, or path of save and load",
            ("LedgerRun", "Trace.source"),
        ),  # the second is nnsight's
        ("prompt", "prompts", ("Sample", "Study.example", "Study.of_prompt")),  # a record of one, and one of a study's
        ("report callback verbose", "progress", ()),
        ("axes axis", "ax", ()),
        ("places location", "where", ()),
        ("t result generation", "run", ("Problem",)),  # the number of a calculation
    ],
)
def test_one_thing_has_one_name_in_every_public_signature(wrong, right, allowed):
    given = {
        name: [one.name for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        for name, signature in _signatures()
        if name not in allowed
    }
    assert len(given) > 400
    assert {name: right for name, names in given.items() if set(wrong.split()) & set(names)} == {}


@pytest.mark.parametrize(
    ("name", "kind", "others"),
    [
        ("progress", Progress, ()),
        ("steps", Sequence[int] | None, ("acting_steps", "sink_map")),  # how many there are; a slice of those to draw
        ("scope", str | Sequence[str], ()),
        ("rows", Sequence[int] | None, ("append", "effect_map")),  # of a store; the name and the labels of an axis
        ("keep", bool, ("lab", "Lab")),  # the folder in which a lab keeps its runs
        ("ledger", str | Path, ()),
    ],
)
def test_a_name_has_one_type_in_every_public_signature(name, kind, others):
    given = [(owner, one.parameters[name].annotation) for owner, one in _signatures() if name in one.parameters]
    assert len(given) > 2
    assert [(owner, one) for owner, one in given if one != kind and owner.rpartition(".")[2] not in others] == []


def test_signatures_are_plain_and_functions_that_draw_take_axes_and_steps_are_the_samplers_where_there_are_settings():
    drawing = {name: signature for name, signature in _signatures() if signature.return_annotation == "Axes"}
    assert len(drawing) >= 6
    assert [name for name, signature in drawing.items() if "ax" not in signature.parameters] == []
    assert [name for name, signature in _signatures() if "Annotated" in str(signature)] == []
    chosen = {name: signature for name, signature in _signatures() if "only_steps" in signature.parameters}
    assert [name for name, signature in chosen.items() if "settings" not in signature.parameters] == []


@pytest.mark.parametrize("name", ["Ablate", "HideKeys", "MaskSinks", "SkipLayers"])
def test_the_examples_of_a_docstring_are_accepted(name):
    names = vars(detectors) | vars(interventions)
    examples = re.findall(rf"^ +({name}\(.*?\))(?:  #.*)?$", names[name].__doc__, flags=re.MULTILINE)
    assert [repr(eval(example, names)) for example in examples] != []


def test_dependencies_are_pinned_inside_their_ranges():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins, outside = {canonicalize_name(pin.name): pin for pin in pinned}, []
    groups = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    for requirement in [Requirement(line) for group in groups for line in group]:
        (version,) = (clause.version for clause in pins[canonicalize_name(requirement.name)].specifier)
        outside += [] if requirement.specifier.contains(version) else [(str(requirement), version)]
    assert outside == []


CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # conda-forge's names, where they are not PyPI's


def test_the_conda_recipe_has_the_version_the_command_and_the_dependencies_of_pyproject():
    recipe, project = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text()), PROJECT["project"]
    wanted = {("python", SpecifierSet(project["requires-python"]))}
    for one in map(Requirement, project["dependencies"]):
        wanted |= {(CONDA.get(one.name, one.name), one.specifier), *((extra, SpecifierSet()) for extra in one.extras)}
    listed = [line.partition(" ") for line in recipe["requirements"]["run"]]
    assert {(name, SpecifierSet(versions)) for name, _, versions in listed} == wanted
    assert PROJECT["build-system"]["requires"] == [recipe["requirements"]["host"][-1].replace(" ", "")]
    assert (recipe["context"]["version"], recipe["about"]["license"]) == (project["version"], project["license"])
    commands = [f"{name} = {target}" for name, target in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == commands


def test_tensor_annotations_are_checked_in_this_test_run():
    """jaxtyping's plugin instruments what Python's path finder finds, so it could miss a mapped folder.

    The three top packages are exempt: setuptools' finder serves them, and they only re-export.
    """
    loaders = {name: type(importlib.util.find_spec(name).loader).__name__ for name in MODULES}
    assert {name for name, loader in loaders.items() if loader != "_JaxtypingLoader"} <= {
        "sinklens",
        "sinklens.hooks",
        "sinklens.analyses",
    }


@pytest.mark.parametrize(
    "names",
    [["features"], ["hooks"], ["model"], sorted({name.split(".")[1] for name in MODULES if "." in name})],
    ids=str,
)
def test_every_room_is_an_attribute_of_the_package_in_a_fresh_interpreter(names: list[str]):
    code = f"import sinklens\nfor name in {names}: assert name in dir(sinklens) and getattr(sinklens, name)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
