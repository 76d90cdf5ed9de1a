"""Values of hook points cached by step, as TransformerLens `ActivationCache` objects.

Limitation: a cache keeps a copy of every value on the device; a complete run of a large model does not fit in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.runs.intervention import within

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

    from sinklens.hooks.tree import HookTree
    from sinklens.model import Model


class StepCaches(Mapping[int, "ActivationCache"]):
    """Values of points by step: ``caches[step]`` is an `ActivationCache`, ``caches[step]["blocks.0.hook_z"]`` a value.

    Steps that did not run are missing.
    """

    def __init__(self, tree: "HookTree") -> None:
        self._tree = tree
        self._values: dict[int, dict[str, Tensor]] = {}
        self._made: dict[int, ActivationCache] = {}  # on the first look-up, because making one takes milliseconds
        self._windows: dict[int, dict[str, range]] = {}

    def keep(self, value: Tensor, point: Point) -> None:
        """Keep a copy of the value at `point` in the current step."""
        step, name = point.step or 0, str(point.name)
        self._made.pop(step, None)
        self._values.setdefault(step, {})[name] = value.detach().clone()
        window = self._window(value, point)
        if window is not None:
            self._windows.setdefault(step, {})[name] = window

    def _window(self, value: Tensor, point: Point) -> range | None:
        """The columns of a value, where a pass of a diffusion run computes some of them; None for all."""
        name, forward_pass = str(point.name), point.forward_pass
        if (
            forward_pass.mode == "causal"
            or name.startswith("denoise.")
            or {"pos", "query"}.isdisjoint(names.axes_of(name))
        ):
            return None
        columns, every = forward_pass.columns(name), range(forward_pass.keys.stop)
        planned = forward_pass.fresh is not None and not names.covers_all_columns(name)
        return columns if planned or columns != every else None

    def __getitem__(self, step: int) -> "ActivationCache":
        from sinklens.hooks.spellings import HookCache

        if step not in self._values:
            raise SettingError(f"step {step} was not cached; cached steps: {sorted(self._values) or 'none'}.")
        if step not in self._made:
            self._made[step] = HookCache(self._values[step], self._tree, windows=self._windows.get(step))
        return self._made[step]

    def get(self, step: int, default: Any = None) -> Any:
        """The cache of a step; `default` if it has none."""
        if step not in self:
            return default
        return self[step]

    def __contains__(self, step: object) -> bool:
        return step in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        points = sorted({name for kept in self._values.values() for name in kept})
        return f"StepCaches(steps {sorted(self._values)}, points {points})"


def require_columns(cache: Any, name: str, step: int, columns: range) -> None:
    """Refuse a cached value of a pass that computed other columns than `columns` of `step`.

    Raises:
        SettingError: it belongs to other columns.
    """
    there = getattr(cache, "windows", {}).get(name, columns)
    if there != columns:
        raise SettingError(
            f"source has positions {there.start} to {there.stop - 1} of {name}, and step {step} computes "
            f"{columns.start} to {columns.stop - 1}: its run computed a part of the canvas. Record the source in a run "
            f"without cache= (or use_cache=True), or patch steps that compute the same positions."
        )


def chosen_points(wanted: Any, model: "Model", layers: Sequence[int] | None) -> list[str]:
    """Points selected by a name, a list of names or a predicate; of points inside blocks, only those in `layers`.

    Raises:
        HookNameError: a name is unknown, or a predicate matches nothing.
        SettingError: a layer does not exist, or no point is left.
    """
    if not isinstance(wanted, Iterable) and not callable(wanted):
        raise SettingError(f"names must be hook points, a list of them, or a predicate on names; got {wanted!r}.")
    entries = [wanted] if isinstance(wanted, str) or callable(wanted) else list(wanted)
    known, size = model.hook_names(), model.cfg.n_layers
    found = {point for entry in entries for point in names.select(entry, known, size)}
    if layers is not None:
        numbers = {str(layer) for layer in within("layer", layers, size)}
        found = {name for name in found if not name.startswith("blocks.") or name.split(".")[1] in numbers}
    if not found:
        raise SettingError(f"{wanted!r} selects no hook point in layers {layers}; name at least one.")
    return [name for name in known if name in found]
