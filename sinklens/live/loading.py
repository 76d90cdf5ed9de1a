"""Loads the models of a lab and names them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinklens.errors import SinklensError
from sinklens.live.session import LabModel
from sinklens.model import Model, load
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
        named = isinstance(one, str | Path)
        chosen = fitting(one, options) if named else {}
        model = load(one, **chosen)
        entry = LabModel(_name(one, model), model, _loading(one, chosen) if named else _of_object(model))
        if entry.name in {other.name for other in found}:
            raise SinklensError(f"the lab has the model {entry.name} already; give each model once.")
        found.append(entry)
    return found


def _name(given: Any, model: Model) -> str:
    """The name as given; of a folder, its last part."""
    name = str(given) if isinstance(given, str | Path) else model.name
    return Path(name).name if Path(name).is_dir() else name


def _loading(given: str | Path, options: Mapping[str, Any]) -> str:
    name = str(Path(given).absolute()) if Path(given).is_dir() else str(given)
    usual = arguments(load)
    chosen = [f"{key}={value!r}" for key, value in options.items() if value != usual[key].default]
    return f"sinklens.load({', '.join([ascii(name), *chosen])})"


def _of_object(model: Model) -> str:
    """The expression for a model that was loaded before."""
    folder = Path(model.name)
    name = str(folder.absolute()) if folder.is_dir() else model.name
    dtype = str(model.cfg.dtype).removeprefix("torch.")
    return f"sinklens.load({name!a}, dtype={dtype!r})"
