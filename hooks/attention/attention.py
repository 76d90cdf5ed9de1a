"""The attention function that sinklens registers with transformers, under the name ``"sinklens"``.

transformers' attention modules pass in rotated queries, keys and values. The computation depends on which points are
watched:

- none: transformers' fused attention, unchanged;
- ``hook_attn_mask``: fused attention with the edited additive mask;
- ``hook_sink_scores``: fused attention and its log-sum-exp, from which the column sums follow (column_sums.py);
- ``hook_attn_scores`` or ``hook_pattern``: the map is formed explicitly, and edits of it take effect; if it is only
  read, the output is that of fused attention.

Padding is neither key nor query: its column and its row of the pattern are 0. A fused kernel computes another value for
a padding query, which no real position reads.

With a normalizer other than softmax (normalizers.py) the map is always explicit.

``hook_sink_scores`` describes the attention that was used, so it comes after the pattern. A trace block that already
waits for it when attention begins is served before the pattern instead, so both orders of reading work.

Caveat: a pattern comes from another kernel than the fused one; in float32 the two agree to about 1e-6, not bit for bit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinklens.errors import ReadOnlyHookError, require
from sinklens.hooks.attention import fused
from sinklens.hooks.attention.blocks import rule_of
from sinklens.hooks.attention.column_sums import column_sums, log_sum_exp
from sinklens.hooks.attention.layer_sums import Waiting
from sinklens.hooks.attention.masks import bias_of, known_bias
from sinklens.hooks.attention.normalizers import Normalizer, Visible, normalizer_of, softmax
from sinklens.hooks.points import at, read_at, writes

if TYPE_CHECKING:
    from sinklens.hooks.groups import AttentionPoints
    from sinklens.hooks.points import Point

NAME = "sinklens"
POINTS = "sinklens_points"  # key in the __dict__ of a module with armed points: not a submodule, or trees list it twice
TAPPED = "sinklens_tapped"  # key in the __dict__ of every attention module that has points


class Operands(NamedTuple):
    """Operands of one attention call; key and value heads are repeated to the query heads.

    Attributes:
        mask: transformers' mask, True where a query may see a key; None if nothing is hidden.
        bias: the value of ``hook_attn_mask``, added to the scores; None if it is unwatched or was left unchanged.
        causal: transformers passed no mask because causal order alone determines it.
        scale: factor on the scores.
        plain: transformers' fused attention of these operands, without the bias; runs while nothing is watched.
        normalize: turns scores into weights; every normalizer except softmax needs the map.
        counted: the queries that are not padding, where the mask does not say which they are; see `real_queries`.
    """

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch head key d_head"]
    value: Float[Tensor, "batch head key d_head"]
    mask: Bool[Tensor, "#batch #head query key"] | None
    bias: Float[Tensor, "batch head #query key"] | None
    causal: bool
    scale: float
    plain: Callable[[], Float[Tensor, "batch query head d_head"]]
    normalize: Normalizer = softmax
    counted: Bool[Tensor, "batch query"] | None = None

    def additive(self) -> Tensor | None:
        """Mask and bias as one tensor added to the scores; None without either."""
        if self.mask is None:
            return self.bias
        mask = self.mask[..., :1, :] if self.mask.stride(-2) == 0 else self.mask  # one row, shared by all queries
        return torch.where(mask, self.query.new_zeros(()) if self.bias is None else self.bias, -torch.inf)

    def visible(self) -> Visible:
        """Number of keys that the model's mask allows each query to see."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.mask is not None:
            return self.mask.sum(dim=-1, keepdim=True)
        newest = torch.arange(keys - queries + 1, keys + 1, device=self.query.device)
        return (newest if self.causal else torch.full_like(newest, keys))[None, None, :, None]

    def real_queries(self) -> Bool[Tensor, "batch query"] | None:
        """Queries that are not padding: those that may see themselves. None means all."""
        if self.mask is None or self.counted is not None:
            return self.counted
        return self.mask.diagonal(self.mask.shape[-1] - self.mask.shape[-2], dim1=-2, dim2=-1)[:, 0]


