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

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, SinklensError, require
from sinklens.hooks.attention.layer_sums import LayerSums
from sinklens.hooks.forward_pass import MODES, ForwardPass
from sinklens.hooks.names import covers_all_columns, resolve
from sinklens.sinks.quantities import Quantity, Scores
from sinklens.sinks.record import Record, StepLayer
from sinklens.sinks.steps import ReducedSteps, Steps, StoredSteps

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.hooks.tree import HookTree

LATER: tuple[str, ...] = ("cuda",)  # kinds of devices whose steps are stored while the next pass is computed


class Kept(NamedTuple):
    """What a step keeps of a point of one layer.

    Attributes:
        value: the value, or what a quantity keeps of it.
        columns: the positions that it covers.
        computed: of these, the ones that a row's plan computes under a policy, or that are in the window of the pass;
            None for all.
    """

    value: Tensor
    columns: range
    computed: Bool[Tensor, "batch window"] | None


class SinkRecorder:
    """Collects the variables of a step layer by layer and passes them to a store when the step ends.

    Args:
        more: further variables that come with the canvases of each step, and their axes after batch and step.
        partial: whether a cache policy limits a step to some positions.
        causal: whether the run decodes from left to right.

    Attributes:
        patterns: recorded complete patterns by (step, layer): [batch, head, query, key].
        store: where finished steps are kept, the last one after `settle`.
    """

    def __init__(
        self,
        record: Record,
        tree: "HookTree",
        sums: LayerSums,
        real: Bool[Tensor, "batch pos"],
        steps: int,
        more: Mapping[str, tuple[str, ...]] | None = None,
        partial: bool = False,
        causal: bool = False,
    ) -> None:
        self._tree, self._real, self._rows, self._causal = tree, real, real.shape[0], causal
        self._queries = None if record.queries is None else _chosen_queries(record.queries, tree, real, partial)
        quantities, layers = record.chosen(), tree.cfg.n_layers
        for part in quantities if partial else ():
            if part.of_keys and not covers_all_columns(tree.resolve(f"blocks.0.{part.point}")):
                raise SettingError(
                    f"quantity {part.name!r} needs all positions of {part.point}, and under a cache policy a step has "
                    f"only some of them; leave cache= out."
                )
        known = tree.point_names()
        self._summed = [block.attn.hook_sink_scores for block in tree.blocks]
        self._points = [  # resolved now, so a wrong name fails before the run
            (part, layer, point.name or "")
            if isinstance(part, Scores)
            else (part, layer, resolve(f"blocks.{layer}.{part.point}", known, layers))
            for layer, point in enumerate(self._summed)
            for part in quantities
        ]
        self._sums = sums
        sums.layers |= set(range(layers))
        self._wanted = {_within(place, steps, layers) for place in record.patterns}
        self.patterns: dict[StepLayer, Float[Tensor, "batch head query key"]] = {}
        self._latest: dict[str, np.ndarray] = {}
        self._leaving: tuple[dict[str, Tensor], dict[str, np.ndarray], list[torch.cuda.Event]] | None = None
        self._kept: dict[tuple[str, int], Kept] = {}
        self._earlier: dict[tuple[str, int], Tensor] = {}  # of the step before, to join
        self._pinned: dict[str, Tensor] = {}
        self._watching = ExitStack()  # hooks that keep the patterns of a step
        axes = {name: ("layer", *tail) for part in quantities for name, tail in part.variables.items()}
        axes |= dict(more or {}) | ({} if self._queries is None else {"computed": ("pos",)})
        self.store = Steps(axes, steps)
        if record.reduce is not None:
            self.store = ReducedSteps(axes, steps, record.reduce)
        if record.out is not None:
            self.store = StoredSteps(record.out, axes, steps)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the recorder's hooks to the tree's points."""
        points = self._tree.hook_dict
        others = (entry for entry in self._points if not isinstance(entry[0], Scores))
        try:
            with reading((points[entry[2]], partial(self._keep, *entry)) for entry in others):
                yield
            self.settle()
        except BaseException:
            with suppress(SinklensError):  # report the error that ended the run
                self.settle()
                self.store.flush()
            raise
        finally:
            self._watching.close()

    def _keep(
        self, quantity: Quantity, layer: int, name: str, value: Tensor, described: ForwardPass | None = None
    ) -> None:
        """Keep what a quantity needs of a value of a pass: the one `described`, or the one that runs."""
        forward_pass = described or self._tree.watch.forward_pass
        columns = forward_pass.keys if quantity.of_keys else forward_pass.columns(name)
        planned = None if covers_all_columns(name) else forward_pass.computed  # its value covers all keys
        computed = forward_pass.decidable if forward_pass.fresh is None else planned
        computed = None if computed is None else computed[:, _slice(columns)]
        self._kept[quantity.name, layer] = Kept(quantity.keep(value[: self._rows]), columns, computed)

    def begin_step(self, step: int) -> None:
        """Choose the step's queries and watch its patterns; with a cache, later patterns need rows of earlier steps.

        Raises:
            SettingError: the record names no queries for this step.
        """
        if self._queries is not None:
            require(
                step < self._queries.shape[1],
                f"Record(queries=...) has {step} steps, and the run goes on; give queries for more.",
            )
            self._tree.watch.describe(counted=self._queries[:, step])
        for layer in sorted({layer for at, layer in self._wanted if at == step or (self._causal and at > step)}):
            point: Point = self._tree.hook_dict[f"blocks.{layer}.attn.hook_pattern"]  # type: ignore[assignment]

            def keep(value: Tensor, layer: int = layer) -> None:
                rows = _of_all_queries(value[: self._rows].detach(), self._tree.watch.forward_pass)
                self._kept["pattern", layer] = Kept(rows, range(rows.shape[2]), None)

            self._watching.callback(after(point, keep).remove)

    def end_step(self, step: int, canvases: dict[str, np.ndarray]) -> None:
        """Begin to move the step's variables to main memory, from which `settle` takes them to the store.

        In an autoregressive run with a cache, values are joined to those of the steps before.

        Args:
            canvases: ``token_id``, ``masked`` and ``committed`` of the step, [batch, pos], and the variables listed in
                `more`.

        Raises:
            SettingError: a `Quantity` returned other variables than it declares.
        """
        self._watching.close()
        variables: dict[str, list[Tensor]] = {}
        together = self._complete_scores()
        for part, layer, point in self._points:
            if isinstance(part, Scores):
                if together is not None:
                    continue
                self._keep(part, layer, point, *self._sums.latest[self._summed[layer]])
            for name, value in self._finished(part, layer).items():
                variables.setdefault(name, []).append(value)
        for layer in [layer for name, layer in self._kept if name == "pattern"]:
            self._keep_pattern(step, layer)
        found = {  # layers may be on several devices
            name: torch.stack([value.to(layers[0].device) for value in layers], dim=1)
            for name, layers in variables.items()
        }
        if together is not None:
            found["score"] = together
        if self._queries is not None:
            canvases = canvases | {"computed": self._queries[:, step].numpy()}
        self.settle()
        sent = {name: self._sent(name, value) for name, value in found.items()}
        self._leaving = (
            sent,
            canvases,
            [
                torch.cuda.current_stream(device).record_event()
                for device in {value.device for value in found.values() if value.is_cuda}
            ],
        )
        if not any(value.device.type in LATER for value in found.values()):
            self.settle()

    def _sent(self, name: str, value: Tensor) -> Tensor:
        """A copy in main memory; from a GPU in pinned memory, which its driver fills by itself, perhaps later."""
        if not value.is_cuda:
            return value.cpu()
        pinned = self._pinned.get(name)
        if pinned is None or (pinned.shape, pinned.dtype) != (value.shape, value.dtype):
            pinned = self._pinned[name] = torch.empty_like(value, device="cpu", pin_memory=True)
        return pinned.copy_(value, non_blocking=True)

    def settle(self) -> None:
        """Store the step that ended last, if it is not yet; called while a GPU computes the next one."""
        if self._leaving is None:
            return
        (sent, canvases, copied), self._leaving = self._leaving, None
        for event in copied:
            event.synchronize()
        self._latest = self.store.append({name: value.numpy() for name, value in sent.items()} | canvases)

    @property
    def latest(self) -> dict[str, np.ndarray]:
        """The variables of the step that ended last, [batch, ...]; empty before the first."""
        self.settle()
        return self._latest

    def _complete_scores(self) -> Float[Tensor, "batch layer head pos"] | None:
        """The scores of all layers, if each covers the complete canvas and one device has them; None if not."""
        whole, described = range(self._real.shape[1]), self._tree.watch.forward_pass
        if self._causal or described.fresh is not None or described.decidable is not None:
            return None
        found = [self._sums.latest[point] for point in self._summed]
        if any(one.forward_pass.keys != whole or one.scores.device != found[0].scores.device for one in found):
            return None
        return torch.stack([one.scores for one in found], dim=1)

    def _extends(self, what: tuple[str, int]) -> bool:
        """Whether the pass continues those of the steps before, which kept such a value."""
        return self._causal and self._tree.watch.forward_pass.queries.start > 0 and what in self._earlier

    def _finished(self, part: Quantity, layer: int) -> dict[str, Tensor]:
        """The variables of one quantity in one layer, padded to the length of the canvas."""
        kept, columns, computed = self._kept.pop((part.name, layer))
        if self._extends((part.name, layer)):
            kept, columns = part.join(self._earlier[part.name, layer], kept), range(columns.stop)
        if self._causal:
            self._earlier[part.name, layer] = kept
        real = (self._real[:, _slice(columns)] if computed is None else computed).to(kept.device)
        found = part.finish(kept, real, self._tree.cfg.n_heads)
        shapes = {name: ("batch", *axes) for name, axes in part.variables.items()}
        if {name: value.ndim for name, value in found.items()} != {name: len(axes) for name, axes in shapes.items()}:
            returned = {name: list(value.shape) for name, value in found.items()}
            raise SettingError(f"quantity {part.name!r} declares {shapes}, but its finish returned {returned}.")
        length = self._real.shape[1]
        return {
            name: _filled(value, shapes[name], columns.start, length, None if computed is None else real)
            for name, value in found.items()
        }

    def _keep_pattern(self, step: int, layer: int) -> None:
        rows = self._kept.pop(("pattern", layer)).value
        if self._extends(("pattern", layer)):
            before = self._earlier["pattern", layer]
            rows = torch.cat([torch.nn.functional.pad(before, (0, rows.shape[-1] - before.shape[-1])), rows], dim=2)
        if self._causal:
            self._earlier["pattern", layer] = rows
        if (step, layer) in self._wanted:
            self.patterns[step, layer] = rows.cpu()


def _slice(columns: range) -> slice:
    return slice(columns.start, columns.stop)


def _of_all_queries(rows: Float[Tensor, "batch head window key"], forward_pass: ForwardPass) -> Tensor:
    """A copy of a map; under a policy with one row per column, NaN for queries that the row's plan does not compute."""
    if forward_pass.computed is None:
        return rows.clone()
    found = rows.new_full((*rows.shape[:2], rows.shape[3], rows.shape[3]), torch.nan)
    found[:, :, _slice(forward_pass.queries)] = rows
    return found.masked_fill(~forward_pass.computed.to(rows.device)[:, None, :, None], torch.nan)


