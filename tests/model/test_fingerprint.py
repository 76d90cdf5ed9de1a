"""The sums of a fingerprint, compared with their formula."""

import numpy as np
import pytest
import torch

from sinklens.model.fingerprint import PERIOD, ROWS, bit_sums, weights_fingerprint

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.float64]


def by_formula(values):
    """Both sums, computed directly in numpy's unsigned 64-bit integers."""
    bits = values.to(torch.float32).numpy().view(np.int32).astype(np.int64).astype(np.uint64)
    weights = np.arange(len(bits), dtype=np.uint64) % np.uint64(65521) + np.uint64(1)
    return int(bits.sum(dtype=np.uint64)), int((bits * weights).sum(dtype=np.uint64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, PERIOD, 2 * PERIOD, 2 * PERIOD + 1, 7 * PERIOD - 3])
def test_both_sums_equal_the_formula(dtype, size):
    values = torch.randn(size).to(dtype)
    for given in (values, -values.abs(), values.abs()):
        assert tuple(bit_sums(given)) == by_formula(given)


def test_a_view_that_starts_at_an_odd_index_has_the_sums_of_its_values():
    values = torch.randn(2 * PERIOD + 9).to(torch.bfloat16)
    assert tuple(bit_sums(values[1:])) == by_formula(values[1:])
    matrix = torch.randn(300, 500).to(torch.bfloat16)
    assert bit_sums(matrix.T) == bit_sums(matrix.T.contiguous()) != bit_sums(matrix)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_and_cpu_give_equal_sums(dtype):
    values = torch.randn(70 * PERIOD + 5).to(dtype)
    assert bit_sums(values.cuda()) == bit_sums(values)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [-1e38, 1e38, -float("inf"), -1e-38])
def test_sums_of_extreme_values_do_not_overflow(dtype, value):
    values = torch.full((2 * PERIOD * ROWS + 11,), value).to(dtype)
    assert tuple(bit_sums(values)) == by_formula(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bit_every_place_the_names_and_the_description_change_the_fingerprint(dtype):
    values = torch.randn(2 * PERIOD + 5).to(dtype)
    before = weights_fingerprint([("w", values)], "")
    bits = values.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    for place in (0, 1, PERIOD, PERIOD + 1, 2 * PERIOD - 1, 2 * PERIOD + 4):
        bits[place] ^= 1
        assert weights_fingerprint([("w", values)], "") != before
        bits[place] ^= 1
    assert weights_fingerprint([("w", values)], "") == before
    values[[7, PERIOD + 8]] = values[[PERIOD + 8, 7]]
    assert weights_fingerprint([("w", values)], "") != before
    given = [("w", values), ("v", values), ("w", values.reshape(-1, 1))]
    assert len({weights_fingerprint([entry], described) for entry in given for described in ("a", "b")}) == 6


def test_all_dtypes_that_represent_the_values_exactly_give_one_fingerprint():
    values = torch.randint(-200, 200, (3 * PERIOD,)).to(torch.bfloat16) / 256
    assert len({weights_fingerprint([("w", values.to(dtype))], "") for dtype in DTYPES}) == 1
