"""Interventions on single heads: their complete output, or only their attention to their sinks; and on MLPs.

`AblateHeads` acts on ``hook_z``, before the output projection: after it the heads are summed and can no longer be
separated. `AblateSinkAttention` acts on ``hook_pattern``, so the layers it changes use explicit attention.

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
from sinklens.interventions.controls import Pick
from sinklens.interventions.places import AtPositions
from sinklens.interventions.selection import Scope, Selection
from sinklens.runs.control_keys import ControlCount
from sinklens.runs.intervention import Pairs, RunContext, layer_of, refuse, refuse_empty
from sinklens.utils.integers import check_seed_of

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
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_empty(self)
        if self.by not in ("zero", "mean", "resample"):
            raise SettingError(f"by must be 'zero', 'mean' or 'resample'; got {self.by!r}.")
        if not isinstance(self.reference, HeadOutputs | None):
            raise SettingError(f"reference must be what head_outputs(model, prompts) returns; got {self.reference!r}.")
        if self.by == "resample" and self.reference is None:
            raise SettingError("resampling needs reference=head_outputs(model, prompts).")
        if self.by == "zero" and self.reference is not None:
            raise SettingError("by='zero' does not use reference=; pass by='mean' or by='resample', or omit it.")
        check_seed_of(self)

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

    def __post_init__(self) -> None:
        refuse_empty(self)
        refuse(self, "heads")

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


@dataclass(frozen=True, kw_only=True)
class AblateSinkAttention(AtPositions):
    """Remove a head's attention to its sinks of the current step, without a second pass.

    The sinks are those of the pattern that the layer has just computed: in an autoregressive run, those of the prompt
    for the prompt, and for each later token the keys that it attends to most itself.

    Attributes:
        top_k: number of keys per head: the strongest, those with the largest column sums.
        mass: "spread" redistributes their attention over the other keys, row by row, in proportion; "drop" discards it,
            so that rows sum to less than 1.
        scope: as in `MaskSinks`, except "model", since later layers have not been computed yet.
        pick: "strongest"; or other keys of the same heads as a control, as in `MaskSinks` (except "same_kind", which
            needs the tokens of an earlier step).
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
        positions, where: queries whose attention is changed.
    """

    within_step: ClassVar[bool] = True

    top_k: int = 1
    mass: Literal["spread", "drop"] = "spread"
    scope: Scope = "head"
    pick: Pick = "strongest"
    seed: int = 0

    @property
    def selection(self) -> Selection:
        """How keys are chosen."""
        return Selection(top_k=self.top_k, pick=self.pick, scope=self.scope, seed=self.seed)

    def __post_init__(self) -> None:
        refuse_empty(self)
        if self.mass not in ("spread", "drop"):
            raise SettingError(f"mass must be 'spread' or 'drop'; got {self.mass!r}.")
        if self.scope == "model":
            raise SettingError("scope='model' needs the scores of all layers; use MaskSinks(same_step=True).")
        if self.pick == "same_kind":
            raise SettingError("pick='same_kind' needs the tokens of the step; use MaskSinks(same_step=True).")
        _ = self.selection

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        counted = self.selection.count_in(run, type(self).__name__)
        heads = self.chosen_heads(model)

        def removed(pattern: Float[Tensor, "batch head query key"], hook: Point) -> Tensor:
            sinks = self._sinks(pattern, hook, run, counted, heads)
            left = pattern.masked_fill(sinks, 0.0)
            if self.mass == "drop":
                return left
            sums = left.sum(dim=-1, keepdim=True)
            spread = left * pattern.sum(dim=-1, keepdim=True) / sums.clamp(min=1e-30)
            return torch.where(sinks.any(dim=-1, keepdim=True) & (sums > 0), spread, left)

        return self.edits(model, run, "attn.hook_pattern", removed)

    def _sinks(
        self, pattern: Float[Tensor, "batch head query key"], hook: Point, run: RunContext,
        counted: ControlCount | None, heads: list[int],
    ) -> Bool[Tensor, "batch head query key"]:  # fmt: skip
        """The keys whose attention is removed from each query."""
        queries, keys = pattern.shape[2:]
        real, layer, step = hook.forward_pass.real[:, :keys].to(pattern.device), layer_of(hook), hook.step or 0
        found = torch.zeros_like(pattern, dtype=torch.bool)
        for part in hook.forward_pass.spans(queries):
            rows, end = slice(part.start, part.stop), keys - queries + part.stop  # later keys do not exist yet
            real_queries = real[:, keys - queries :][:, rows]
            scores = (pattern[:, :, rows, :end].float() * real_queries[:, None, :, None]).sum(dim=2)
            chosen = self.selection.choose(
                {layer: scores}, real[:, :end], None if run.single else run, None, part.step,
                counted=counted if part.step == step else None, heads=heads,
            )  # fmt: skip
            found[:, :, rows, :end] = chosen[layer][:, :, None]
        return found
