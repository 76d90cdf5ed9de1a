"""Loads the models of a lab and names them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklens.errors import SinklensError, require
from sinklens.live.session import LabModel
from sinklens.model import load
from sinklens.model.loading import fitting
from sinklens.utils.arguments import arguments


def lab_models(given: Sequence[Any], **options: Any) -> list[LabModel]:
    """The models of a lab.

    Args:
        given: names, folders, or loaded models; the first is the default.
        options: options of `sinklens.load` for names and folders.

    Raises:
        SinklensError: two of them are the same.
    """
    found: list[LabModel] = []
    for one in given:
        chosen = fitting(one, options) if isinstance(one, str | Path) else {}
        model = load(one, **chosen)
        dtype = {"dtype": str(model.cfg.dtype).removeprefix("torch.")}  # of a model that was loaded before
        source, as_loaded = (one, chosen) if isinstance(one, str | Path) else (model.name, dtype)
        name = Path(source).name if Path(source).is_dir() else str(source)  # of a folder, its last part
        entry = LabModel(name, model, _loading(source, as_loaded))
        require(
            entry.name not in {other.name for other in found},
            f"the lab has the model {entry.name} already; give each model once.",
            SinklensError,
        )
        found.append(entry)
    return found


def _loading(given: str | Path, options: Mapping[str, Any]) -> str:
    usual, named = arguments(load), {"adapter": _found(options["adapter"])} if options.get("adapter") else {}
    chosen = [f"{key}={value!r}" for key, value in {**options, **named}.items() if value != usual[key].default]
    return f"sinklens.load({', '.join([ascii(_found(given)), *chosen])})"


def _found(given: str | Path) -> str:
    """The name as given; a folder from the root, for scripts that run elsewhere."""
    return str(Path(given).absolute()) if Path(given).is_dir() else str(given)
