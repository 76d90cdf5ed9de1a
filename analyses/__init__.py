"""Studies: one file each, read from top to bottom, copied to ask a new question.

`STUDIES` is what ``sinklens analyse NAME`` knows, `questions` what each asks; `find` gives a study's class. A study of
one's own is a subclass of `Study`; `interval_table` and `difference_table` make its tables. `accuracy` is a plain
function.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.analyses.intervals import difference_table, interval_table
    from sinklens.analyses.study import Study

STUDIES = {
    "existence": ("existence", "Existence"),
    "dynamics": ("dynamics", "Dynamics"),
    "layers": ("layers", "Layers"),
    "token_types": ("token_types", "TokenTypes"),
    "split": ("split", "Split"),
    "diagnose": ("diagnose", "Diagnose"),
    "heads": ("heads", "Heads"),
    "necessity": ("necessity", "Necessity"),
    "patching": ("patching", "Patching"),
    "windows": ("windows", "Windows"),
    "blocks": ("blocks", "Blocks"),
    "budget": ("budget", "Budget"),
    "mechanism": ("mechanism", "Mechanism"),
    "emergence": ("emergence", "Emergence"),
}


def questions() -> dict[str, str]:
    """The question that each study of `STUDIES` asks: the first line of its file."""
    found = {}
    for name, (module, _) in STUDIES.items():
        with (Path(__file__).parent / f"{module}.py").open(encoding="utf-8") as file:
            found[name] = file.readline().strip().strip('"')
    return found


__all__ = ["STUDIES", "Study", "difference_table", "find", "interval_table", "questions"]

_HOMES = {"Study": "study", "difference_table": "intervals", "interval_table": "intervals"}


def find(name: str) -> "type[Study]":
    """The study called `name`, or the one that a file of one's own defines (`name` ends in ``.py``).

    Raises:
        SettingError: there is none, and the nearest names; or the file does not define one study.
    """
    import importlib

    from sinklens.errors import SettingError, nearest

    if name.endswith(".py"):
        return _in_file(Path(name))
    if name not in STUDIES:
        raise SettingError(f"no study is called {name!r}; known: {', '.join(STUDIES)}.{nearest(name, STUDIES)}")
    module, kind = STUDIES[name]
    found: type[Study] = getattr(importlib.import_module(f"sinklens.analyses.{module}"), kind)
    return found


def _in_file(path: Path) -> "type[Study]":
    import importlib.util
    import inspect
    import sys

    from sinklens.analyses.study import Study
    from sinklens.errors import SettingError

    if not path.is_file():
        raise SettingError(f"there is no file {path}; give the path of one that defines a subclass of Study.")
    spec = importlib.util.spec_from_file_location(f"_study_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the hash of the source look it up there
    spec.loader.exec_module(module)
    own = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == spec.name]
    studies = [kind for kind in own if issubclass(kind, Study) and not inspect.isabstract(kind)]
    if len(studies) != 1:
        names = ", ".join(kind.__name__ for kind in studies) or "none"
        raise SettingError(f"{path} has to define one subclass of sinklens.analyses.Study; it defines {names}.")
    return studies[0]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.analyses.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
