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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.base import Canvas, Intervention, Pairs, Part, Queries, Surroundings, layer_of
from sinklens.interventions.selection import Scope, Selection

if TYPE_CHECKING:
    from sinklens.model import Model

POOL = 4096  # outputs per head that a reference keeps for resampling


@dataclass(frozen=True)
class HeadOutputs:
    """Outputs of every head over a reference set of prompts; made by `HeadOutputs.of`.

    Attributes:
        mean: over prompts, steps and real positions, each as often as a pass of the row's own run holds it.
        pool: some of them, drawn at random, the same places for all heads of a layer.
    """

    mean: Float[Tensor, "layer head d_head"]
    pool: Float[Tensor, "layer sample head d_head"]

    @classmethod
    def of(cls, model: "Model", prompts: Sequence[str] | Tensor, seed: int = 0, **settings: Any) -> "HeadOutputs":
        """Run `model` on `prompts`, as `sinklens.generate` would, and collect ``hook_z`` of all layers and steps.

        Every pass of a row's own run counts: an autoregressive run with a key/value cache sees each position once, a
        diffusion run at every step. Passes in which a row waits for others of its batch, because it has ended or has
        nothing left to decide, do not count.
        """
        from sinklens.tracing import generate

        seen = _Collected(model, model.encode(prompts, settings.get("chat_template", False))[1], seed)
        generate(model, prompts, seed=seed, record_sinks=False, progress=False, hooks=seen.pairs(), **settings)
        return cls(seen.mean(), seen.pool())