def attention(
    module: nn.Module,
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Bool[Tensor, "#batch #head query key"] | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "batch query head d_head"], None]:
    """transformers' attention interface; the points of `module`'s layer decide how it is computed."""
    points: AttentionPoints | None = module.__dict__.get(POINTS)
    if points is not None and attention_mask is None and points.recorded[0].watch.short:
        mixed = _short(module, points, query, key, value, scaling, kwargs)
        if mixed is not None:
            return mixed.transpose(1, 2).contiguous(), None
    cache, counted = None if points is None else points.hook_rot_k.watch.cache, None
    if points is not None and points.hook_fresh.watched:
        _show_fresh(points, key, attention_mask, query.shape[2])
    if cache is not None:
        attention_mask, counted = cache.seen(module.layer_idx, attention_mask, key.device)
    if points is None or not (points.any_watched() or points.hook_rot_k.watch.sums is not None):
        if normalizer_of(module) is not softmax:
            operands = _operands(module, query, key, value, attention_mask, None, counted, scaling, kwargs)
            return torch.matmul(_pattern(operands), operands.value).transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query, key, value = _autocast(query, key, value)
    watch, keys = points.hook_rot_k.watch, key.shape[2]
    if keys != len(watch.forward_pass.keys):  # a layer with a sliding window has the last keys
        watch.describe(keys=range(watch.forward_pass.keys.stop - keys, watch.forward_pass.keys.stop))
    query = at(points.hook_rot_q, query.transpose(1, 2)).transpose(1, 2)
    if points.hook_rot_k.watched:
        key = _shown_keys(points.hook_rot_k, key, query.shape[2])
    bias = known_bias(points.hook_attn_mask, query)
    if points.hook_attn_mask.watched and points.hook_attn_mask not in watch.biases:
        bias = bias_of(points.hook_attn_mask, (query.shape[0], query.shape[1], 1, key.shape[2]), query)
    operands = _operands(module, query, key, value, attention_mask, bias, counted, scaling, kwargs)
    return at(points.hook_z, _mix(points, operands).transpose(1, 2)).contiguous(), None


