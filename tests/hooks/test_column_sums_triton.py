"""The Triton kernels, compared with the plain version, which is tested against loops; here in Triton's interpreter.

With a GPU the same tests run compiled, and so does the test of bfloat16, which the interpreter does not support.
"""

import sys
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from gpu.kernels import compiled_for_an_h100

import sinklens.hooks as hooks
from sinklens.hooks.attention import column_sums as plain
from sinklens.hooks.attention import column_sums_triton as kernels
from sinklens.hooks.attention import tiles, trust

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.37


def operands(queries, keys, heads=4, kv_heads=4, d_head=24, dtype=torch.float32):
    sizes = ((2, heads, queries, d_head), (2, kv_heads, keys, d_head))
    return tuple((2 * torch.randn(*size, device=DEVICE)).to(dtype) for size in sizes)


def assert_equal_to_plain(query, key, mask=None, real=None, causal=False, atol=2e-5):
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    lse = plain.plain_log_sum_exp(query, repeated, SCALE, mask, causal)
    kernel_lse = kernels.log_sum_exp(query, key, SCALE, mask, causal)
    torch.testing.assert_close(kernel_lse, lse, atol=atol, rtol=1e-5)
    sums = plain.plain_column_sums(query, repeated, lse, SCALE, mask, real, causal)
    torch.testing.assert_close(
        kernels.column_sums(query, key, kernel_lse, SCALE, mask, real, causal), sums, atol=atol, rtol=1e-5
    )
    return sums


LENGTHS = [(1, 1), (1, 90), (5, 130), (64, 64), (70, 70), (129, 129)]  # below, at and above a tile
SHAPES = [
    *((*lengths, {"heads": 2, "kv_heads": 2}, causal) for lengths in LENGTHS for causal in (False, True)),
    *((20, 70, {"kv_heads": kv_heads}, False) for kv_heads in (1, 2, 4)),
    *((17, 40, {"heads": 1, "kv_heads": 1, "d_head": width}, False) for width in (8, 16, 80, 128)),
]


@pytest.mark.parametrize(("queries", "keys", "sizes", "causal"), SHAPES)
def test_lengths_groups_and_head_widths_equal_the_plain_version(queries, keys, sizes, causal):
    assert_equal_to_plain(*operands(queries, keys, **sizes), causal=causal, atol=1e-4 if "d_head" in sizes else 2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 70, 70), (1, 1, 70, 70), (2, 1, 1, 70), (2, 4, 1, 70), (1, 4, 70, 70)])
def test_masks_of_every_broadcast_shape_equal_the_plain_version(shape, causal):
    mask = torch.randn(shape, device=DEVICE)
    mask[torch.rand(shape, device=DEVICE) < 0.3] = -torch.inf
    mask[..., 0] = 0.5
    assert_equal_to_plain(*operands(70, 70), mask=mask, causal=causal)


def test_padding_queries_and_fully_masked_queries_do_not_count():
    query, key = operands(70, 70)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)  # read by its strides
    real = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    real[1, :9] = False
    mask = torch.zeros(2, 1, 70, 70, device=DEVICE)
    mask[0, :, 66] = -torch.inf
    sums = assert_equal_to_plain(query, key, mask=mask, real=real)
    assert kernels.log_sum_exp(query, key, SCALE, mask)[0, 0, 66] == -torch.inf
    torch.testing.assert_close(sums.sum(-1)[:, 0].cpu(), torch.tensor([69.0, 61.0]))


def test_float16_operands_are_summed_in_float32():
    query, key = operands(70, 70, dtype=torch.float16)
    sums = assert_equal_to_plain(query, key)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * SCALE
    torch.testing.assert_close(sums.double(), scores.softmax(-1).sum(2), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16; needs a GPU")
def test_bfloat16_operands_equal_the_plain_version():
    assert_equal_to_plain(*operands(300, 300, d_head=128, dtype=torch.bfloat16), atol=1e-3)


@pytest.mark.parametrize("tile", [*tiles.TILES, tiles.SMALL, tiles.Tile(16, 64, 4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_size_does_not_change_the_result(tile, causal):
    query, key = operands(70, 140, heads=1, kv_heads=1)
    lse = plain.plain_log_sum_exp(query, key, SCALE, None, causal)
    torch.testing.assert_close(kernels.log_sum_exp(query, key, SCALE, None, causal, tile), lse, atol=2e-5, rtol=1e-5)
    sums = plain.plain_column_sums(query, key, lse, SCALE, None, None, causal)
    found = kernels.column_sums(query, key, lse, SCALE, None, None, causal, tile)
    torch.testing.assert_close(found, sums, atol=2e-5, rtol=1e-5)


def test_a_mask_of_one_row_is_a_key_mask_whether_or_not_it_is_expanded():
    query, key = operands(70, 70)
    row = torch.randn(2, 4, 1, 70, device=DEVICE)
    row[..., 3::5] = -torch.inf
    for mask in (row, row.expand(2, 4, 70, 70)):
        assert kernels._kind(mask) == kernels.KEY
        assert_equal_to_plain(query, key, mask=mask)
    assert kernels._kind(row.repeat(1, 1, 70, 1)) == kernels.FULL


@pytest.fixture
def switched_on(monkeypatch):
    """Enables the kernels on this machine's device, without earlier verdicts."""
    monkeypatch.setattr(plain, "TRITON_DEVICES", (DEVICE,))
    monkeypatch.setattr(trust, "VERDICTS", {})


@pytest.mark.usefixtures("switched_on")
def test_kernels_are_used_after_they_have_agreed_with_the_formula_on_the_device(monkeypatch):
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
def test_kernels_that_fail_on_a_device_are_replaced_with_one_warning(monkeypatch, fault):
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
def test_running_out_of_memory_in_a_probe_gives_no_verdict(monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    query, key = operands(20, 20)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "log_sum_exp", full)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            plain.log_sum_exp(query, key, SCALE)
    assert trust.VERDICTS == {}


@pytest.mark.usefixtures("switched_on")
def test_without_triton_the_plain_version_runs_with_one_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "sinklens.hooks.attention.column_sums_triton", None)
    monkeypatch.delattr(hooks.attention, "column_sums_triton", raising=False)
    plain._installed.cache_clear()
    query, key = operands(20, 20)
    with pytest.warns(RuntimeWarning, match="without their Triton kernel, which is slower: .* Install triton"):
        lse = plain.log_sum_exp(query, key, SCALE)
    assert torch.equal(lse, plain.plain_log_sum_exp(query, key, SCALE))
    plain._installed.cache_clear()


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels were compiled for this GPU")
def test_the_kernels_compile_for_an_h100_without_a_gpu(tmp_path):
    """Compiling does not need a GPU; it finds errors that the interpreter accepts, and what does not fit the chip."""
    used = compiled_for_an_h100(tmp_path)
    assert len(used) == (3 + 4 + 4) * 2  # widths of each type, and kernels
    assert max(one.shared for one in used.values()) < 99 * 1024, "more shared memory than a consumer GPU has"
    assert max(one.spilled for one in used.values()) < 512, "the registers do not hold a tile"
