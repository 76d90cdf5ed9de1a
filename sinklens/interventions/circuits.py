"""Run a circuit alone: every edge outside it carries what its sender writes in another run.

An edge goes from a sender to a receiver, as in `PathPatch`. With C the edges of the circuit, every receiver reads

    x' = x + Σ_{(s, r) ∉ C} (o_s of the source − o_s here),

where x is the stream of this pass and o_s what the sender writes. Senders inside the circuit are those of *this* pass,
whose own inputs were changed in the same way, so the change travels along the circuit and nowhere else. With no edge
kept, the logits are those of the source.

Pitfall: the norm of a receiver is computed on x', so a missing edge also rescales what the kept edges carry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.paths import Receiver, ResidualStream, Sender, keeps, refuse_indirect
from sinklens.runs.intervention import Intervention, Pairs, RunContext

if TYPE_CHECKING:
    from sinklens.model import Model

AXES = ("step", "sender", "receiver", "pos")


@dataclass(frozen=True, kw_only=True)
class KeepEdges(Intervention):
    """Run the edges of a circuit alone, see the module; `Circuit.alone` makes it from a circuit.

    Attributes:
        kept: True at the edges of the circuit, over ``sender`` and ``receiver``, and where they differ also over
            ``step`` (only these steps are changed) and ``pos`` (columns of the canvas; the position at which the
            receiver reads). Edges that are not listed are not kept.
        source: as in `PatchHooks`, with ``hook_embed``, and ``hook_z`` and ``hook_mlp_out`` of all layers.
        steps: steps that are changed; by default those that `source` holds.

    Raises:
        SettingError: other axes, a label that does not exist, ``layers=``, ``heads=`` or ``positions=``, a step that
            `source` lacks, a pass over a part of the canvas, or a model with norms after its sublayers.
    """

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads", "positions")

    kept: xr.DataArray
    source: Mapping[int, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [axis for axis in self.kept.dims if axis not in AXES]
        if unknown or not {"sender", "receiver"} <= set(self.kept.dims) or self.kept.dtype != bool:
            raise SettingError(
                f"kept must be boolean, over sender and receiver and perhaps step and pos; got {self.kept.dtype} over "
                f"{', '.join(map(str, self.kept.dims))}."
            )

    def acting_steps(self, steps: int) -> list[int]:
        """See `Intervention.acting_steps`."""
        known = sorted(self.source) if "step" not in self.kept.dims else self.kept["step"].values.tolist()
        return [step for step in super().acting_steps(steps) if step in known]

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        refuse_indirect(model, "KeepEdges")
        steps = [0] if run.single else self.acting_steps(run.steps)
        missing = [step for step in steps if step not in self.source]
        if missing:
            raise SettingError(f"source holds steps {sorted(self.source)}, but not step {missing[0]}; record it.")
        senders, receivers = senders_of(model), receivers_of(model)
        cut = {step: _cut(self.kept, step, senders, receivers, model) for step in steps}
        return _Cut(model, senders, receivers, cut, self.source).pairs()


def senders_of(model: "Model") -> list[Sender]:
    """Every component that writes to the stream, in the order of the pass."""
    names = ["embed"]
    for layer in range(model.cfg.n_layers):
        names += [*(f"L{layer}H{head}" for head in range(model.cfg.n_heads)), f"{layer}_mlp_out"]
    return [Sender.named(name, model) for name in names]


def receivers_of(model: "Model") -> list[Receiver]:
    """Every component that reads the stream, in the order of the pass."""
    names = []
    for layer in range(model.cfg.n_layers):
        names += [f"L{layer}H{head}.q" for head in range(model.cfg.n_heads)]
        names += [f"L{layer}H{head}.{letter}" for letter in "kv" for head in range(model.cfg.n_key_value_heads)]
        names.append(f"{layer}_mlp_in")
    return [Receiver.named(name, model) for name in [*names, "logits"]]


def _cut(
    kept: xr.DataArray, step: int, senders: Sequence[Sender], receivers: Sequence[Receiver], model: "Model"
) -> Bool[Tensor, "sender receiver #pos"]:
    """The edges that are not kept at a step."""
    for name in kept["sender"].values.tolist():
        Sender.named(name, model)
    for name in kept["receiver"].values.tolist():
        Receiver.named(name, model)
    now = kept.sel(step=step) if "step" in kept.dims else kept
    now = now.reindex(sender=[one.name for one in senders], receiver=[one.name for one in receivers], fill_value=False)
    now = now if "pos" in now.dims else now.expand_dims(pos=1)
    array = now.transpose("sender", "receiver", "pos").to_numpy().astype(bool)
    reaches = np.array([[one.depth < other.depth for other in receivers] for one in senders])
    return torch.from_numpy(~array & reaches[..., None]).to(model.cfg.device)


class _Cut:
    """The hooks of one run: what senders write differently in the source, and receivers that read it."""

    def __init__(
        self, model: "Model", senders: Sequence[Sender], receivers: Sequence[Receiver],
        cut: Mapping[int, Bool[Tensor, "sender receiver #pos"]], source: Mapping[int, Any],
    ) -> None:  # fmt: skip
        self._model, self._senders, self._receivers = model, senders, receivers
        self._by_step, self._source = cut, source
        self._values: dict[str, Tensor] = {}
        self._changes: list[ResidualStream] = []
        self._stacked: Tensor | None = None

    def pairs(self) -> Pairs:
        """The hooks, each list in the order of the pass."""
        gates = [sender.gate for sender in self._senders if sender.gate]
        read = dict.fromkeys([*gates, *(name for one in self._receivers for name in one.reads)])
        pairs: Pairs = [(name, keeps(self._values)) for name in read]
        pairs += [(point, self._send) for point in dict.fromkeys(one.point for one in self._senders)]
        return pairs + [(point, self._receive) for point in dict.fromkeys(one.point for one in self._receivers)]

    def _send(self, value: Tensor, hook: Point) -> None:
        """Keep what the senders of a point write differently in the source."""
        step, name = int(hook.step or 0), str(hook.name)
        if step not in self._by_step:
            return
        if name == "hook_embed":
            self._changes = []
        new = self._source[step][name].to(value)
        if new.shape[1:] != value.shape[1:] or len(new) not in (1, len(value)):
            raise SettingError(
                f"{name} has shape {list(new.shape)} in the source and {list(value.shape)} here; KeepEdges needs a "
                f"source of the same canvases, and passes over complete canvases, without a cache."
            )
        for sender in self._senders:
            if sender.point == name:
                self._changes.append(sender.written(new - value, self._model, self._values))
        self._stacked = None

    def _receive(self, value: Tensor, hook: Point) -> Tensor | None:
        """The value of a point as its receivers have it without the edges that are cut."""
        step, changed = int(hook.step or 0), None
        if step not in self._by_step:
            return None
        count = len(self._changes)
        for number, receiver in enumerate(self._receivers):
            if receiver.point != str(hook.name):
                continue
            cut = self._by_step[step][:count, number]
            if bool(cut.any()):
                change = self._sum(cut)
                changed = receiver.changed(value if changed is None else changed, change, self._values, self._model)
        return changed

    def _sum(self, cut: Bool[Tensor, "sender #pos"]) -> ResidualStream:
        """The sum of the changes along the edges that are cut."""
        if self._stacked is None or len(self._stacked) != len(self._changes):
            self._stacked = torch.stack(self._changes)
        length = self._stacked.shape[2]
        if cut.shape[1] not in (1, length):
            raise SettingError(f"kept has {cut.shape[1]} positions, and the pass {length}; give one for each column.")
        return torch.einsum("sbpd,sp->bpd", self._stacked, cut.expand(-1, length).to(self._stacked))
