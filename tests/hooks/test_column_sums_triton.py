"""The Triton kernels against the plain version, which has been tested against loops: here in Triton's interpreter.

On a machine with a GPU the same tests run compiled, and those of bfloat16 with them, which the interpreter lacks.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from sinklens.hooks import column_sums as plain
from sinklens.hooks import column_sums_triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.37


def operands(queries, keys, heads=4, kv_heads=4, d_head=24, dtype=torch.float32):
    query = 2 * torch.randn(2, heads, queries, d_head, device=DEVICE)
    key = 2 * torch.randn(2, kv_heads, keys, d_head, device=DEVICE)
    return query.to(dtype), key.to(dtype)


def assert_equal_to_plain(query, key, mask=None, real=None, causal=False, atol=2e-5):
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    lse = plain.log_sum_exp(query, repeated, SCALE, mask, causal)
    own = kernels.log_sum_exp(query, key, SCALE, mask, causal)
    torch.testing.assert_close(own, lse, atol=atol, rtol=1e-5)
    sums = plain.column_sums(query, repeated, lse, SCALE, mask, real, causal)
    torch.testing.assert_close(
        kernels.column_sums(query, key, own, SCALE, mask, real, causal), sums, atol=atol, rtol=1e-5
    )
    return sums


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 90), (5, 130), (64, 64), (70, 70), (129, 129)])
def test_any_length_below_at_and_beyond_a_tile(queries, keys, causal):
    assert_equal_to_plain(*operands(queries, keys, heads=2, kv_heads=2), causal=causal)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_keys_are_read_as_they_are(kv_heads):
    assert_equal_to_plain(*operands(20, 70, kv_heads=kv_heads))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 70, 70), (1, 1, 70, 70), (2, 1, 1, 70), (2, 4, 1, 70), (1, 4, 70, 70)])
def test_masks_of_every_broadcast_shape(shape, causal):
    mask = torch.randn(shape, device=DEVICE)
    mask[torch.rand(shape, device=DEVICE) < 0.3] = -torch.inf
    mask[..., 0] = 0.5
    assert_equal_to_plain(*operands(70, 70), mask=mask, causal=causal)


def test_padding_queries_and_queries_that_see_nothing_do_not_count():
    query, key = operands(70, 70)
    real = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    real[1, :9] = False
    mask = torch.zeros(2, 1, 70, 70, device=DEVICE)
    mask[0, :, 66] = -torch.inf
    sums = assert_equal_to_plain(query, key, mask=mask, real=real)
    assert kernels.log_sum_exp(query, key, SCALE, mask)[0, 0, 66] == -torch.inf
    torch.testing.assert_close(sums.sum(-1)[:, 0].cpu(), torch.tensor([69.0, 61.0]))


@pytest.mark.parametrize("d_head", [8, 16, 80, 128])
def test_head_widths_that_are_no_power_of_two(d_head):
    assert_equal_to_plain(*operands(17, 40, heads=1, kv_heads=1, d_head=d_head), atol=1e-4)


def test_half_precision_is_summed_in_float32():
    query, key = operands(70, 70, dtype=torch.float16)
    sums = assert_equal_to_plain(query, key)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * SCALE
    torch.testing.assert_close(sums.double(), scores.softmax(-1).sum(2), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter multiplies no bfloat16; needs a GPU")
def test_bfloat16():
    assert_equal_to_plain(*operands(300, 300, d_head=128, dtype=torch.bfloat16), atol=1e-3)


def test_transposed_tensors_are_read_by_their_strides():
    query, key = operands(24, 70, heads=2, kv_heads=2)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not query.is_contiguous()
    assert_equal_to_plain(query, key)


def test_the_plain_version_calls_them_for_gpus_where_that_is_switched_on(monkeypatch):
    query, key = operands(20, 20)
    expected = plain.column_sums(query, key, plain.log_sum_exp(query, key, SCALE), SCALE)
    asked, launch = [], kernels._launch

    def noted(kernel, *given, **more):
        asked.append(kernel)
        launch(kernel, *given, **more)

    monkeypatch.setattr(plain, "TRITON_DEVICES", (DEVICE,))
    monkeypatch.setattr(kernels, "_launch", noted)
    sums = plain.column_sums(query, key, plain.log_sum_exp(query, key, SCALE), SCALE)
    assert asked == [kernels._lse_kernel, kernels._sums_kernel]
    torch.testing.assert_close(sums, expected)
