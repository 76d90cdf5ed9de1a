"""Records the sinks of every step during a run.

A `Record` specifies what to record and where; `SinkRecorder` records it through PyTorch hooks on the hook points, so it
sees values after edits by hooks and trace blocks. At the end of a step its variables move to a store: main memory, or a
Zarr store on disk that grows by one chunk per step.

In an autoregressive run with a key/value cache, a step computes only new positions; the values that a quantity keeps
for earlier positions are carried over, and the recorded values equal those of a run without a cache.

A model with an encoder computes the canvas of the step, and its queries see the cached keys in reach and the canvas.
Values are recorded at the positions of the text that they belong to; all others are NaN.

Under a cache policy a pass computes one window for all rows. Values, maps and medians cover the positions that a row's
own plan computes; all others are NaN, so that a record does not depend on the other rows of the batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, SinklensError
from sinklens.hooks.names import covers_all_columns, position_axis
from sinklens.hooks.sampled_sums import QuerySample
from sinklens.sinks.quantities import Quantity, Scores
from sinklens.sinks.record import Place, Record
from sinklens.sinks.stores import MemoryStore, Store, ZarrStore

if TYPE_CHECKING:
    from sinklens.hooks.held_keys import HeldKeys
    from sinklens.hooks.points import Point
    from sinklens.hooks.tree import HookTree


class SinkRecorder:
    """Collects the variables of a step layer by layer and passes them to a store when the step ends.

    Args:
        more: further variables that come with the canvases of each step, and their axes after batch and step.
        partial: whether a cache policy limits a step to some positions.
        row_keys: one number per prompt, which seeds the draws of estimated scores.

    Attributes:
        patterns: recorded complete patterns by (step, layer): [batch, head, query, key].
        store: where finished steps are kept.
        latest: the variables of the step that ended last, [batch, ...]; empty before the first.
    """

    def __init__(
        self,
        record: Record,
        tree: "HookTree",
        real: Bool[Tensor, "batch pos"],
        steps: int,
        more: Mapping[str, tuple[str, ...]] | None = None,
        partial: bool = False,
        row_keys: Sequence[int] = (),
    ) -> None:
        self._tree, self._real, self._rows = tree, real, real.shape[0]
        self._sample = None if record.exact else _sample(tree, row_keys)
        self._queries = None if record.queries is None else _chosen_queries(record.queries, tree, real, partial)
        quantities, layers = record.chosen(self._sample), tree.cfg.n_layers
        _refuse_comparison(quantities, tree, partial)
        self._points = [  # resolved now, so a wrong name fails before the run
            (part, layer, tree.resolve(f"blocks.{layer}.{part.point}"))
            for layer in range(layers)
            for part in quantities
        ]
        self._wanted = {_within(place, steps, layers) for place in record.patterns}
        self.patterns: dict[Place, Float[Tensor, "batch head query key"]] = {}
        self.latest: dict[str, np.ndarray] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._places: dict[tuple[str, int], range] = {}
        self._computed: dict[tuple[str, int], Tensor] = {}  # under a policy, at points of the window
        self._before: dict[tuple[str, int], Tensor] = {}
        self._compared: dict[tuple[str, int], Tensor] = {}
        self._rows_of: dict[int, Tensor] = {}
        self._watching: list[Any] = []
        axes = {name: ("layer", *tail) for part in quantities for name, tail in part.variables.items()}
        axes |= dict(more or {}) | ({} if self._queries is None else {"computed": ("pos",)})
        self.store: Store = MemoryStore(axes)
        if record.to is not None:
            self.store = ZarrStore(record.to, axes, steps, record.dtype, record.overwrite)

    @property
    def wants_patterns(self) -> bool:
        """Whether attention patterns are recorded."""
        return bool(self._wanted)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the recorder's hooks to the tree's points."""
        handles = []
        self._tree.watch.sample = self._sample
        try:
            for part, layer, name in self._points:
                point: Point = self._tree.hook_dict[name]  # type: ignore[assignment]
                handles.append(after(point, self._keeper(part, layer, name)))
            yield
        except BaseException:
            with suppress(SinklensError):  # report the error that ended the run
                self.store.flush()
            raise
        finally:
            self._tree.watch.sample = self._tree.watch.queries = None
            for handle in [*handles, *self._watching]:
                handle.remove()
            self._watching.clear()

    def _keeper(self, quantity: Quantity, layer: int, name: str) -> Callable[[Tensor], None]:
        axis, complete = -1 if quantity.of_keys else position_axis(name), covers_all_columns(name)

        def keep(value: Tensor) -> None:
            if self._tree.watch.length is not None:  # the pass covers the last positions of a text of this length
                length = self._tree.watch.length
                self._places[quantity.name, layer] = range(length - value.shape[axis], length)
            elif (held := self._tree.watch.held) is not None:
                window = slice(0, value.shape[axis]) if complete else held.window
                self._places[quantity.name, layer] = range(window.start, window.stop)
                if not complete:
                    self._computed[quantity.name, layer] = held.computed
            self._kept[quantity.name, layer] = quantity.keep(value[: self._rows])

        return keep

    def begin_step(self, step: int) -> None:
        """Choose the step's queries and watch its patterns; with a cache, later patterns need rows of earlier steps.

        Raises:
            SettingError: the record names no queries for this step.
        """
        if self._queries is not None:
            if step >= self._queries.shape[1]:
                raise SettingError(f"Record(queries=...) has {step} steps, and the run goes on; give queries for more.")
            self._tree.watch.queries = self._queries[:, step]
        causal = self._tree.causal
        for layer in sorted({layer for at, layer in self._wanted if at == step or (causal and at > step)}):
            point: Point = self._tree.hook_dict[f"blocks.{layer}.attn.hook_pattern"]  # type: ignore[assignment]

            def keep(value: Tensor, layer: int = layer) -> None:
                rows, held = value[: self._rows].detach().clone(), self._tree.watch.held
                self._rows_of[layer] = rows if held is None else _of_all_queries(rows, held)

            self._watching.append(after(point, keep))

    def end_step(self, step: int, first: int, canvases: dict[str, np.ndarray]) -> None:
        """Move the step's variables to the store.

        Args:
            first: first column that the pass computed; earlier keys were cached. In an autoregressive run the values
                are joined to those of the steps before; otherwise earlier columns are missing.
            canvases: ``token_id``, ``masked`` and ``committed`` of the step, [batch, pos], and the variables `more`.

        Raises:
            SettingError: a `Quantity` returned other variables than it declares.
        """
        for handle in self._watching:
            handle.remove()
        self._watching.clear()
        causal = self._tree.causal
        extends, first = causal and first > 0, 0 if causal else first
        variables: dict[str, list[Tensor]] = {}
        for part, layer, _ in self._points:
            for name, value in self._finished(part, layer, extends, first).items():
                variables.setdefault(name, []).append(value)
        for layer in range(self._tree.cfg.n_layers):
            self._keep_pattern(step, layer, extends)
        if not causal:
            self._before.clear()
        arrays = {  # layers may be on several devices
            name: torch.stack([value.to(layers[0].device) for value in layers], dim=1).cpu().numpy()
            for name, layers in variables.items()
        }
        if self._queries is not None:
            canvases = canvases | {"computed": self._queries[:, step].numpy()}
        self.latest = arrays | canvases
        self.store.append(self.latest)

    def _finished(self, part: Quantity, layer: int, extends: bool, first: int) -> dict[str, Tensor]:
        """The variables of one quantity in one layer, padded to the length of the canvas."""
        kept = self._kept.pop((part.name, layer))
        if extends and (part.name, layer) in self._before:
            kept = part.join(self._before[part.name, layer], kept)
        self._before[part.name, layer] = kept
        if part.compares:
            earlier, self._compared[part.name, layer] = self._compared.get((part.name, layer)), kept
            kept = part.since(earlier, kept)
        exists = self._before[Scores.name, layer].shape[-1]  # scores come first in every layer
        first = 0 if part.name == Scores.name else first  # scores are about keys, cached ones included
        place = self._places.pop((part.name, layer), range(first, exists))
        computed = self._computed.pop((part.name, layer), None)
        real = (self._real if computed is None else computed)[:, place.start : place.stop].to(kept.device)
        found = part.finish(kept, real, self._tree.cfg.n_heads)
        shapes = {name: ("batch", *axes) for name, axes in part.variables.items()}
        if {name: value.ndim for name, value in found.items()} != {name: len(axes) for name, axes in shapes.items()}:
            returned = {name: list(value.shape) for name, value in found.items()}
            raise SettingError(f"quantity {part.name!r} declares {shapes}, but its finish returned {returned}.")
        length = self._real.shape[1]
        return {
            name: _filled(value, shapes[name], place.start, length, None if computed is None else real)
            for name, value in found.items()
        }

    def _keep_pattern(self, step: int, layer: int, extends: bool) -> None:
        rows = self._rows_of.pop(layer, None)
        if rows is None:
            return
        before = self._before.get(("pattern", layer))
        if extends and before is not None:
            rows = torch.cat([torch.nn.functional.pad(before, (0, rows.shape[-1] - before.shape[-1])), rows], dim=2)
        self._before["pattern", layer] = rows
        if (step, layer) in self._wanted:
            self.patterns[step, layer] = rows.cpu()