def _short(
    module: Any,
    points: "AttentionPoints",
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Float[Tensor, "batch head query d_head"] | None:
    """Fused attention with a known mask or none, whose column sums may be recorded; None where more is needed."""
    point, masked = points.recorded
    sums, bias = point.watch.sums, known_bias(masked, query)
    if (sums is None and bias is None) or normalizer_of(module) is not softmax:
        return None
    key, value, causal, scale = _arranged(module, query, key, value, scaling, kwargs)
    attended = None if causal and bias is not None else fused.attend(query, key, value, bias, causal, scale)
    if attended is None:
        return None
    if sums is not None:
        sums.add(point, Waiting(query, key, attended.lse, scale, bias, None, causal))
    return attended.mixed


def _autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands in the type that `torch.autocast` chooses for fused attention."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(one if one.dtype == torch.float64 else one.to(dtype) for one in operands)


def _shown_keys(
    point: "Point", key: Float[Tensor, "batch kv_head key d_head"], new: int
) -> Float[Tensor, "batch kv_head key d_head"]:
    """The keys after hooks; if a pass stores its `new` keys, later passes read them as hooks left them."""
    stores = point.forward_pass.mode == "encode"
    shared = point.watch.cache is not None or stores  # then a copy: the keys of earlier passes are used again
    shown = point(key.transpose(1, 2).clone() if shared else key.transpose(1, 2)).transpose(1, 2)
    if stores:
        key[:, :, -new:] = shown[:, :, -new:]
    return shown


def _operands(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    counted: Tensor | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Operands:
    repeated, values, causal, scale = _arranged(module, query, key, value, scaling, kwargs)
    return Operands(
        query,
        repeated,
        values,
        mask,
        bias,
        causal=causal and mask is None,
        scale=scale,
        plain=lambda: sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)[0],
        normalize=normalizer_of(module),
        counted=counted,
    )


def _arranged(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, bool, float]:
    """Keys and values repeated to the query heads, whether order alone hides keys without a mask, and the scale."""
    is_causal = kwargs.get("is_causal")
    causal = module.is_causal if is_causal is None else is_causal
    _, heads, queries, width = query.shape
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
    return key, value, bool(causal) and queries > 1, width**-0.5 if scaling is None else scaling


def _mix(points: "AttentionPoints", operands: Operands) -> Float[Tensor, "batch head query d_head"]:
    """The heads' outputs, by the cheapest route that provides the watched values."""
    handover = points.hook_sink_scores.watch.handover
    early = handover is not None and handover.waits_at(points.hook_sink_scores.name or "")
    if operands.normalize is not softmax:
        if early:
            _show_sums(points, operands, _pattern(operands))
        return _explicit(points, operands, sinks=not early)
    mixed = _fused_with_sinks(points, operands) if early else None
    if points.hook_attn_scores.watched or points.hook_pattern.watched:
        return _explicit(points, operands, sinks=not early)
    if mixed is not None:
        return mixed
    if _wants_sums(points):
        return _fused_with_sinks(points, operands)
    return _fused(operands)


def _fused(operands: Operands) -> Float[Tensor, "batch head query d_head"]:
    """Fused attention with mask and bias; without a bias transformers' call, which rounds cached steps differently."""
    if operands.bias is None:
        return operands.plain().transpose(1, 2)
    additive, causal = _with_triangle(operands)
    return nn.functional.scaled_dot_product_attention(
        operands.query, operands.key, operands.value, attn_mask=additive, is_causal=causal, scale=operands.scale
    )


def _fused_with_sinks(points: "AttentionPoints", operands: Operands) -> Float[Tensor, "batch head query d_head"]:
    """Fused attention; the column sums pass through ``hook_sink_scores``."""
    query, key, scale, point = operands.query, operands.key, operands.scale, points.hook_sink_scores
    additive, causal = _with_triangle(operands)
    attended = fused.attend(query, key, operands.value, additive, causal, scale)
    mixed, lse = (_fused(operands), None) if attended is None else attended
    mask = additive if causal == operands.causal else operands.additive()  # no triangle: one row serves all queries
    real, sums = _summed(points, operands), point.watch.sums
    if sums is not None and not point.watched:
        sums.add(point, Waiting(query, key, lse, scale, mask, real, operands.causal))
        return mixed
    if lse is None:
        lse = log_sum_exp(query.detach(), key.detach(), scale, additive, causal)
    _show_sinks(points, column_sums(query, key, lse, scale, mask, real, operands.causal))
    return mixed


def _wants_sums(points: "AttentionPoints") -> bool:
    """Whether the column sums are watched or recorded."""
    point = points.hook_sink_scores
    return point.watched or (point.watch.sums is not None and point.watch.peeked is None)


def _explicit(points: "AttentionPoints", operands: Operands, sinks: bool) -> Float[Tensor, "batch head query d_head"]:
    """Attention through the map, so that scores and pattern can be read and edited; fused if they were only read."""
    scores, scores_read = read_at(points.hook_attn_scores, _scores(operands))
    pattern, pattern_read = read_at(points.hook_pattern, _pattern(operands, scores))
    if sinks and _wants_sums(points):
        _show_sums(points, operands, pattern)
    only_read = scores_read and pattern_read and operands.normalize is softmax
    return _fused(operands) if only_read else torch.matmul(pattern, operands.value)


def _pattern(operands: Operands, scores: Tensor | None = None) -> Float[Tensor, "batch head query key"]:
    """The map, from the operands' scores or from edited `scores`; rows of padding queries are 0."""
    scores, real = _scores(operands) if scores is None else scores, operands.real_queries()
    weights = operands.normalize(scores, operands.visible()).to(operands.query.dtype)
    return weights if real is None else weights.masked_fill(~real[:, None, :, None], 0.0)


def _scores(operands: Operands) -> Float[Tensor, "batch head query key"]:
    """Scaled products of queries and keys; -inf where a key is hidden."""
    scores = torch.matmul(operands.query, operands.key.transpose(-2, -1)) * operands.scale
    additive, causal = _with_triangle(operands)
    if causal:
        queries, keys = scores.shape[-2:]
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores if additive is None else scores + additive


def _with_triangle(operands: Operands) -> tuple[Tensor | None, bool]:
    """The additive mask, and whether causal order still has to be applied in addition.

    Fused attention takes either a mask or the causal flag; with a bias and causal order, the mask includes the order.
    """
    additive = operands.additive()
    if additive is None or not operands.causal:
        return additive, operands.causal
    queries, keys = operands.query.shape[2], operands.key.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=additive.device).tril(keys - queries)
    return torch.where(seen, additive, -torch.inf), False


