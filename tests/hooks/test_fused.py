"""Fused attention with its log-sum-exp, computed by private operators of PyTorch."""

import pytest
import torch
from building import random_ids, random_model
from torch.nn.attention import SDPBackend

from sinklens.hooks.attention import fused, trust
from sinklens.hooks.attention.fused import FusedInputs, attend

SCALE = 0.37
SIGNATURES = {
    "_scaled_dot_product_flash_attention": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp,",
    "_scaled_dot_product_efficient_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
    "Tensor log_sumexp,",
    "_scaled_dot_product_cudnn_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp,",
    "_scaled_dot_product_flash_attention_for_cpu": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
}


def operands(queries=65, keys=65, heads=4, width=64, **where):
    return [torch.randn(2, heads, length, width, **where) for length in (queries, keys, keys)]


@pytest.mark.parametrize("name", SIGNATURES)
def test_pytorchs_private_operators_have_the_expected_signatures(name):
    found = str(getattr(torch.ops.aten, name).default._schema)
    assert found.startswith(f"aten::{name}{SIGNATURES[name]}"), f"PyTorch {torch.__version__} has {found}"


@pytest.mark.parametrize("backend", fused.OPERATORS)
def test_the_log_sum_exp_of_a_gpu_operator_has_one_number_per_query(backend):
    """The meta device computes shapes only: one operator pads its rows to 96, one returns an additional axis."""
    query, key, value = operands(device="meta", dtype=torch.bfloat16)
    mask = fused._spread(torch.zeros(2, 1, 1, 65, device="meta"), query, key, fused.ALIGNED)
    given = FusedInputs(query, key, value, None if backend is SDPBackend.FLASH_ATTENTION else mask, False, SCALE)
    found = fused._returned(fused.OPERATORS[backend](given), query)
    assert found.mixed.shape == (2, 4, 65, 64)
    assert (found.lse.shape, found.lse.dtype) == ((2, 4, 65), torch.float32)


@pytest.mark.parametrize("shape", [(2, 1, 1, 65), (2, 4, 1, 65), (1, 1, 65, 65), (2, 4, 65, 65)])
def test_aligning_a_mask_does_not_change_its_values(shape):
    query, key, _ = operands()
    additive = torch.randn(shape)
    spread = fused._spread(additive, query, key, fused.ALIGNED)
    assert torch.equal(spread, additive.expand(2, 4, 65, 65))
    assert spread.stride(-1) == 1
    assert all(step % fused.ALIGNED == 0 for step in spread.stride()[:-1])
    rows = shape[2] * shape[0] * shape[1]
    assert spread.untyped_storage().nbytes() == rows * 72 * 4, "the mask was copied for every query"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_cpu_outputs_and_log_sum_exp_equal_attention_written_out(causal, masked):
    query, key, value = operands()
    additive = torch.randn(2, 4, 1, 65) if masked and not causal else None
    found = attend(query, key, value, additive, causal, SCALE)
    expected = fused.explicit(FusedInputs(query, key, value, additive, causal, SCALE))
    torch.testing.assert_close(found.mixed.double(), expected.mixed, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)


def as_the_efficient_operator(given):
    """The result of a GPU's memory-efficient operator, from attention written out; rows are padded to 32."""
    found = fused.explicit(given)
    lse = torch.nn.functional.pad(found.lse, (0, -given.query.shape[2] % 32), value=torch.inf)
    return found.mixed.to(given.query.dtype), lse.float()


def to_base_2(given):
    """An operator that returns the logarithm to base 2."""
    mixed, lse = as_the_efficient_operator(given)
    return mixed, lse / torch.tensor(2.0).log()


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Makes the CPU act as a GPU on which PyTorch chooses the memory-efficient operator."""
    monkeypatch.setattr(fused, "FUSED_DEVICES", ("cpu",))
    monkeypatch.setattr(fused, "choice", lambda given: SDPBackend.EFFICIENT_ATTENTION)
    monkeypatch.setattr(trust, "VERDICTS", {})
    return lambda operator: monkeypatch.setitem(fused.OPERATORS, SDPBackend.EFFICIENT_ATTENTION, operator)


def test_a_gpu_operator_is_used_after_it_has_agreed(like_a_gpu):
    like_a_gpu(as_the_efficient_operator)
    query, key, value = operands()
    additive = torch.randn(2, 1, 1, 65)
    found = attend(query, key, value, additive, False, SCALE)
    expected = fused.explicit(FusedInputs(query, key, value, additive, False, SCALE))
    torch.testing.assert_close(found.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
    assert list(trust.VERDICTS.values()) == [""]


def test_an_operator_that_disagrees_is_not_used_and_sink_scores_stay_correct(like_a_gpu):
    model, ids = random_model(head_dim=8), random_ids(length=33)
    scores, pattern = (f"blocks.1.attn.hook_{point}" for point in ("sink_scores", "pattern"))
    expected = model.run_with_cache(ids, names_filter=pattern)[1][pattern].sum(2)
    like_a_gpu(to_base_2)
    with pytest.warns(
        RuntimeWarning, match="efficient attention operator cannot be used on cpu, torch.float32, width 8"
    ):
        found = model.run_with_cache(ids, names_filter=scores)[1][scores]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert list(map(bool, trust.VERDICTS.values())) == [True]


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({"queries": 1}, SDPBackend.EFFICIENT_ATTENTION),
        ({"width": 12}, SDPBackend.EFFICIENT_ATTENTION),
        ({}, SDPBackend.MATH),
    ],
    ids=["a cached step", "an odd width", "a backend that is not fused"],
)
def test_attend_returns_none_where_no_operator_is_for_the_operands(like_a_gpu, monkeypatch, given, backend):
    like_a_gpu(as_the_efficient_operator)
    monkeypatch.setattr(fused, "choice", lambda given: backend)
    assert attend(*operands(**given), None, False, SCALE) is None
    assert trust.VERDICTS == {}
