"""Attribution patching: what patching every point would do, estimated from gradients instead of a pass each.

Put the value v of a point from a *clean* run into a *corrupted* one, and a metric m changes. To first order

    m(corrupted with v_clean) − m(corrupted) ≈ Σ (v_clean − v_corrupted) · ∂m/∂v,

with the gradient taken in the corrupted run (Nanda, "Attribution patching", 2023; Syed et al., 2310.10348).
`attribution_patching` computes the right side for all points at once, `patching_effects` the left side with a copy of
the run per layer, head and position, and `agreement` compares the two. All use a single pass; `of_step` returns the ids
of a denoising step. Effects are summed over features (d_model, d_head, d_mlp) and over the rows of a batch: each is the
change of the metric if that place is patched in all rows.

Pitfall: where the metric is nonlinear between the two runs, the estimate is inaccurate, and its sign may be wrong. A
model that copies a number does so with saturated attention, whose gradient carries no information about another number.
With ``ig_steps=`` the gradient is averaged between the two inputs; check both against `patching_effects`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks import names
from sinklens.hooks.modulation import Time, times_of
from sinklens.hooks.names import READ_ONLY, axes_of
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs.caches import chosen_points
from sinklens.runs.intervention import Pairs, within
from sinklens.sampling.key_cache import one_later
from sinklens.utils.arguments import Count, checked, read_as

LogitMetric = Callable[[Tensor], Tensor]
UNPATCHED = ("hook_attn_mask", *READ_ONLY, "hook_expert_indices")  # zeros, results, and numbers of experts
SUMMED = ("batch", "d_model", "d_cond", "d_head", "d_mlp", "1")  # axes over which effects are summed
EMBED = "hook_embed"
ORDER = ("layer", "head", "kv_head", "query", "pos", "key", "expert", "k")


@checked
def attribution_patching(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    names: Any,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    ig_steps: int = 0,
) -> xr.Dataset:
    """Estimate m(corrupted with v_clean) − m(corrupted) ≈ Σ (v_clean − v_corrupted) · ∂m/∂v for every point.

    Args:
        clean_ids: a prompt, as ids, text, or a tokenizer's output.
        corrupted_ids: another prompt of the same shape.
        metric: logits [batch, pos, vocab] (float32 or wider) -> a tensor with one number. As at
            ``denoise.hook_logits``, a diffusion model's logits at i are for the token at i (Dream's are shifted); an
            autoregressive model's are for the token at i + 1.
        names: points, in any accepted spelling, or a predicate on names. `hook_pattern` and `hook_attn_scores` switch
            their layers to explicit attention.
        attention_mask: False (or 0) on left padding, shared by both.
        time: noise level of both, a number or one for each row, for a network that reads it; that of a step is
            ``of_step(run, step).time``.
        ig_steps: 0 takes the gradient in the corrupted run; k > 0 the mean of k gradients, with the embeddings at
            corrupted + (i + ½)/k · (clean − corrupted), i = 0 … k − 1 (EAP-IG; Hanna et al., 2403.17806).

    Returns:
        One variable per kind of point, named as inside its block (``attn.hook_z``, ``hook_resid_post``), over
        ``layer``, ``head`` (or ``kv_head``) and ``pos`` (or ``query`` and ``key``), as far as the point has them; NaN
        at layers that were not requested. Attributes ``clean`` and ``corrupted`` are the metric in the two runs.

    Raises:
        PromptError: an invalid prompt or mask.
        SettingError: ids of different shapes, a metric that does not return one number or has no gradient, a point
            that cannot be patched, `ig_steps` below 0, or weights created under ``torch.inference_mode()``.
    """
    points, pair = _points(names, model), Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    slope: dict[str, Tensor] = {}
    with differentiable(model):
        clean, clean_logits = pair.values(pair.clean, {*points, EMBED})
        corrupted, corrupted_logits = pair.values(pair.corrupted, points)
        for mix in pair.between(clean[EMBED], ig_steps):
            for name, part in pair.gradients(metric, points, mix).items():
                slope[name] = slope.get(name, 0.0) + wide(part) / max(1, ig_steps)
        found = {}
        for name in points:
            new, old = wide(clean[name]), wide(corrupted[name])
            effect = torch.where(new == old, 0.0, new - old) * slope[name]  # two infinite scores differ by 0
            effect = effect.sum(dim=[axis for axis, kind in enumerate(axes_of(name)) if kind in SUMMED])
            found[name] = _array(name, effect, [range(size) for size in effect.shape])
        return _dataset(found, metric_value(metric, clean_logits), metric_value(metric, corrupted_logits))


@checked
@torch.no_grad()
def patching_effects(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    names: Any,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    heads: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    batch_size: Count = 32,
) -> xr.Dataset:
    """The true m(corrupted with v_clean) − m(corrupted), for each layer, head and position separately.

    Arguments, result and errors are those of `attribution_patching`; the metric needs no gradient. Patterns are
    patched weight by weight, [head, query, key].

    Args:
        heads: heads to patch (key/value heads where the point has those); None means all, here and below.
        positions: positions to patch; query positions for scores and patterns.
        batch_size: number of places patched in one pass, each in a copy of the batch.
    """
    pair = Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    kept, logits = pair.values(pair.clean, _points(names, model))
    clean, corrupted = metric_value(metric, logits), metric_value(metric, pair.values(pair.corrupted, [])[1])
    found = {}
    for name, value in kept.items():
        places = _places(name, value, heads, positions)
        cells = list(product(*places))
        parts = [cells[start : start + batch_size] for start in range(0, len(cells), batch_size)]
        effects = torch.cat([pair.patched(metric, name, value, part) for part in parts]) - corrupted
        found[name] = _array(name, effects.view([len(numbers) for numbers in places]), places)
    return _dataset(found, clean, corrupted)


class Agreement(NamedTuple):
    """Agreement of an estimate with the truth, over the places of one kind of point.

    Attributes:
        correlation: Pearson's r; NaN where one of the two is constant.
        relative_error: |estimate − truth| / |truth|, Euclidean norms; NaN where the truth is 0.
        places: number of places compared.
        rank_correlation: Spearman's ρ; NaN where one of the two is constant.
    """

    correlation: float
    relative_error: float
    places: int
    rank_correlation: float = np.nan


@checked
def agreement(estimate: xr.Dataset, truth: xr.Dataset) -> dict[str, Agreement]:
    """Compare an estimate with the truth at common places, by variable.

    Args:
        estimate: from `attribution_patching`, or `edge_attribution`.
        truth: from `patching_effects`, or `path_patching_effects`.
    """
    from scipy import stats

    found = {}
    for name in [name for name in estimate if name in truth]:
        both = np.stack([np.ravel(part) for part in xr.align(estimate[name], truth[name], join="inner")])
        estimated, true = both[:, np.isfinite(both).all(axis=0)].astype(float)
        varies = len(estimated) > 1 and min(np.ptp(estimated), np.ptp(true)) > 0
        size, error = np.linalg.norm(true), np.linalg.norm(estimated - true)
        kinds = [(estimated, true), (stats.rankdata(estimated), stats.rankdata(true))]
        linear, ranked = (float(np.corrcoef(*kind)[0, 1]) if varies else np.nan for kind in kinds)
        found[str(name)] = Agreement(linear, float(error / size) if size else np.nan, len(estimated), ranked)
    return found


class Pair(NamedTuple):
    """A clean and a corrupted pass of one model; `time` is the noise level of each row of both."""

    model: "Model"
    clean: Tensor
    corrupted: Tensor
    real: Tensor
    time: Float[Tensor, " batch"] | None = None

    @classmethod
    def of(cls, model: "Model", clean: Prompt, corrupted: Prompt, mask: Tensor | None, time: Time = None) -> "Pair":
        """The pair on the model's device, of one shape."""
        first, second = (model.reader.read(prompt, mask=mask) for prompt in (clean, corrupted))
        require(
            first.ids.shape == second.ids.shape and torch.equal(first.real, second.real),
            f"clean and corrupted ids must have the same shape and padding; got {list(first.ids.shape)} and "
            f"{list(second.ids.shape)}. Choose words with the same number of tokens, so that positions correspond.",
        )
        return cls(
            model, first.ids, second.ids, first.real, times_of(model.tree, time, len(first.ids), first.ids.device)
        )

    def hidden(self, ids: Tensor, pairs: Pairs, copies: int = 1) -> Float[Tensor, "batch pos d_model"]:
        """The final norm's output of one pass under hooks."""
        time = None if self.time is None else self.time.repeat(copies)
        with self.model.tree.hooks(fwd_hooks=[*pairs]):
            return self.model.tree.hidden(ids.repeat(copies, 1), self.real.repeat(copies, 1), time=time)

    def logits(self, hidden: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos vocab"]:
        """The logits that the metric receives."""
        if self.model.family_record.shift:  # as State.logits
            hidden = one_later(hidden, self.real.repeat(len(hidden) // len(self.real), 1))
        return wide(self.model.tree.head(hidden))

    def values(
        self, ids: Tensor, points: Iterable[str], before: Sequence[tuple[str, Any]] = (), leaves: bool = False
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Values of `points`, as copies or graph leaves, and logits of a pass under the hooks `before`."""
        values: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Point) -> Tensor | None:
            if not leaves:
                values[str(hook.name)] = value.clone()
                return None
            return values.setdefault(str(hook.name), value if value.requires_grad else value.detach().requires_grad_())

        return values, self.logits(self.hidden(ids, [*before, *((name, keep) for name in points)]))

    def between(self, clean: Tensor, ig_steps: int) -> list[Pairs]:
        """For each gradient of a mean along the path, the hook that mixes the embeddings; without a path no hook.

        Raises:
            SettingError: `ig_steps` is below 0.
        """
        shares = [(number + 0.5) / ig_steps for number in range(read_as(Annotated[int, Ge(0)], "ig_steps", ig_steps))]
        return [[(EMBED, lambda value, hook, share=share: torch.lerp(value, clean, share))] for share in shares] or [[]]

    def gradients(self, metric: LogitMetric, points: Sequence[str], before: Pairs) -> dict[str, Tensor]:
        """∂m/∂v at every point of the corrupted pass under the hooks `before`."""
        with torch.enable_grad():
            leaves, logits = self.values(self.corrupted, points, before, leaves=True)
            number = metric_value(metric, logits)
            require(
                number.requires_grad,
                "the metric has no gradient; compute it from the logits with torch operations only.",
            )
            found = torch.autograd.grad(number, [leaves[name] for name in points], materialize_grads=True)
        return dict(zip(points, found, strict=True))

    def patched(
        self, metric: LogitMetric, name: str, new: Tensor, cells: Sequence[Sequence[int]]
    ) -> Float[Tensor, " cell"]:
        """The metric with `new` patched in at each of `cells`, each in its copy of the corrupted batch."""
        sizes = [1 if kind in SUMMED else size for kind, size in zip(axes_of(name), new.shape, strict=True)]
        here = torch.zeros(len(cells), *sizes[1:], dtype=torch.bool, device=new.device)
        for copy, cell in zip(here, cells, strict=True):
            copy[tuple(cell)] = True  # features, which are last, are summed
        here, repeated = here.repeat_interleave(len(new), dim=0), torch.cat([new] * len(cells))
        patch: Pairs = [(name, lambda value, hook: torch.where(here, repeated, value))]
        hidden = self.hidden(self.corrupted, patch, copies=len(cells))
        return torch.stack([metric_value(metric, self.logits(copy)) for copy in hidden.split(len(new))])


@contextmanager
def differentiable(model: "Model") -> Iterator[None]:
    """Enable gradients of activations and disable those of weights; afterwards restore the weights' setting."""
    weights = [*model.tree.hf.parameters(), *model.tree.hf.buffers()]
    require(
        not any(weight.is_inference() for weight in weights),
        f"{model.name} was created under torch.inference_mode(), so it has no gradients; load it outside.",
    )
    trainable = [weight for weight in weights if weight.requires_grad]
    try:
        for weight in trainable:
            weight.requires_grad_(False)
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for weight in trainable:
            weight.requires_grad_(True)


def _points(wanted: Any, model: "Model") -> list[str]:
    points = chosen_points(wanted, model, None)
    for name in points:
        require(
            not name.startswith("denoise.") and not name.endswith(UNPATCHED),
            f"{name} cannot be patched from one pass into another; leave it out.",
        )
    return points


def wide(value: Tensor) -> Tensor:
    """Cast to float32, unless already wider."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def metric_value(metric: LogitMetric, logits: Float[Tensor, "batch pos vocab"]) -> Tensor:
    value = metric(logits)
    require(
        isinstance(value, Tensor) and value.numel() == 1,
        f"a metric must map logits [batch, pos, vocab] to a tensor with one number; got {type(value).__name__} "
        f"of shape {list(getattr(value, 'shape', []))}.",
    )
    return value.reshape(())


def _places(
    name: str, value: Tensor, heads: Sequence[int] | None, positions: Sequence[int] | None
) -> list[Sequence[int]]:
    """The indices to patch along each axis of an effect."""
    axes = axes_of(name)
    requested = {"head": heads, "kv_head": heads, axes[names.position_axis(name)]: positions}
    return [
        within("head" if "head" in axis else "position", requested.get(axis), size)
        for axis, size in zip(axes, value.shape, strict=True)
        if axis not in SUMMED
    ]


def _array(name: str, values: Tensor, places: Sequence[Sequence[int]]) -> xr.DataArray:
    axes = [axis for axis in axes_of(name) if axis not in SUMMED]
    return xr.DataArray(values.cpu().numpy(), [(axis, list(n)) for axis, n in zip(axes, places, strict=True)])


def _dataset(found: dict[str, xr.DataArray], clean: Tensor, corrupted: Tensor) -> xr.Dataset:
    """Merge points of one kind into one variable, by layer."""
    kinds: dict[str, list[xr.DataArray]] = {}
    for name, array in found.items():
        parts = name.split(".", 2) if name.startswith("blocks.") else ("", "", name)
        kinds.setdefault(parts[2], []).append(array.assign_coords(layer=int(parts[1])) if parts[1] else array)
    merged = {
        kind: xr.concat(parts, "layer") if "layer" in parts[0].coords else parts[0] for kind, parts in kinds.items()
    }
    ordered = [array.transpose(*ORDER, missing_dims="ignore").rename(kind) for kind, array in merged.items()]
    return xr.merge(ordered, join="outer").assign_attrs(clean=clean.item(), corrupted=corrupted.item())