def _show_sums(points: "AttentionPoints", operands: Operands, pattern: Float[Tensor, "batch head query key"]) -> None:
    """Column sums of an explicit pattern, through ``hook_sink_scores``."""
    real = _summed(points, operands)
    counted = pattern.detach().float() if real is None else pattern.detach().float() * real[:, None, :, None]
    _show_sinks(points, counted.sum(dim=2))


def _summed(points: "AttentionPoints", operands: Operands) -> Bool[Tensor, "batch query"] | None:
    """The queries that sink scores sum over: real ones, of those that the run chose. None means all."""
    real, chosen = operands.real_queries(), points.hook_sink_scores.forward_pass.counted
    if chosen is None:
        return real
    chosen = chosen.to(operands.query.device).repeat(len(operands.query) // len(chosen), 1)  # rows of guidance follow
    return chosen if real is None else chosen & real


def _show_sinks(points: "AttentionPoints", scores: Float[Tensor, "batch head key"]) -> None:
    before, sums = writes(scores), points.hook_sink_scores.watch.sums
    if sums is not None:
        sums.put(points.hook_sink_scores, scores)
    shown = at(points.hook_sink_scores, scores)
    require(
        shown is scores and writes(scores) == before,
        f"{points.hook_sink_scores.name} only reports what attention did; to change it, edit hook_attn_mask (add -inf "
        f"to a key) or hook_pattern of the same layer.",
        ReadOnlyHookError,
    )


def _show_fresh(points: "AttentionPoints", key: Tensor, mask: Tensor | None, queries: int) -> None:
    """Which keys this pass computes, through ``hook_fresh``; of cached keys before the window, none."""
    planned = points.hook_fresh.forward_pass.fresh
    if planned is not None:
        fresh = planned[:, points.hook_fresh.layer()]
    else:
        fresh = (torch.arange(key.shape[2], device=key.device) >= key.shape[2] - queries).expand(key.shape[0], -1)
        fresh = fresh if mask is None else fresh & mask[:, 0, -1]
    require(
        torch.equal(points.hook_fresh(fresh.clone()), fresh),
        f"{points.hook_fresh.name} only reports which keys are computed; to choose them, write a policy "
        f"(sinklens.sampling.Policy) and pass it as cache=.",
        ReadOnlyHookError,
    )


def attention_mask(
    q_length: int, mask_function: Callable[..., Any], **kwargs: Any
) -> Bool[Tensor, "batch 1 query key"] | None:
    """transformers' mask for fused attention; if it is the same for every query, one row expanded to q_length.

    The padding of a bidirectional batch then takes memory of size S, not S², also after ``hook_attn_mask`` is added.
    The mask of a block-causal model (blocks.py), or of a pass with segments (segments.py), has a row for every query.
    """
    rule = rule_of(kwargs.get("config"))
    if rule is not None:
        real = kwargs.get("attention_mask")
        if real is None:
            real = torch.ones(kwargs["batch_size"], kwargs["kv_length"], dtype=torch.bool, device=kwargs["device"])
        first = int(kwargs.get("q_offset", 0))
        return rule.mask(real, slice(first, first + q_length))
    if mask_function is not bidirectional_mask_function:
        return sdpa_mask(q_length=q_length, mask_function=mask_function, **kwargs)
    row = sdpa_mask(q_length=1, mask_function=mask_function, **kwargs)
    return None if row is None else row.expand(-1, -1, q_length, -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, attention_mask)
