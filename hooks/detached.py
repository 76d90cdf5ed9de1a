"""Results that were stored without their model."""

from typing import Any, NoReturn

from sinklens.errors import SettingError


class Detached:
    """Stands for the model in a result that was pickled, saved with `torch.save` or sent to another process."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SettingError(
            "this result was stored without its model, and what was asked needs it. Load the model and put it back: "
            "dataclasses.replace(run, model=model) for a run, cache.model = model.tree for a cache."
        )

    def __repr__(self) -> str:
        return "Detached()"


def without_model(result: Any) -> dict[str, Any]:
    """The attributes to pickle of a result with a `model`."""
    return {**vars(result), "model": Detached()}