def _chosen_queries(
    queries: Any, tree: "HookTree", real: Bool[Tensor, "batch pos"], partial: bool
) -> Bool[Tensor, "batch step pos"]:
    """The queries of `Record.queries` that are not padding.

    Raises:
        SettingError: they do not fit the run, or a step does not compute every query.
    """
    bidirectional = not (tree.causal or tree.architecture.encoder or tree.attention_blocks or tree.changes_attention)
    require(
        bidirectional and not partial,
        "queries= is for bidirectional models without a cache policy, whose steps compute every query; leave it out.",
    )
    chosen = queries.cpu() if isinstance(queries, Tensor) else torch.from_numpy(np.asarray(queries).copy())
    if (len(chosen), chosen.shape[2]) != tuple(real.shape):
        raise SettingError(
            f"queries has {len(chosen)} rows of {chosen.shape[2]} positions, this run {real.shape[0]} of "
            f"{real.shape[1]}; give those of a run of the same prompts and gen_length."
        )
    return chosen & real[:, None]


@contextmanager
def reading(pairs: Iterable[tuple[Any, Callable[[Tensor], None]]]) -> Iterator[None]:
    """During the block, call functions with the outputs of their points; see `after`."""
    with ExitStack() as undo:
        for point, function in pairs:
            undo.callback(after(point, function).remove)
        yield


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


