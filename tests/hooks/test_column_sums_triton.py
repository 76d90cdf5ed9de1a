"""The Triton kernels against the plain version, which has been tested against loops: here in Triton's interpreter.

On a machine with a GPU the same tests run compiled, and those of bfloat16 with them, which the interpreter lacks.
"""

import re
import sys
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

import sinklens.hooks as hooks
from sinklens.devices.kernels import _compiled
from sinklens.devices.parts import Setting
from sinklens.hooks import column_sums as plain
from sinklens.hooks import column_sums_triton as kernels
from sinklens.hooks import tiles, trust

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.37


def operands(queries, keys, heads=4, kv_heads=4, d_head=24, dtype=torch.float32):
    query = 2 * torch.randn(2, heads, queries, d_head, device=DEVICE)
    key = 2 * torch.randn(2, kv_heads, keys, d_head, device=DEVICE)
    return query.to(dtype), key.to(dtype)


def assert_equal_to_plain(query, key, mask=None, real=None, causal=False, atol=2e-5):
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    lse = plain.plain_log_sum_exp(query, repeated, SCALE, mask, causal)
    own = kernels.log_sum_exp(query, key, SCALE, mask, causal)
    torch.testing.assert_close(own, lse, atol=atol, rtol=1e-5)
    sums = plain.plain_column_sums(query, repeated, lse, SCALE, mask, real, causal)
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


@pytest.mark.parametrize("tile", [*tiles.TILES, tiles.SMALL, tiles.Tile(16, 64, 4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_size_of_a_tile_changes_nothing(tile, causal):
    query, key = operands(70, 140, heads=1, kv_heads=1)
    lse = plain.plain_log_sum_exp(query, key, SCALE, None, causal)
    torch.testing.assert_close(kernels.log_sum_exp(query, key, SCALE, None, causal, tile), lse, atol=2e-5, rtol=1e-5)
    sums = plain.plain_column_sums(query, key, lse, SCALE, None, None, causal)
    found = kernels.column_sums(query, key, lse, SCALE, None, None, causal, tile)
    torch.testing.assert_close(found, sums, atol=2e-5, rtol=1e-5)


def test_a_mask_of_one_row_is_read_as_one_row_whether_or_not_it_is_expanded(monkeypatch):
    query, key = operands(70, 70)
    row = torch.randn(2, 4, 1, 70, device=DEVICE)
    row[..., 3::5] = -torch.inf
    for mask in (row, row.expand(2, 4, 70, 70)):
        assert kernels._kind(mask) == kernels.KEY
        assert_equal_to_plain(query, key, mask=mask)
    assert kernels._kind(row.repeat(1, 1, 70, 1)) == kernels.FULL


@pytest.fixture
def switched_on(monkeypatch):
    """The kernels may be used on this machine's device, and nothing was asked of it before."""
    monkeypatch.setattr(plain, "TRITON_DEVICES", (DEVICE,))
    monkeypatch.setattr(trust, "VERDICTS", {})


@pytest.mark.usefixtures("switched_on")
def test_they_are_used_once_they_have_agreed_with_the_formula_on_the_device(monkeypatch):
    query, key = operands(20, 20)
    lse = plain.plain_log_sum_exp(query, key, SCALE)
    expected, launched = plain.plain_column_sums(query, key, lse, SCALE), []
    launch = kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda call, tile: (launched.append(call.kernel), launch(call, tile)))
    sums = plain.column_sums(query, key, plain.log_sum_exp(query, key, SCALE), SCALE)
    probes = 2 * len(kernels.PROBES)
    assert launched[probes:] == [kernels._lse_kernel, kernels._sums_kernel]
    plain.column_sums(query, key, lse, SCALE)
    assert len(launched) == probes + 3, "the same kind of call was probed again"
    torch.testing.assert_close(sums, expected)


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("fault", ["wrong", "does not compile"])
def test_kernels_that_fail_on_a_device_are_left_out_with_one_warning(monkeypatch, fault):
    def broken(query, key, lse, *more):
        if fault == "wrong":
            return torch.zeros(*query.shape[:2], key.shape[2], device=query.device)
        raise RuntimeError("ptxas failed\nwith a long report")

    query, key = operands(20, 20)
    lse = plain.plain_log_sum_exp(query, key, SCALE)
    expected = plain.plain_column_sums(query, key, lse, SCALE)
    monkeypatch.setattr(kernels, "column_sums", broken)
    reason = "AssertionError: Tensor-likes are not close" if fault == "wrong" else "RuntimeError: ptxas failed with a"
    with pytest.warns(RuntimeWarning, match=rf"sink scores cannot be used on {DEVICE}.*, torch.float32, .*{reason}"):
        assert torch.equal(plain.column_sums(query, key, lse, SCALE), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(plain.column_sums(query, key, lse, SCALE), expected)


@pytest.mark.usefixtures("switched_on")
def test_running_out_of_memory_in_a_probe_is_no_verdict(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    query, key = operands(20, 20)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "log_sum_exp", full)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            plain.log_sum_exp(query, key, SCALE)
    assert trust.VERDICTS == {}


@pytest.mark.usefixtures("switched_on")
def test_without_triton_the_plain_version_computes_and_one_warning_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "sinklens.hooks.column_sums_triton", None)
    monkeypatch.delattr(hooks, "column_sums_triton", raising=False)
    plain._installed.cache_clear()
    query, key = operands(20, 20)
    with pytest.warns(RuntimeWarning, match="without their Triton kernel, which is slower: .* Install triton"):
        lse = plain.log_sum_exp(query, key, SCALE)
    assert torch.equal(lse, plain.plain_log_sum_exp(query, key, SCALE))
    plain._installed.cache_clear()


@pytest.mark.skipif(DEVICE != "cpu", reason="they were compiled for this GPU")
def test_they_compile_for_an_h100_without_one():
    """Compiling needs no GPU; it shows what the interpreter does not mind."""
    setting = Setting(torch.device("cpu"), 0.0)
    used = [int(number) for number in re.findall(r"\d+", _compiled(setting))]
    assert len(used) == 2
    assert max(used) < 99 * 1024, "more shared memory than a consumer card has"
