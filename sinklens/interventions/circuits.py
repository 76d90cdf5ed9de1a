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
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.points import Point
from sinklens.interventions.paths import Changes, Receiver, Sender, named, receivers_of, refuse_indirect, senders_of
from sinklens.model import Model
from sinklens.runs.intervention import Intervention, Pairs, RunContext

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
        require(
            not unknown and {"sender", "receiver"} <= set(self.kept.dims) and self.kept.dtype == bool,
            f"kept must be boolean, over sender and receiver and perhaps step and pos; got {self.kept.dtype} over "
            f"{', '.join(map(str, self.kept.dims))}.",
        )

    def acting_steps(self, steps: int) -> list[int]:
        known = sorted(self.source) if "step" not in self.kept.dims else self.kept["step"].values.tolist()
        return [step for step in super().acting_steps(steps) if step in known]

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        refuse_indirect(model, "KeepEdges")
        steps = [0] if run.single else self.acting_steps(run.steps)
        if missing := [step for step in steps if step not in self.source]:
            raise SettingError(f"source holds steps {sorted(self.source)}, but not step {missing[0]}; record it.")
        senders, receivers = senders_of(model), receivers_of(model)
        cut = {step: _cut(self.kept, step, senders, receivers, model) for step in steps}
        changes = Changes(model, senders, receivers, cut.get)

        def new(value: Tensor, hook: Point) -> Tensor | None:
            step, name = int(hook.step or 0), str(hook.name)
            if step not in cut:
                return None
            new = self.source[step][name].to(value)
            require(
                new.shape[1:] == value.shape[1:] and len(new) in (1, len(value)),
                f"{name} has shape {list(new.shape)} in the source and {list(value.shape)} here; KeepEdges needs a "
                f"source of the same canvases, and passes over complete canvases, without a cache.",
            )
            return new

        return changes.around([(one.point, changes.sending(one, new)) for one in senders])


def _cut(
    kept: xr.DataArray, step: int, senders: Sequence[Sender], receivers: Sequence[Receiver], model: "Model"
) -> Bool[Tensor, "sender receiver #pos"]:
    """The edges that are not kept at a step."""
    named(senders, kept["sender"].values.tolist())
    named(receivers, kept["receiver"].values.tolist())
    now = kept.sel(step=step) if "step" in kept.dims else kept
    now = now.reindex(sender=[one.name for one in senders], receiver=[one.name for one in receivers], fill_value=False)
    now = now if "pos" in now.dims else now.expand_dims(pos=1)
    array = now.transpose("sender", "receiver", "pos").to_numpy().astype(bool)
    reaches = np.array([[one.depth < other.depth for other in receivers] for one in senders])
    return torch.from_numpy(~array & reaches[..., None]).to(model.cfg.device)
