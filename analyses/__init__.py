"""Studies: one file each, written to be read from top to bottom and copied for a new question.

`STUDIES` lists the names that ``sinklens analyse NAME`` accepts and `questions` what each asks; `find` returns a
study's class. To write your own study, subclass `Study` and build its tables with `interval_table` and
`difference_table`. `accuracy.measure` is a plain function.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sinklens.utils.lazy import lazily

if TYPE_CHECKING:
    from sinklens.analyses.estimates.tables import difference_table, interval_table
    from sinklens.analyses.study import Study

STUDIES = {
    "existence": ("existence", "Existence"),
    "dynamics": ("dynamics", "Dynamics"),
    "edits": ("edits", "Edits"),
    "swaps": ("swaps", "Swaps"),
    "texts": ("texts", "Texts"),
    "pair": ("pair", "Pair"),
    "alone": ("alone", "Alone"),
    "token_types": ("token_types", "TokenTypes"),
    "events": ("events", "Events"),
    "necessity": ("necessity", "Necessity"),
    "content": ("content", "Content"),
    "definitions": ("definitions", "Definitions"),
    "mechanism": ("mechanism", "Mechanism"),
    "settling": ("settling", "Settling"),
    "caching": ("caching", "Caching"),
}


def questions() -> dict[str, str]:
    """The question that each study of `STUDIES` asks, which is the first line of its file."""
    found = {}
    for name, (module, _) in STUDIES.items():
        with (Path(__file__).parent / f"{module}.py").open(encoding="utf-8") as file:
            found[name] = file.readline().strip().strip('"')
    return found


__all__ = ["STUDIES", "Study", "difference_table", "find", "interval_table", "questions"]

_HOMES = {"Study": "study", "difference_table": "estimates.tables", "interval_table": "estimates.tables"}


def find(name: str) -> "type[Study]":
    """The study called `name`, or the study that a file defines (`name` ends in ``.py``).

    Raises:
        SettingError: no study has this name (the nearest names are listed), or the file cannot be run or does not
            define exactly one.
    """
    import importlib

    from sinklens.errors import SettingError, nearest

    if not isinstance(name, str):
        raise SettingError(f"a study is found by its name or file, such as 'existence' or 'study.py'; got {name!r}.")
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
    import traceback

    from sinklens.analyses.study import Study
    from sinklens.errors import SettingError

    if not path.is_file():
        raise SettingError(f"no such file: {path}; give the path of a file that defines a subclass of Study.")
    spec = importlib.util.spec_from_file_location(f"_study_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the hash of the source look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's program
        line = getattr(error, "lineno", None) or traceback.extract_tb(error.__traceback__)[-1].lineno
        raise SettingError(f"{path} could not be run ({type(error).__name__}: {error}; line {line}).") from error
    defined = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == spec.name]
    studies = [kind for kind in defined if issubclass(kind, Study) and not inspect.isabstract(kind)]
    if len(studies) != 1:
        names = ", ".join(kind.__name__ for kind in studies) or "none"
        raise SettingError(f"{path} must define exactly one subclass of sinklens.analyses.Study; it defines {names}.")
    return studies[0]


__getattr__ = lazily(__name__, {name: f"sinklens.analyses.{home}" for name, home in _HOMES.items()})