def _within(place: StepLayer, steps: int, layers: int) -> StepLayer:
    step, layer = place
    require(
        -steps <= step < steps and -layers <= layer < layers,
        f"patterns takes (step, layer) pairs; {place} is outside this run of {steps} steps and {layers} layers.",
    )
    return step % steps, layer % layers


def of_pass(tree: "HookTree", rows: int = 0) -> dict[str, np.ndarray]:
    """``mode``, an index into `MODES`, and ``block_start`` of a step's pass, in a model that changes its attention.

    ``block_start`` is -1 in a pass that fills no block.
    """
    if not tree.changes_attention:
        return {}
    described = tree.watch.forward_pass
    mode = -1 if described.mode is None else MODES.index(described.mode)
    start = -1 if described.block is None else described.block.start
    return {"mode": np.full(rows, mode, dtype=np.int8), "block_start": np.full(rows, start, dtype=np.int32)}


def step_canvases(
    entered: Int[Tensor, "batch pos"],
    before: Bool[Tensor, "batch pos"],
    after: Bool[Tensor, "batch pos"],
    active: Bool[Tensor, " batch"],
) -> dict[str, np.ndarray]:
    """``token_id``, ``masked``, ``committed`` and ``active`` of a step.

    Args:
        entered: the canvas that the step worked on.
        before, after: the undecided positions before and after the step.
        active: the rows that it worked on.
    """
    flags = torch.stack([before, before & ~after, active[:, None].expand_as(before)]).cpu().numpy()  # one copy
    return {
        "token_id": entered.to(torch.int32).cpu().numpy(),
        "masked": flags[0],
        "committed": flags[1],
        "active": flags[2, :, 0],
    }
