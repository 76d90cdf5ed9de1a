"""Values of hook points kept by step, as TransformerLens `ActivationCache` objects.

Limitation: a cache keeps a copy of every value on the device; a complete run of a large model does not fit in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from sinklens.errors import require
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.hooks.spellings import HookCache
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, Reader, RunContext, within


@dataclass(eq=False)
class Activations(Reader):
    """Keeps values of a run and changes none: ``kept = Activations(names=[...]); generate(..., hooks=[kept])``.

    List it last to see the edits of other hooks. After the run ``kept.caches[step]`` is an `ActivationCache`; a second
    run replaces it. In a single pass everything is kept as step 0.

    Attributes:
        names: points, in any accepted spelling, or a predicate on names; `layers` restricts those inside a block.
        caches: the values kept from the last run; steps that did not run are missing.
    """

    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads", "positions")

    names: Sequence[str] | Any
    caches: dict[int, "HookCache"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        from sinklens.hooks.spellings import HookCache

        in_step = self.step_test(run)
        caches: dict[int, HookCache] = {}  # a new one: the old one may be the source of a patch in this run
        self.caches = caches

        def keep(value: Tensor, hook: Point) -> None:
            if not in_step(hook.step):
                return
            new, name = HookCache({}, model.tree, real=None if run.single else run.real), str(hook.name)
            cache = caches.setdefault(hook.step or 0, new)
            cache.cache_dict[name] = value.detach().clone()
            cache.has_embed, cache.has_pos_embed = (one in cache.cache_dict for one in ("hook_embed", "hook_pos_embed"))
            if (window := _window(hook)) is not None:
                cache.windows[name] = window

        return [(name, keep) for name in chosen_points(self.names, model, self.layers)]


def _window(point: Point) -> range | None:
    """The columns of a value, where a pass of a diffusion run computes some of them; None for all."""
    name, forward_pass = str(point.name), point.forward_pass
    if forward_pass.mode == "causal" or name.startswith("denoise.") or {"pos", "query"}.isdisjoint(names.axes_of(name)):
        return None
    columns, every = forward_pass.columns(name), range(forward_pass.keys.stop)
    planned = forward_pass.fresh is not None and not names.covers_all_columns(name)
    return columns if planned or columns != every else None


def require_columns(cache: Any, name: str, step: int, columns: range) -> None:
    """Refuse a cached value of a pass that computed other columns than `columns` of `step`.

    Raises:
        SettingError: it belongs to other columns.
    """
    there = getattr(cache, "windows", {}).get(name, columns)
    require(
        there == columns,
        f"source has positions {there.start} to {there.stop - 1} of {name}, and step {step} computes "
        f"{columns.start} to {columns.stop - 1}: the source run computed only part of it. Record the source in a run "
        f"without cache= (or use_cache=True), or patch steps that compute the same positions.",
    )


def chosen_points(wanted: Any, model: "Model", layers: Sequence[int] | None) -> list[str]:
    """Points selected by a name, a list of names or a predicate; of points inside blocks, only those in `layers`.

    Raises:
        HookNameError: a name is unknown, or a predicate matches nothing.
        SettingError: a layer does not exist, or no point is left.
    """
    found = model.tree.select(wanted)
    if layers is not None:
        numbers = {str(layer) for layer in within("layer", layers, model.cfg.n_layers)}
        found = [name for name in found if not name.startswith("blocks.") or name.split(".")[1] in numbers]
    require(found, f"{wanted!r} selects no hook point in layers {layers}; name at least one.")
    return found
