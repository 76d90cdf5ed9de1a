"""Column sums and log-sum-exps, compared with loops in float64 and with a map that has a planted sink."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from sinklens.hooks.attention import column_sums as module
from sinklens.hooks.attention.column_sums import column_sums, log_sum_exp

SCALE = 0.37


def naive_pattern(query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False) -> Iterator[tuple]:
    """(batch, head, query, weights over keys, log-sum-exp) row by row; weights are None if no key is visible."""
    query, key = query.double(), key.double()
    keys = key.shape[2]
    for b, h, i in product(*map(range, query.shape[:3])):
        row = [float(query[b, h, i] @ key[b, h, j]) * SCALE for j in range(keys)]
        if mask is not None:
            mask_row = mask.expand(*query.shape[:3], keys)[b, h, i].tolist()
            row = [score + added for score, added in zip(row, mask_row, strict=True)]
        if causal:
            row = [score if j <= i + keys - query.shape[2] else -math.inf for j, score in enumerate(row)]
        top = max(row)
        if top == -math.inf:
            yield b, h, i, None, -math.inf
            continue
        total = sum(math.exp(score - top) for score in row)
        yield b, h, i, [math.exp(score - top) / total for score in row], top + math.log(total)


def naive_sums(query, key, mask=None, causal=False, real=None) -> tuple[Tensor, Tensor]:
    """Column sums and log-sum-exp."""
    sums = torch.zeros(*query.shape[:2], key.shape[2], dtype=torch.float64)
    lse = torch.zeros(query.shape[:3], dtype=torch.float64)
    for b, h, i, weights, row_lse in naive_pattern(query, key, mask, causal):
        lse[b, h, i] = row_lse
        if weights is not None and (real is None or real[b, i]):
            sums[b, h] += torch.tensor(weights, dtype=torch.float64)
    return sums, lse


def operands(queries=7, keys=7, dtype=torch.float32, batch=2, heads=3, d_head=4) -> tuple[Tensor, Tensor]:
    return 2 * torch.randn(batch, heads, queries, d_head, dtype=dtype), 2 * torch.randn(
        batch, heads, keys, d_head, dtype=dtype
    )


def hiding(*shape: int) -> Tensor:
    """A mask of random numbers and some −inf; key 0 stays visible."""
    mask = torch.randn(shape)
    mask[torch.rand(shape) < 0.3] = -torch.inf
    mask[..., 0] = 0.5
    return mask


def assert_sums(query, key, mask=None, causal=False, real=None, atol=1e-5):
    expected, expected_lse = naive_sums(query, key, mask, causal, real)
    lse = log_sum_exp(query, key, SCALE, mask, causal)
    torch.testing.assert_close(lse.double(), expected_lse, atol=atol, rtol=1e-6)
    sums = column_sums(query, key, lse, SCALE, mask, real, causal)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), expected, atol=atol, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 9), (1, 1), (3, 8), (13, 13)])
def test_sums_equal_a_loop_over_the_map(queries, keys, dtype, causal):
    """One or few queries with many keys occur with a key/value cache.

    The operands are exact in float64, so only the sum is rounded, and in float32 for either type.
    """
    assert_sums(*operands(queries, keys, dtype), causal=causal)


def without(*index) -> Tensor:
    """A mask that hides the scores at `index`."""
    mask = torch.zeros(2, 3, 7, 7)
    mask[index] = -torch.inf
    return mask


MASKS = [
    *(partial(hiding, *shape) for shape in [(2, 3, 7, 7), (1, 1, 7, 7), (2, 1, 7, 7), (2, 3, 1, 7), (2, 1, 1, 7)]),
    partial(without, 0, 1, 4),  # a query without keys, which counts nowhere and gives no NaN
    partial(without, ..., slice(2)),  # keys that no query sees, whose sums are 0
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_an_additive_mask_with_minus_infinity_applies_in_every_broadcast_shape(mask, causal):
    assert_sums(*operands(), mask=mask(), causal=causal)


@pytest.mark.parametrize("elements", [5, *(rows * 3 * 7 for rows in (1, 2, 3, 4, 6, 7, 100))])
@pytest.mark.parametrize("causal", [False, True])
def test_the_block_size_does_not_change_the_sums(monkeypatch, elements, causal):
    """A row that is longer than a block is still computed."""
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", elements)
    real = torch.tensor([[False, False, True, True, True, True, True], [True] * 7])
    assert_sums(*operands(), mask=hiding(2, 3, 7, 7), causal=causal, real=real)


def test_a_planted_sink_is_found():
    """Every query has score log 9 with key 2 and 0 with the other nine keys: weights 9/18 and 1/18 each."""
    query, key = torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 10, 4)
    query[..., 0], key[0, 0, 2, 0] = 1.0, math.log(9) / SCALE
    sums = column_sums(query, key, log_sum_exp(query, key, SCALE), SCALE)
    expected = torch.full((10,), 10 / 18)
    expected[2] = 5.0
    torch.testing.assert_close(sums[0, 0], expected)


def test_a_mask_of_a_small_dtype_is_not_rounded_again():
    """Attention adds the mask itself; scaled to base 2 in bfloat16, 30.25 would be rounded to another number."""
    query, key = (torch.randn(1, 2, 6, 8).bfloat16() for _ in range(2))
    mask = torch.zeros(1, 1, 1, 6, dtype=torch.bfloat16)
    mask[..., 2] = 30.25
    pattern = (query.double() @ key.double().transpose(-1, -2) * 0.5 + mask.double()).softmax(-1)
    lse = log_sum_exp(query, key, 0.5, mask)
    torch.testing.assert_close(column_sums(query, key, lse, 0.5, mask).double(), pattern.sum(-2), atol=1e-4, rtol=1e-4)


def test_scores_too_large_for_a_plain_exponential_do_not_overflow():
    query, key = operands()
    assert_sums(query * 30, key * 30, atol=1e-3)
