"""The self-check passes good models and rejects each planted fault."""

import re
from dataclasses import replace

import pytest
import torch
from building import KINDS, MIXED, close, plain_pass, random_hf, random_ids, random_model
from nnsight import NNsight, TransformersModel

from sinklens.errors import SelfCheckError
from sinklens.hooks import names
from sinklens.hooks.attention import attention
from sinklens.model import Model, load
from sinklens.model.loading import from_pretrained_model
from sinklens.model.selfcheck import check


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """`load` checks every model here, also one that equals a model that passed."""
    monkeypatch.setattr("sinklens.model.model.run_check", check)


def unchecked(causal: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    return Model(from_pretrained_model(random_hf("llama", causal, dtype), None))


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("architecture", "causal"), [*KINDS, *MIXED])
def test_good_models_pass_and_stay_as_they_are(architecture, causal, dtype):
    model, ids = random_model(architecture, causal, dtype=dtype), random_ids()
    before = model(ids)
    check(model.tree, causal)
    assert model.cfg.dtype == dtype
    assert torch.equal(model(ids), before)
    assert not any(point.watched for point in model.tree.hook_dict.values())


def make_causal(model: Model, causal: bool) -> None:
    model.config.is_causal = causal
    for module in model.tree.hf.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = causal


def deaf(explicit, monkeypatch):
    """It shows the correct map but continues with the fused kernel's output."""

    def unheard(points, operands, sinks):
        explicit(points, operands, sinks)
        return attention._fused(operands)

    monkeypatch.setattr(attention, "_explicit", unheard)


def wrongly_scaled(explicit, monkeypatch):
    """The explicit path uses a wrong scale for the scores."""

    def scaled(points, operands, sinks):
        return explicit(points, operands._replace(scale=10.0), sinks)

    monkeypatch.setattr(attention, "_explicit", scaled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (deaf, r"edits of blocks\.\*\.attn\.hook_attn_scores, blocks\.\*\.attn\.hook_pattern do not change the logits"),
        (wrongly_scaled, r"watching every point changes the logits by .*; at most .* is allowed\."),
    ],
)  # fmt: skip
def test_explicit_attention_that_is_not_the_models_is_rejected(monkeypatch, fault, text, dtype):
    fault(attention._explicit, monkeypatch)
    with pytest.raises(SelfCheckError, match=text):
        check(unchecked(dtype=dtype).tree, causal=False)


@pytest.mark.parametrize(("silent", "passes"), [([0], True), ([0, 1], True), ([0, 1, 2], False)])
def test_a_model_is_rejected_only_if_attention_adds_nothing_in_any_layer(silent, passes):
    model = unchecked()
    for layer in silent:
        model.tree.hf.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    if passes:
        check(model.tree, causal=False)
    else:
        with pytest.raises(SelfCheckError, match=r"adds nothing in any layer; sinklens\.load\(\.\.\., check=False\)"):
            check(model.tree, causal=False)


def make_layer_2_causal(model):
    attn = model.tree.hf.model.layers[2].self_attn
    attn.register_forward_pre_hook(lambda _, given, named: (given, {**named, "is_causal": True}), with_kwargs=True)


def reach_a_point_twice(model):
    mlp = model.tree.hf.model.layers[2].mlp
    mlp.register_forward_hook(lambda module, given, output: module.down_proj(module.up_proj(given[0])) * 0 + output)


def expect_another_shape(model):
    model.tree.cfg = replace(model.tree.cfg, d_mlp=39)