def _of_all_queries(rows: Float[Tensor, "batch head window key"], held: "HeldKeys") -> Tensor:
    """The map of a window with one row per column, NaN for queries that the row's plan does not compute."""
    found = rows.new_full((*rows.shape[:2], rows.shape[3], rows.shape[3]), torch.nan)
    found[:, :, held.window] = rows
    return found.masked_fill(~held.computed.to(rows.device)[:, None, :, None], torch.nan)


def _sample(tree: "HookTree", row_keys: Sequence[int]) -> QuerySample:
    """What estimates the scores of a run.

    Raises:
        SettingError: the model is not bidirectional.
    """
    if tree.causal or tree.architecture.encoder or tree.attention_blocks is not None:
        raise SettingError("exact=False is for bidirectional models, whose passes compute every query; leave it out.")
    return QuerySample(row_keys)


def _chosen_queries(
    queries: Any, tree: "HookTree", real: Bool[Tensor, "batch pos"], partial: bool
) -> Bool[Tensor, "batch step pos"]:
    """The queries of `Record.queries` that are not padding.

    Raises:
        SettingError: they do not fit the run, or a step does not compute every query.
    """
    if partial or tree.causal or tree.architecture.encoder or tree.attention_blocks is not None:
        raise SettingError(
            "queries= is for bidirectional models without a cache policy, whose steps compute every query; leave it "
            "out."
        )
    chosen = queries.cpu() if isinstance(queries, Tensor) else torch.from_numpy(np.asarray(queries).copy())
    if (len(chosen), chosen.shape[2]) != tuple(real.shape):
        raise SettingError(
            f"queries has {len(chosen)} rows of {chosen.shape[2]} positions, this run {real.shape[0]} of "
            f"{real.shape[1]}; give those of a run of the same prompts and gen_length."
        )
    return chosen & real[:, None]


