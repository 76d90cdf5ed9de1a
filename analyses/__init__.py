"""Studies: one file each, read from top to bottom, copied to ask a new question.

`STUDIES` is what ``sinklens analyse NAME`` knows; `find` gives a study's class. A study of one's own is a subclass of
`Study`; `interval_table` and `difference_table` make its tables. `accuracy` is a plain function.
"""

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
    "patching": ("patching", "Patching"),
    "windows": ("windows", "Windows"),
    "blocks": ("blocks", "Blocks"),
    "budget": ("budget", "Budget"),
    "mechanism": ("mechanism", "Mechanism"),
    "emergence": ("emergence", "Emergence"),
}

__all__ = ["STUDIES", "Study", "difference_table", "find", "interval_table"]

_HOMES = {"Study": "study", "difference_table": "intervals", "interval_table": "intervals"}


def find(name: str) -> "type[Study]":
    """The study called `name`.

    Raises:
        SettingError: there is none; names the nearest.
    """
    import importlib

    from sinklens.errors import SettingError, nearest

    if name not in STUDIES:
        raise SettingError(f"no study is called {name!r}; known: {', '.join(STUDIES)}.{nearest(name, STUDIES)}")
    module, kind = STUDIES[name]
    found: type[Study] = getattr(importlib.import_module(f"sinklens.analyses.{module}"), kind)
    return found


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.analyses.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
