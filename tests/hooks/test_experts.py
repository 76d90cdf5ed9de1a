"""Points of a mixture of experts: routing rules, edits of routing, and layers that have no experts."""

import pytest
import torch
from building import (
    EXPERTS,
    MIXED,
    SIZES,
    close,
    left_padding,
    plain_pass,
    random_hf,
    random_ids,
    random_model,
    shared_model,
)
from torch import Tensor

from sinklens.errors import HookNameError, SettingError
from sinklens.hooks.experts import ROUTING
from sinklens.hooks.names import EXPERTS as SPECS

ARCHITECTURES = sorted(EXPERTS)
MLP = "blocks.1.mlp"
RULES = [
    (rule, architecture, config)
    for rule, architecture in (("softmax", "qwen3_moe"), ("grouped sigmoid", "glm4_moe"))
    for config in ({}, {"norm_topk_prob": False})
]


def edited(architecture: str, causal: bool, name: str, edit, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits under an edit, by sinklens and by plain torch; the edit is checked to matter."""
    model, ids = shared_model(architecture, causal), random_ids()
    found = model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: edit(value))], attention_mask=real)
    plain = plain_pass(model, ids, real)
    expected = plain_pass(model, ids, real, {name: edit}).logits
    kept = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    assert (expected - plain.logits)[kept].abs().max() > 1e-3
    return found[kept], expected[kept]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rule", "architecture", "settings"), RULES)
def test_a_routing_rule_equals_transformers_router_bit_for_bit(rule, architecture, settings, dtype):
    router = random_hf(architecture, dtype=dtype, **settings).model.layers[1].mlp.gate
    logits, weights, indices = router(torch.randn(500, SIZES["hidden_size"], dtype=dtype))
    chosen = ROUTING[rule].choose(router, logits)
    assert torch.equal(chosen, indices)
    assert torch.equal(ROUTING[rule].weigh(router, logits, chosen), weights)


def without_the_best(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits == logits.amax(dim=-1, keepdim=True), -torch.inf)


EDITS = {
    "hook_router_logits": lambda logits: logits.flip(-1),
    "hook_expert_indices": lambda indices: (indices + 1) % 6,
    "hook_expert_weights": lambda weights: torch.cat([torch.zeros_like(weights[..., :1]), weights[..., 1:]], dim=-1),
    "hook_expert_out": lambda out: out.flip(-2) * 0.7,
}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("real", [None, left_padding()], ids=["unpadded", "padded"])
@pytest.mark.parametrize("point", EDITS)
@pytest.mark.parametrize(("architecture", "causal"), MIXED)
def test_an_edit_of_routing_has_the_same_effect_as_in_plain_torch(architecture, causal, point, real):
    close(*edited(architecture, causal, f"{MLP}.{point}", EDITS[point], real))


@pytest.mark.parametrize(
    ("architecture", "name", "edit"),
    [
        ("glm4_moe", f"{MLP}.hook_shared_out", lambda out: out * -1),
        *(
            (one, f"blocks.1.attn.hook_{letter}_normed", lambda x: x.flip(2))
            for one in ARCHITECTURES
            for letter in "qk"
        ),
    ],
)
def test_an_edit_beside_the_routing_has_the_same_effect_as_in_plain_torch(architecture, name, edit):
    close(*edited(architecture, False, name, edit))


def test_a_softmax_router_avoids_experts_with_minus_infinity():
    model, ids, chosen = shared_model("qwen3_moe"), random_ids(), []
    name = f"{MLP}.hook_router_logits"
    hooks = [
        (name, lambda value, hook: without_the_best(value)),
        (f"{MLP}.hook_expert_indices", lambda value, hook: chosen.append(value)),
    ]
    assert model.run_with_hooks(ids, fwd_hooks=hooks).isfinite().all()
    assert not (chosen[0] == plain_pass(model, ids).values[name].argmax(dim=-1, keepdim=True)).any()
    close(*edited("qwen3_moe", False, name, without_the_best))


REFUSED = [
    *(
        (
            lambda outside=outside: edited(
                "qwen3_moe", False, f"{MLP}.hook_expert_indices", lambda value: torch.full_like(value, outside)
            ),
            rf"blocks\.1\.mlp\.hook_expert_indices was set to {outside}, but the layer has 6 experts",
        )
        for outside in (-1, 6)
    ),
    (
        lambda: shared_model("qwen3_moe").tree.W_in,
        "the MLP of layer 1 is a mixture of experts, so it has no W_gate, W_in",
    ),
    (lambda: shared_model("qwen3_moe").blocks[1].mlp.W_in, "the MLP of layer 1 is a mixture of experts"),
    (lambda: shared_model("qwen3_moe").W_pos, "this model rotates queries and keys by position"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_experts_and_weights_that_do_not_exist_are_refused(call, text):
    with pytest.raises(SettingError, match=text):
        call()


def test_a_weight_that_does_not_exist_is_no_attribute():
    model = shared_model("qwen3_moe")
    assert not any(hasattr(*of) for of in ((model, "W_pos"), (model, "W_in"), (model.blocks[1].mlp, "W_in")))


def test_the_experts_run_once_while_their_outputs_are_unwatched(monkeypatch):
    model, ids, called = shared_model("qwen3_moe"), random_ids(), []
    cls = type(model.tree.hf.model.layers[1].mlp.experts)
    gated = cls._apply_gate  # every implementation calls it once per pass
    monkeypatch.setattr(cls, "_apply_gate", lambda self, value: (called.append(self), gated(self, value))[1])
    model(ids)
    assert len(called) == 2  # layers 1 and 2
    model.run_with_cache(ids, names_filter=f"{MLP}.hook_expert_out")
    assert len(called) == 5


@pytest.mark.parametrize(
    ("architecture", "name", "text"),
    [
        *(("qwen3_moe", f"blocks.0.mlp.{spec.name}", "has no hook_.* in this model; its points are hook_pre, ")
          for spec in SPECS),
        ("llama", "blocks.2.mlp.hook_router_logits", "has no hook_router_logits in this model"),
        ("qwen3_moe", "blocks.1.mlp.hook_pre", "has no hook_pre in this model; its points are hook_router_logits, "),
        ("qwen3_moe", f"{MLP}.hook_shared_out", "has no hook_shared_out in this model"),
        ("llama", "blocks.1.attn.hook_q_normed", "has no hook_q_normed in this model"),
    ],
)  # fmt: skip
def test_a_point_of_a_part_that_a_layer_lacks_is_refused_with_the_reason(model, name, text):
    with pytest.raises(HookNameError, match=text):
        model.run_with_cache(random_ids(), names_filter=name)
    assert name not in model.hook_names()


@pytest.mark.parametrize(
    ("spelling", "point"),
    [
        ("blocks.-1.mlp.gate.hook_out", "blocks.2.mlp.hook_router_logits"),
        ("blocks.0.mlp.gate.hook_out", "blocks.0.mlp.hook_pre"),
        ("blocks.1.attn.q_norm.hook_out", "blocks.1.attn.hook_q_normed"),
    ],
)
def test_transformerlens_4_spellings_mean_the_router_or_the_gate_by_layer(spelling, point):
    assert shared_model("qwen3_moe").tree.resolve(spelling) == point


def test_the_missing_bias_is_zero():
    model = random_model("qwen3_moe")
    assert torch.equal(model.tree.b_out, torch.zeros(3, SIZES["hidden_size"]))
    close(model.tree.accumulated_bias(3), torch.zeros(SIZES["hidden_size"]))
