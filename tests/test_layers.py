"""The floors: a file imports only from its folder or from lower floors, and there are no import cycles.

Every import counts, including those inside functions and those for type checkers.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from contracts import FILES, ROOT

FLOORS = [  # from the bottom up; a name is a folder, or a file at the top of the package
    ("errors",),
    ("utils",),
    ("hooks",),
    ("sinks",),  # cache policies choose keys by their sinks
    ("sampling",),
    ("families",),
    ("model",),
    ("runs",),
    ("interventions",),
    ("experiments",),
    ("features",),
    ("views",),
    ("tasks",),
    ("evaluation",),
    ("live",),
    ("analyses",),
    ("cli",),
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}


def module_name(file: Path) -> str:
    """Dotted import name of a file."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "sinklens" else ["sinklens", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def imported(file: Path) -> set[str]:
    """Modules of sinklens that a file names in any import statement, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            found |= {name} if name else set()
    return found - {module_name(file)}


@cache
def all_imports() -> dict[str, set[str]]:
    """Modules of sinklens that each module imports."""
    return {name: imported(file) for name, file in MODULES.items()}


def floor_name(module: str) -> str:
    """The folder or top-level file of a module; "" for the package itself, which is above all floors."""
    return [*module.split("."), ""][1]


def test_every_file_has_a_floor():
    assert {floor_name(module) for module in MODULES} - {""} == set(FLOOR)


def test_no_file_imports_from_a_higher_floor():
    found = [(module, target) for module, targets in all_imports().items() for target in targets]
    found = [(module, target) for module, target in found if floor_name(module) in FLOOR]
    upward = [
        f"{module} -> {target}"
        for module, target in found
        if FLOOR.get(floor_name(target), len(FLOORS)) > FLOOR[floor_name(module)]
    ]
    beside = [
        f"{module} -> {target}"
        for module, target in found
        if FLOOR.get(floor_name(target)) == FLOOR[floor_name(module)]
        and floor_name(target) != floor_name(module)
        and MODULES[target].parent != MODULES[module].parent
    ]
    assert upward + beside == []


def test_there_are_no_import_cycles():
    assert list(TopologicalSorter(all_imports()).static_order())  # raises CycleError


BEHIND_ROOMS = {  # what the lab takes from inside a room; an entry may leave this list, none may join it
    "experiments": {"Stacked"},
    "families": {"find_sampler", "fitting"},
    "hooks": {"MODES", "PassKind"},
    "model": {"fitting"},
    "runs": {"Denoising", "RunRequest"},
    "sampling": {"State"},
    "views": {"Material", "Numbers", "build", "html", "layer_maps", "patterns_at", "run_data", "visible"},
}


def exported(module: str) -> set[str]:
    """The names in the ``__all__`` of a room."""
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_lab_imports_what_users_import():
    """The names in ``__all__`` of the rooms, the errors and the utilities, besides those listed."""
    behind: dict[str, set[str]] = {}
    for file in ROOT.glob("sinklens/live/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if floor_name(module) in FLOOR and floor_name(module) not in ("errors", "utils", "live"):
                private = {alias.name for alias in node.names} - exported(module)
                behind.setdefault(floor_name(module), set()).update(private)
    assert {room: names for room, names in behind.items() if names} == BEHIND_ROOMS
