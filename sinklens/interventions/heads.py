"""Interventions on single heads: their whole output, or only their attention to their sinks.

`AblateHeads` acts on ``hook_z``, before the output projection: behind it the heads are summed, and taking one head's
part out of the sum would leave its contribution in whatever was mixed before. `AblateSinkAttention` acts on
``hook_pattern`` and so makes the map explicit in the layers it is asked for.

One way this misleads: a zero is no typical output. Where a head's mean is large, setting it to zero moves the stream
away from anything the model has seen; compare with the mean and with resampled outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.base import Intervention, Pairs, Surroundings, layer_of, position_mask
from sinklens.interventions.selection import Scope, Selection

if TYPE_CHECKING:
    from sinklens.model import Model

POOL = 4096  # outputs per head that a reference keeps for resampling


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of every head over a reference set of prompts; made by `HeadOutputs.of`.

    Attributes:
        mean: over prompts, steps and real positions.
        pool: some of them, drawn at random, the same places for all heads of a layer.
    """

    mean: Float[Tensor, "layer head d_head"]
    pool: Float[Tensor, "layer sample head d_head"]

    @classmethod
    def of(cls, model: "Model", prompts: Sequence[str] | Tensor, seed: int = 0, **settings: Any) -> "HeadOutputs":
        """Run `model` on `prompts`, as `sinklens.generate` would, and collect ``hook_z`` of all layers and steps."""
        from sinklens.tracing import generate

        layers = model.cfg.n_layers
        kept: dict[int, list[Tensor]] = {layer: [] for layer in range(layers)}
        total: dict[int, Tensor] = {}
        count = dict.fromkeys(range(layers), 0)
        rng = torch.Generator().manual_seed(seed)
        real = model.encode(prompts)[1]

        def collect(value: Tensor, hook: Point) -> None:
            layer, missing = layer_of(hook), value.shape[1] - real.shape[1]
            mask = torch.nn.functional.pad(real, (0, max(0, missing)), value=True)[:, -value.shape[1] :]
            z = value[mask].detach().float().cpu()
            total[layer] = total.get(layer, torch.zeros(())) + z.sum(dim=0)
            count[layer] += len(z)
            kept[layer].append(z[torch.randperm(len(z), generator=rng)[: max(1, POOL // 64)]])

        generate(
            model, prompts, seed=seed, record_sinks=False, progress=False,
            hooks=[(f"blocks.{layer}.attn.hook_z", collect) for layer in range(layers)], **settings,
        )  # fmt: skip
        pools = [torch.cat(parts) for parts in kept.values()]
        drawn = torch.randperm(len(pools[0]), generator=rng)[:POOL]
        mean = torch.stack([total[layer] / count[layer] for layer in range(layers)])
        return cls(mean, torch.stack([pool[drawn % len(pool)] for pool in pools]))


@dataclass(frozen=True, kw_only=True)
class AblateHeads(Intervention):
    """Replace the output of heads, z = A·V, before the output projection.

    Attributes:
        by: "zero"; "mean", of the reference, or without one of the row's own positions (diffusion models only); or
            "resample", an output of the same head at a random place of the reference, drawn per position.
        reference: `HeadOutputs` of other prompts.
        seed: of resampling, which depends on it, the row's prompt, step and layer alone.
        positions: whose outputs are replaced.

    Raises:
        SettingError: an unknown way, or a reference that is needed and missing.
    """

    by: Literal["zero", "mean", "resample"] = "zero"
    reference: HeadOutputs | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in ("zero", "mean", "resample"):
            raise SettingError(f"by is 'zero', 'mean' or 'resample'; got {self.by!r}.")
        if self.by == "resample" and self.reference is None:
            raise SettingError("resampling needs reference=HeadOutputs.of(model, prompts).")

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        layers, heads, in_step = self.chosen_layers(model), self.chosen_heads(model), self.step_test(run)
        if self.by == "mean" and self.reference is None and bool(model.config.is_causal):
            raise SettingError(
                "the mean over a row's positions would tell a causal model of later ones; give "
                "reference=HeadOutputs.of(model, prompts)."
            )

        def ablate(value: Float[Tensor, "batch pos head d_head"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            put = self._replacement(value, layer_of(hook), run, hook.step)
            where = position_mask(self.positions, value.shape[1], value.device)[None, :, None, None]
            of = torch.zeros(value.shape[2], dtype=torch.bool, device=value.device)
            of[heads] = True
            return torch.where(where & of[:, None], put.to(value), value)

        return [(f"blocks.{layer}.attn.hook_z", ablate) for layer in layers]

    def _replacement(self, z: Tensor, layer: int, run: Surroundings | None, step: int | None) -> Tensor:
        if self.by == "zero":
            return torch.zeros_like(z)
        if self.reference is None:
            real = z.new_ones(z.shape[:2]) if run is None else run.real.to(z)
            weights = real / real.sum(dim=1, keepdim=True)
            return torch.einsum("bp,bphd->bhd", weights, z)[:, None].expand_as(z)
        if self.by == "mean":
            return self.reference.mean[layer].to(z).expand_as(z)
        pool = self.reference.pool[layer]
        rows = []
        for row in range(len(z)):
            key = 0 if run is None else run.row_keys[row]
            rng = np.random.default_rng([self.seed, key, 0 if step is None else step, layer])
            real = torch.ones(z.shape[1]).bool() if run is None else run.real[row, : z.shape[1]].cpu()
            drawn = torch.zeros(z.shape[1], dtype=torch.long)
            drawn[real] = torch.from_numpy(rng.integers(len(pool), size=int(real.sum())))
            rows.append(pool[drawn])
        return torch.stack(rows)


@dataclass(frozen=True, kw_only=True)
class AblateSinkAttention(Intervention):
    """Take a head's attention to its own sinks of this step away, without a second pass.

    The sinks are those of the pattern that the layer has just computed. (With a key/value cache that is the pattern of
    the new token.)

    Attributes:
        top_k: the strongest keys of each head.
        mass: "spread" hands what they received to the other keys, row by row, in proportion; "drop" lets it go, so
            that rows sum to less than 1.
        scope: as in `MaskSinks`, but "model" is not possible: later layers are not known yet.
        positions: queries whose attention is changed.
    """

    top_k: int = 1
    mass: Literal["spread", "drop"] = "spread"
    scope: Scope = "head"

    def __post_init__(self) -> None:
        if self.mass not in ("spread", "drop"):
            raise SettingError(f"mass is 'spread' or 'drop'; got {self.mass!r}.")
        if self.scope == "model":
            raise SettingError("scope='model' needs the scores of all layers; use MaskSinks(same_step=True).")
        Selection(self.top_k, None, "strongest", self.scope, (), 0)

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        layers, heads, in_step = self.chosen_layers(model), self.chosen_heads(model), self.step_test(run)
        selection = Selection(self.top_k, None, "strongest", self.scope, (), 0)

        def ablate(pattern: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            batch, _, queries, keys = pattern.shape
            real = pattern.new_ones(batch, keys).bool() if run is None else run.real[:, :keys]
            counted = pattern.float() * real[:, None, keys - queries :, None]
            scores = counted.sum(dim=2)
            found = selection.choose({layer_of(hook): scores}, real, run, None, hook.step or 0)[layer_of(hook)]
            of = torch.zeros(pattern.shape[1], dtype=torch.bool, device=pattern.device)
            of[heads] = True
            rows = position_mask(self.positions, keys, pattern.device)[keys - queries :]
            away = (found & of[:, None])[:, :, None] & rows[:, None]
            left = pattern.masked_fill(away, 0.0)
            if self.mass == "drop":
                return left
            sums = left.sum(dim=-1, keepdim=True)
            return torch.where(sums > 0, left * pattern.sum(dim=-1, keepdim=True) / sums.clamp(min=1e-30), left)

        return [(f"blocks.{layer}.attn.hook_pattern", ablate) for layer in layers]