class _Collected:
    """The outputs of every head, step by step, of the rows that work at the step."""

    def __init__(self, model: "Model", real: Bool[Tensor, "batch pos"], seed: int) -> None:
        layers = range(model.cfg.n_layers)
        self._model, self._real, self._rng = model, real, torch.Generator().manual_seed(seed)
        self._canvas = Canvas()
        self._pass: dict[int, Tensor] = {}
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._total = {layer: torch.zeros(()) for layer in layers}
        self._count = dict.fromkeys(layers, 0)

    def pairs(self) -> Pairs:
        """The hooks that collect."""
        points = [(f"blocks.{layer}.attn.hook_z", self._hold) for layer in self._kept]
        return [("denoise.hook_canvas", self._canvas.hook), *points, ("denoise.hook_confidence", self._take)]

    def _hold(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._pass[layer_of(hook)] = value.detach()

    def _take(self, confidence: Float[Tensor, "batch pos"], hook: Point) -> None:
        """The step is decided: which rows worked at it is known."""
        working = self._working(confidence)
        for layer, value in self._pass.items():
            missing = value.shape[1] - self._real.shape[1]
            mask = torch.nn.functional.pad(self._real, (0, max(0, missing)), value=True)[:, -value.shape[1] :]
            z = value[mask & working[:, None]].float().cpu()
            self._total[layer] = self._total[layer] + z.sum(dim=0)
            self._count[layer] += len(z)
            self._kept[layer].append(z[torch.randperm(len(z), generator=self._rng)[: max(1, POOL // 64)]])
        self._pass.clear()

    def _working(self, confidence: Float[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows that have something to decide: in an autoregressive run, those without an end token."""
        if not bool(self._model.config.is_causal):
            return (confidence > -torch.inf).any(dim=1)
        assert self._canvas.ids is not None
        ids = self._canvas.ids[:, self._real.shape[1] :]
        ends = torch.tensor(self._model.eos_token_ids, dtype=ids.dtype, device=ids.device)
        return ~torch.isin(ids, ends).any(dim=1)

    def mean(self) -> Float[Tensor, "layer head d_head"]:
        """Over all that was taken."""
        return torch.stack([self._total[layer] / self._count[layer] for layer in self._kept])

    def pool(self) -> Float[Tensor, "layer sample head d_head"]:
        """Some of it, from the same places in all layers."""
        pools = [torch.cat(parts) for parts in self._kept.values()]
        drawn = torch.randperm(len(pools[0]), generator=self._rng)[:POOL]
        return torch.stack([pool[drawn % len(pool)] for pool in pools])


@dataclass(frozen=True, kw_only=True)
class AblateHeads(Intervention):
    """Replace the output of heads, z = A·V, before the output projection.

    Attributes:
        by: "zero"; "mean", of the reference, or without one of the row's own positions (diffusion models only); or
            "resample", an output of the same head at a random place of the reference, drawn per position.
        reference: `HeadOutputs` of other prompts.
        seed: of resampling, which depends on it, the row's prompt, step (in a diffusion run), layer and position alone.
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
        layers, heads, touched = self.chosen_layers(model), self.chosen_heads(model), Queries(self, run)
        if self.by == "mean" and self.reference is None and bool(model.config.is_causal):
            raise SettingError(
                "the mean over a row's positions would tell a causal model of later ones; give "
                "reference=HeadOutputs.of(model, prompts)."
            )

        sizes = (model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head)
        if self.reference is not None and tuple(self.reference.mean.shape) != sizes:
            raise SettingError(
                f"reference is of a model with [layer, head, d_head] {list(self.reference.mean.shape)}, this one has "
                f"{list(sizes)}; make it with HeadOutputs.of(model, prompts)."
            )

        def ablate(value: Float[Tensor, "batch pos head d_head"], hook: Point) -> Tensor | None:
            where = touched.of(hook.step, value.shape[1], value.device)
            if where is None:
                return None
            put = self._replacement(value, layer_of(hook), run, hook.step)
            of = torch.zeros(value.shape[2], dtype=torch.bool, device=value.device)
            of[heads] = True
            return torch.where(where[:, :, None, None] & of[:, None], put.to(value), value)

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
        places = self._drawn(len(self.reference.pool[layer]), z, layer, run, step or 0)
        return self.reference.pool[layer][places]

    def _drawn(self, size: int, z: Tensor, layer: int, run: Surroundings | None, step: int) -> Int[Tensor, "batch pos"]:
        """A random number below `size` for each position; in an autoregressive run the same at every step."""
        batch, queries = z.shape[:2]
        real = torch.ones(batch, queries, dtype=torch.bool) if run is None else run.real.cpu()
        first = 0 if run is None else run.first(step, queries)
        drawn = torch.zeros(real.shape, dtype=torch.long)
        for row in range(batch):
            key = 0 if run is None else run.row_keys[row]
            rng = np.random.default_rng([self.seed, key, 0 if run is None or run.causal else step, layer])
            drawn[row, real[row]] = torch.from_numpy(rng.integers(size, size=int(real[row].sum())))
        return drawn[:, first : first + queries]


@dataclass(frozen=True, kw_only=True)
class AblateSinkAttention(Intervention):
    """Take a head's attention to its own sinks of this step away, without a second pass.

    The sinks are those of the pattern that the layer has just computed: in an autoregressive run, those of the prompt
    for the prompt, and for each later token the keys that it attends to most itself.

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
        layers, heads, touched = self.chosen_layers(model), self.chosen_heads(model), Queries(self, run)

        def ablate(pattern: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            rows = touched.of(hook.step, pattern.shape[2], pattern.device)
            if rows is None:
                return None
            of = torch.zeros(pattern.shape[1], dtype=torch.bool, device=pattern.device)
            of[heads] = True
            away = (
                self._sinks(pattern, layer_of(hook), run, hook.step or 0) & of[:, None, None] & rows[:, None, :, None]
            )
            left = pattern.masked_fill(away, 0.0)
            if self.mass == "drop":
                return left
            sums = left.sum(dim=-1, keepdim=True)
            spread = left * pattern.sum(dim=-1, keepdim=True) / sums.clamp(min=1e-30)
            return torch.where(away.any(dim=-1, keepdim=True) & (sums > 0), spread, left)

        return [(f"blocks.{layer}.attn.hook_pattern", ablate) for layer in layers]

    def _sinks(
        self, pattern: Float[Tensor, "batch head query key"], layer: int, run: Surroundings | None, step: int
    ) -> Bool[Tensor, "batch head query key"]:
        """The keys that each query loses."""
        batch, _, queries, keys = pattern.shape
        selection = Selection(self.top_k, None, "strongest", self.scope, (), 0)
        real = pattern.new_ones(batch, keys).bool() if run is None else run.real[:, :keys].to(pattern.device)
        found = torch.zeros_like(pattern, dtype=torch.bool)
        for part in [Part(step, 0, queries)] if run is None else run.parts(step, queries):
            own = slice(part.start, part.stop)
            counted = real[:, keys - queries :][:, own]
            there = real & (torch.arange(keys, device=real.device) < keys - queries + part.stop)
            scores = (pattern[:, :, own].float() * counted[:, None, :, None]).sum(dim=2)
            found[:, :, own] = selection.choose({layer: scores}, there, run, None, step)[layer][:, :, None]
        return found