def _refuse_comparison(quantities: Sequence[Quantity], tree: "HookTree", partial: bool) -> None:
    """Refuse quantities that need queries, or positions of the step before, that a step may lack."""
    other = tree.causal or tree.architecture.encoder or tree.attention_blocks is not None
    for part in quantities:
        if part.compares and other:
            raise SettingError(
                f"quantity {part.name!r} compares the same positions in two steps; it is recorded for bidirectional "
                f"models."
            )
        lacking = partial and not covers_all_columns(tree.resolve(f"blocks.0.{part.point}"))
        if part.of_keys and lacking:
            raise SettingError(
                f"quantity {part.name!r} reads the queries of {part.point}, and under a cache policy a step has only "
                f"some of them; leave cache= out."
            )
        if part.compares and lacking:
            raise SettingError(
                f"quantity {part.name!r} compares the same positions in two steps, and under a cache policy a step has "
                f"only some of {part.point}; leave cache= out, or compare attn.hook_k or attn.hook_v, which have all."
            )


def after(point: "Point", function: Callable[[Tensor], None]) -> Any:
    """Call `function` with the output of `point`, after its TransformerLens hooks and nnsight's edits."""
    return point.register_forward_hook(lambda _module, _args, _kwargs, output: function(output), with_kwargs=True)


def _filled(
    value: Tensor, axes: tuple[str, ...], first: int, length: int, computed: Bool[Tensor, "batch window"] | None
) -> Tensor:
    """`value`, which begins at column `first`, with NaN, -1 (integers) or False up to the length of the canvas.

    Args:
        computed: positions of `value` to keep; None for all.
    """
    if value.is_floating_point():
        value, missing_value = value.float(), torch.nan
    else:
        missing_value = False if value.dtype is torch.bool else -1
    if "pos" not in axes:
        return value
    axis = axes.index("pos")
    last = value.movedim(axis, -1)
    if computed is not None:
        last = last.masked_fill(~computed.view(len(computed), *[1] * (last.ndim - 2), -1), missing_value)
    missing = (first, length - first - last.shape[-1])
    return torch.nn.functional.pad(last, missing, value=missing_value).movedim(-1, axis)


def _within(place: Place, steps: int, layers: int) -> Place:
    step, layer = place
    if not (-steps <= step < steps and -layers <= layer < layers):
        raise SettingError(
            f"patterns takes (step, layer) pairs; {place} is outside this run of {steps} steps and {layers} layers."
        )
    return step % steps, layer % layers


def step_canvases(
    entered: Int[Tensor, "batch pos"], before: Bool[Tensor, "batch pos"], after: Bool[Tensor, "batch pos"]
) -> dict[str, np.ndarray]:
    """``token_id``, ``masked`` and ``committed`` of a step.

    Args:
        entered: the canvas that the step worked on.
        before, after: the undecided positions before and after the step.
    """
    return {
        "token_id": entered.to(torch.int32).cpu().numpy(),
        "masked": before.cpu().numpy(),
        "committed": (before & ~after).cpu().numpy(),
    }
