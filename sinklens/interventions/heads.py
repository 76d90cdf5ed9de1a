"""Interventions on the outputs of single heads, and of MLPs.

`AblateHeads` acts on ``hook_z``, before the output projection: after it the heads are summed and can no longer be
separated.

Pitfall: a zero is not a typical output. Where a head's mean is large, setting it to zero moves the stream away from
anything the model has seen; compare with the mean and with resampled outputs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.runs.intervention import Pairs, RunContext, layer_of
from sinklens.utils.arguments import Seed

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of every head on a reference set of prompts, collected by `sinklens.experiments.head_outputs`.

    Attributes:
        mean: mean over prompts, steps and real positions, each weighted by how often the passes of its row compute it.
        pool: a random sample of the outputs, taken at the same places for all heads of a layer.
    """

    mean: Float[Tensor, "layer head d_head"]
    pool: Float[Tensor, "layer sample head d_head"]


@dataclass(frozen=True, kw_only=True)
class AblateHeads(AtPositions):
    """Replace the output of heads, z = A·V, before the output projection.

    Attributes:
        by: "zero"; "mean", of the reference, or without one of the row's real positions (diffusion models only, in
            steps that compute the complete canvas); or "resample", an output of the same head at a random place of
            the reference, drawn per position.
        reference: `HeadOutputs` of other prompts.
        seed: seed of the resampling, which depends only on the seed, the row's prompt, the step (in a diffusion run),
            the layer and the position.
        positions, where: positions whose outputs are replaced.

    Raises:
        SettingError: an unknown `by`, or a missing reference. In a run: the mean without a reference in a step that
            computes a part of the canvas, under a cache policy or with cached blocks.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    by: Literal["zero", "mean", "resample"] = "zero"
    reference: HeadOutputs | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == "resample" and self.reference is None:
            raise SettingError("resampling needs reference=head_outputs(model, prompts).")
        if self.by == "zero" and self.reference is not None:
            raise SettingError("by='zero' does not use reference=; pass by='mean' or by='resample', or omit it.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if self.by == "mean" and self.reference is None and model.causal:
            raise SettingError(
                "the mean over a row's positions would leak later positions in a causal model; pass "
                "reference=head_outputs(model, prompts)."
            )

        sizes = (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head)
        if self.reference is not None and tuple(self.reference.mean.shape) != sizes:
            raise SettingError(
                f"reference is of a model with [layer, head, d_head] {list(self.reference.mean.shape)}, this one has "
                f"{list(sizes)}; compute it with head_outputs(model, prompts)."
            )

        def replacement(z: Float[Tensor, "batch pos head d_head"], hook: Point) -> Tensor:
            return self._replacement(z, hook, run)

        return self.edits(model, run, "attn.hook_z", replacement)

    def _replacement(self, z: Tensor, hook: Point, run: RunContext) -> Tensor:
        if self.by == "zero":
            return torch.zeros_like(z)
        if self.reference is None:
            real = _all_real(hook, z.shape[1]).to(z)
            weights = real / real.sum(dim=1, keepdim=True)
            return torch.einsum("bp,bphd->bhd", weights, z)[:, None].expand_as(z)
        if self.by == "mean":
            return self.reference.mean[layer_of(hook)].to(z).expand_as(z)
        pool = self.reference.pool[layer_of(hook)]
        return pool[self._drawn(len(pool), z, hook, run)]

    def _drawn(self, size: int, z: Tensor, hook: Point, run: RunContext) -> Int[Tensor, "batch pos"]:
        """A random number below `size` for each position; in an autoregressive run the same at every step."""
        batch, queries = z.shape[:2]
        real, first = hook.forward_pass.real.cpu(), hook.forward_pass.first(queries)
        drawn = torch.zeros(real.shape, dtype=torch.long)
        for row in range(batch):
            key, step = 0 if run.single else run.row_keys[row], 0 if run.causal else hook.step or 0
            rng = np.random.default_rng([self.seed, key, step, layer_of(hook)])
            drawn[row, real[row]] = torch.from_numpy(rng.integers(size, size=int(real[row].sum())))
        return drawn[:, first : first + queries]


@dataclass(frozen=True, kw_only=True)
class AblateMLPs(AtPositions):
    """Remove what MLPs add to the residual stream: their outputs become 0.

    Attributes:
        layers: layers whose MLPs are removed.
        positions, where: positions at which they are removed.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True
    acts_on: ClassVar[str] = "hook_mlp_out"
    refused: ClassVar[tuple[str, ...]] = ("heads",)

    def edit(self, value: Float[Tensor, "batch pos d_model"], hook: Point) -> Tensor:
        """Zeros."""
        return torch.zeros_like(value)


def _all_real(hook: Point, queries: int) -> Bool[Tensor, "batch pos"]:
    """The real positions of the canvas, if a pass computes all of them.

    Raises:
        SettingError: it does not.
    """
    real, computed = hook.forward_pass.real, hook.forward_pass.computed
    left = None if computed is None else real & ~computed.to(real.device)
    if queries < real.shape[1] or (left is not None and bool(left.any())):
        raise SettingError(
            f"by='mean' without reference= is the mean over all positions of a row, and step {hook.step} computes only "
            f"some of them; pass reference=head_outputs(model, prompts), or run without a cache."
        )
    return real
