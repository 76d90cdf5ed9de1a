"""What the parts of the check share is right, and a planted fault is detected."""

import pytest
import torch

from sinklens.devices import roofline, samples
from sinklens.devices.kernels import Case, compare_kernels
from sinklens.devices.plain import plain_loop, random_llada, reference_loop, twin

CPU = torch.device("cpu")


def test_a_wrong_kernel_is_detected(monkeypatch):
    kernels = pytest.importorskip(
        "sinklens.hooks.attention.column_sums_triton", reason="Triton has no wheel for this system"
    )
    original, case = kernels.column_sums, Case(torch.float32, 32, "key")
    assert "differs by" in compare_kernels(case, kernels, CPU)
    monkeypatch.setattr(kernels, "column_sums", lambda *given: original(*given) * 1.01)
    with pytest.raises(AssertionError, match=r"differs by 0\.01; at most 0.0001 is allowed"):
        compare_kernels(case, kernels, CPU)


def test_a_twin_shares_its_weights_and_gives_the_same_logits():
    model, ids = random_llada(64, 2, 4, 97), samples.random_ids(1, 40)
    for attention in ("sdpa", "eager"):
        other = twin(model, attention)
        assert other.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
        with torch.no_grad():
            torch.testing.assert_close(other(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(plain_loop(model, ids, 4), reference_loop(model, ids, 4))


def test_the_roofline_counts_products_and_bytes():
    """One layer of width 2 with 3 hidden channels, one row of 5 positions, 2 of which are decided among 7 tokens."""
    sizes = {"d_model": 2, "n_layers": 1, "n_heads": 1, "vocab": 7, "d_mlp": 3}
    flops, moved = roofline.pass_of(sizes, 1, 5, 2, itemsize=2)
    projections, mlp, attention, head = 4 * (2 * 5 * 2 * 2), 3 * (2 * 5 * 2 * 3), 2 * (2 * 5 * 5 * 2), 2 * 2 * 2 * 7
    assert flops == projections + mlp + attention + head
    assert moved == 2 * (4 * 4 + 3 * 6 + 2 * 7 + 5 * (8 * 2 + 3 * 3) * 2)


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312),
    ("NVIDIA L4", 121), ("NVIDIA L40S", 362), ("Tesla T4", 65),
])  # fmt: skip
def test_a_card_is_found_by_its_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = roofline.peak_of(torch.device("cuda:0"), torch.bfloat16)
    assert (found.flops / 1e12, found.source) == (tflops, "data sheet")


def test_an_unknown_card_is_measured():
    found = roofline.peak_of(CPU, torch.float32)
    assert found.source == "measured"
    assert 1e8 < found.flops < 1e14
    assert 1e7 < found.bytes < 1e13