def halve_a_pattern(model):
    """Every pass is wrong in the same way, so comparing logits does not detect it."""
    model.tree.add_perma_hook("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern * 0.5)


def break_weight(name):
    def fault(model):
        model.tree.hf.get_parameter(name).data[3, 3] = torch.nan  # 3 is a token of the check's prompt

    return fault


NOT_FINITE = "logits are not finite in a plain pass; its weights are broken"
FAULTS = [
    (False, lambda model: make_causal(model, True), r"layer 0 never attends .* the causal mask is still on"),
    (False, make_layer_2_causal, "layer 2 never attends to later positions"),
    (True, lambda model: make_causal(model, False), r"layer 0 attends to later positions \(mass [\d.]+\), but its fam"),
    (False, lambda model: model.tree.hf.set_attn_implementation("sdpa"),
     r"0 of 3 layers showed a pattern; .*attn_implementation is 'sdpa'"),
    (False, reach_a_point_twice, r"blocks\.2\.mlp\.hook_pre_linear was reached 2 times"),
    (False, expect_another_shape, r"blocks\.0\.mlp\.hook_pre showed a value of shape \[1, 6, 40\], but \[1, 6, 39\]"),
    (False, halve_a_pattern, r"rows of the pattern of layer 1 miss 1 by 0\.5\d*; at most .* cannot be trusted"),
    *((False, break_weight(name), NOT_FINITE) for name in
      ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight")),
]  # fmt: skip


@pytest.mark.parametrize(("causal", "fault", "text"), FAULTS)
def test_a_model_with_one_fault_is_rejected(causal, fault, text):
    model = unchecked(causal)
    fault(model)
    with pytest.raises(SelfCheckError, match=text):
        check(model.tree, causal)


def test_a_layer_with_a_replaced_forward_is_rejected_with_a_point_that_it_skips():
    hf = random_hf()
    layer = hf.model.layers[1]
    forward = type(layer).forward
    layer.forward = lambda *given, **named: forward(layer, *given, **named)
    text = r"blocks\.1\.hook_resid_pre was reached 0 times in one pass, and 4 other points not exactly once"
    with pytest.raises(SelfCheckError, match=text):
        load(hf)


EDITABLE = [f"blocks.1.{name}" for name, _ in names.block_specs() if not name.endswith(names.READ_ONLY)]
EDITABLE += ["hook_embed", "ln_final.hook_scale", "ln_final.hook_normalized"]


INSIDE_EXPERTS = [f"mlp.{spec.name}" for spec in (*names.EXPERTS, names.SHARED)]
OF_A_MIXTURE = [*INSIDE_EXPERTS, "attn.hook_q_normed", "attn.hook_k_normed", "mlp.hook_pre"]  # the last: dense layer 0


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize(
    ("architecture", "name"),
    [*(("llama", name) for name in EDITABLE), *(("glm4_moe", f"blocks.1.{kind}") for kind in OF_A_MIXTURE)],
)
def test_a_kind_of_point_whose_edits_have_no_effect_is_rejected_by_name(architecture, name):
    """The point shows its value and ignores edits, in every layer."""
    model = unchecked() if architecture == "llama" else random_model(architecture)
    deaf = name.replace("blocks.1.", "blocks.*.")
    for point_name, point in model.tree.hook_dict.items():
        if re.sub(r"^blocks\.\d+\.", "blocks.*.", point_name) == deaf:
            forward = point.forward
            point.forward = lambda x, forward=forward: (forward(x), x)[1]
    with pytest.raises(SelfCheckError, match=rf"edits of {re.escape(deaf)} do not change the logits"):
        check(model.tree, causal=False)


def without_mlps(layer):
    layer.mlp.down_proj.weight.data.zero_()


def with_equal_values(layer):
    layer.self_attn.v_proj.weight.data.zero_()
    layer.self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(layer.self_attn.v_proj.out_features))


@pytest.mark.parametrize("change", [without_mlps, with_equal_values])
def test_a_model_with_unusual_layers_passes(change):
    model = unchecked()
    for layer in model.tree.hf.model.layers:
        change(layer)
    check(model.tree, causal=False)
    assert load(random_hf(num_hidden_layers=1)).cfg.n_layers == 1


def wrap_in_a_language_model(hf):
    return TransformersModel(hf, task="text-generation", tokenizer=load("tiny-llama", check=False).tokenizer)


def source_a_layer(hf):
    wrapped = NNsight(hf)
    assert "self_attn" in str(wrapped.model.layers[1].source)
    return wrapped


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("wrap", "first"),
    [(NNsight, True), (NNsight, False), (wrap_in_a_language_model, True), (source_a_layer, True)],
)
def test_a_model_that_nnsight_wraps_too_shows_every_point_to_both(wrap, first):
    hf, ids = random_hf(), random_ids()
    wrapped = wrap(hf) if first else None
    model = load(hf)
    wrapped = wrapped or wrap(hf)
    logits, cache = model.run_with_cache(ids)
    plain = plain_pass(model, ids)
    assert set(cache) == set(plain.values)
    for name, value in plain.values.items():
        close(cache[name], value)
    close(logits, plain.logits)
    with wrapped.trace(ids):
        kept = wrapped.model.layers[1].output.save()
    close(kept, cache["blocks.1.hook_resid_post"])
    with model.trace(ids):
        read = model.blocks[1].hook_resid_mid.output.save()
    close(read, cache["blocks.1.hook_resid_mid"])


def test_the_check_looks_points_up_together(monkeypatch):
    """Each of many points looked up among all of them took more time than the passes."""
    model, lookups = unchecked(), []
    listed = type(model.tree).point_names
    monkeypatch.setattr(type(model.tree), "point_names", lambda tree: lookups.append(tree) or listed(tree))
    check(model.tree, causal=False)
    assert len(lookups) < len(listed(model.tree)) / 4
