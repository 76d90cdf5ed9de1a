"""Names of a package that are imported when they are first used, so that importing the package is quick.

Pitfall: type checkers do not see them; import them under ``TYPE_CHECKING``, too.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of `package`, whose names are in the modules `homes`; ``dir`` lists them, too."""
    module = sys.modules[package]
    module.__dir__ = lambda: sorted({*vars(module), *homes})  # type: ignore[method-assign]

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
