"""Fused attention that also returns the log-sum-exp of its rows.

PyTorch's public `scaled_dot_product_attention` does not return the log-sum-exp. The operators that it calls do.
`attend` calls the operator that PyTorch chooses for the same operands (`torch._fused_sdp_choice`), so the mixed values
equal those of the public function bit for bit. Only this module uses these operators; a test compares their signatures
with the ones expected here and names the installed version of PyTorch if they differ.

On a GPU an operator is used only after it has agreed with attention written out in float64 (trust.py). Where no
operator applies (PyTorch's "math" route, a single query, a head width that is not a multiple of 8), `attend` returns
None, and the caller computes the log-sum-exp separately.

Caveat: these operators are private to PyTorch. If a version changes what they return, the probe fails, which costs
speed, not correctness.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from sinklens.hooks.attention import trust

FUSED_DEVICES: tuple[str, ...] = ("cuda",)  # kinds of devices, besides the CPU, whose operators may be used
ALIGNED = 8  # the memory-efficient operator requires the row length of a mask to be a multiple of this
PROBES = ((64, 64), (65, 65), (127, 300))  # queries and keys of the first-use test
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Attended(NamedTuple):
    """Result of fused attention.

    Attributes:
        mixed: the heads' outputs.
        lse: log Σ_j exp(score_ij), in float32.
    """

    mixed: Float[Tensor, "batch head query d_head"]
    lse: Float[Tensor, "batch head query"]


class FusedInputs(NamedTuple):
    """Inputs of an operator; `mask` is expanded to [batch, head, query, key] and aligned."""

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch head key d_head"]
    value: Float[Tensor, "batch head key d_head"]
    mask: Float[Tensor, "batch head query key"] | None
    causal: bool
    scale: float


def attend(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    value: Float[Tensor, "batch head key d_head"],
    additive: Float[Tensor, "#batch #head #query key"] | None,
    causal: bool,
    scale: float,
) -> Attended | None:
    """Fused attention with its log-sum-exp; None if no operator of PyTorch returns it for these operands.

    Args:
        additive: added to the scores; −inf hides a key.
        causal: query i sees keys up to i; there must then be as many queries as keys.
    """
    if query.shape[2] == 1:
        return None  # a cached step; PyTorch packs its heads, which rounds differently
    if query.device.type == "cpu" and "cpu" not in FUSED_DEVICES:
        return Attended(
            *torch._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=_spread(additive, query, key), scale=scale
            )
        )
    if (
        query.device.type not in FUSED_DEVICES
        or query.shape[-1] % ALIGNED
        or (causal and query.shape[2] != key.shape[2])
    ):
        return None
    given = FusedInputs(query, key, value, _spread(additive, query, key, ALIGNED), causal, scale)
    backend = choice(given)
    if backend not in OPERATORS:
        return None
    place = (str(query.device), query.dtype, f"width {query.shape[-1]}", "causal" if causal else "not causal")
    masked = "no mask" if additive is None else "a mask"
    route = f"PyTorch's {backend.name.lower().replace('_', ' ')} operator"
    if not trust.trusted(route, (*place, masked), lambda: _probe(backend, query, causal, additive is not None)):
        return None
    return _returned(OPERATORS[backend](given), query)


def choice(given: FusedInputs) -> SDPBackend:
    """The backend that `scaled_dot_product_attention` uses for these operands."""
    number = torch._fused_sdp_choice(
        given.query, given.key, given.value, attn_mask=given.mask, dropout_p=0.0, is_causal=given.causal,
        scale=given.scale,
    )  # fmt: skip
    return SDPBackend(number)


def _flash(given: FusedInputs) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention(
        given.query, given.key, given.value, 0.0, given.causal, False, scale=given.scale
    )[:2]


def _efficient(given: FusedInputs) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        given.query, given.key, given.value, given.mask, True, 0.0, given.causal, scale=given.scale
    )[:2]


def _cudnn(given: FusedInputs) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        given.query, given.key, given.value, given.mask, True, 0.0, given.causal, False, scale=given.scale
    )[:2]


OPERATORS = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
}


def _returned(found: tuple[Tensor, Tensor], query: Tensor) -> Attended:
    """The outputs without the operator's padding: rows up to a multiple of 32, or a last axis of length 1."""
    mixed, lse = found
    lse = lse[..., 0] if lse.ndim == 4 else lse
    return Attended(mixed, lse[..., : query.shape[2]].float())


def _spread(additive: Tensor | None, query: Tensor, key: Tensor, multiple: int = 1) -> Tensor | None:
    """`additive` expanded to [batch, head, query, key] without a copy; its rows start at multiples of `multiple`."""
    if additive is None:
        return None
    added = additive.to(query.dtype)
    if multiple > 1:
        keys = key.shape[2]
        added = nn.functional.pad(added, (0, -keys % multiple)).contiguous()[..., :keys]
    return added.expand(*query.shape[:3], key.shape[2])


def _probe(backend: SDPBackend, like: Tensor, causal: bool, masked: bool) -> None:
    """Raise if the operator differs from attention written out in float64."""
    tolerance = TOLERANCE.get(like.dtype, 1e-3)
    for queries, keys in PROBES:
        if causal and queries != keys:
            continue
        shapes = ((queries, 0), (keys, 1), (keys, 2))
        query, key, value = (trust.numbers(2, 4, n, like.shape[-1], like=like, seed=seed) for n, seed in shapes)
        additive = trust.numbers(2, 4, 1, keys, like=like, seed=3) if masked else None
        if additive is not None:
            additive[..., 1::3] = -torch.inf
        given = FusedInputs(query, key, value, _spread(additive, query, key, ALIGNED), causal, like.shape[-1] ** -0.5)
        found = _returned(OPERATORS[backend](given), query)
        expected = explicit(given)
        torch.testing.assert_close(found.mixed.cpu().double(), expected.mixed, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found.lse.cpu().double(), expected.lse, atol=5e-3, rtol=1e-3)


def explicit(given: FusedInputs) -> Attended:
    """Attention written out in float64 on the CPU."""
    scores = trust.explicit_scores(given.query, given.key, given.scale, given.mask, given.causal)
    return Attended(scores.softmax(-1).nan_to_num(0.0) @ given.value.cpu().double(), scores.logsumexp(-1))
