"""The tree of points: values, TransformerLens's names of the same model, caches and hooks."""

import pytest
import torch
from building import (
    EXPERTS,
    KINDS,
    MIXED,
    PADDINGS,
    SIZES,
    bridge_over,
    close,
    plain_pass,
    random_hf,
    random_ids,
    shared_model,
)
from transformers import DynamicCache

import sinklens
from sinklens.errors import HookNameError, SinklensError
from sinklens.hooks import aliases, names, table

BATCH, LENGTH = 2, 7
AXES = {
    "batch": BATCH,
    "pos": LENGTH,
    "query": LENGTH,
    "key": LENGTH,
    "query|1": 1,
    "1": 1,
    "head": SIZES["num_attention_heads"],
    "kv_head": SIZES["num_key_value_heads"],
    "d_model": SIZES["hidden_size"],
    "d_head": SIZES["head_dim"],
    "d_mlp": SIZES["intermediate_size"],
    "expert": 6,
}


def in_a_pass(model) -> list[str]:
    """The points that a forward pass reaches: all except the sampler's."""
    return [name for name in model.hook_names() if not name.startswith("denoise.")]


def everything(name: str) -> bool:
    return True


@pytest.mark.parametrize(("architecture", "causal"), [*KINDS, *MIXED])
def test_every_point_is_reached_once_in_the_order_of_hook_names(architecture, causal):
    model, passed = shared_model(architecture, causal), []
    model.run_with_hooks(random_ids(), fwd_hooks=[(everything, lambda value, hook: passed.append(hook.name))])
    assert passed == in_a_pass(model) == list(plain_pass(model, random_ids()).values)


@pytest.mark.fast_cases(7)
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), [*KINDS, *MIXED])
def test_every_point_has_the_value_of_plain_torch_and_the_shape_of_the_table(model, ids, architecture, real):
    logits, cache = model.run_with_cache(ids, attention_mask=real)
    plain = plain_pass(model, ids, real)
    axes = {name: spec.axes for name, spec in table(names.EVERY)}
    sizes = AXES | {"k": EXPERTS.get(architecture, {}).get("num_experts_per_tok", 0)}
    assert set(cache.keys()) == set(plain.values)
    for name, value in plain.values.items():
        torch.testing.assert_close(
            cache[name], value, atol=1e-4, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        row = ".".join("{l}" if part.isdecimal() else part for part in name.split("."))
        assert list(cache[name].shape) == [sizes[axis] for axis in axes[row].split()]
    close(logits, plain.logits)
    with torch.no_grad():  # what is only read changes no bit
        assert torch.equal(model.run_with_cache(ids, attention_mask=real)[0], model(ids, attention_mask=real))


ADDED_POINTS = ("hook_attn_mask", *names.READ_ONLY)


def test_names_shapes_and_values_are_those_of_transformerlens_in_every_spelling(tmp_path):
    model, bridge, ids = shared_model("llama", causal=True), bridge_over(random_hf(causal=True), tmp_path), random_ids()
    bridge.set_use_attn_result(True)
    logits, cache = model.run_with_cache(ids)
    expected, bridge_cache = bridge.run_with_cache(ids)
    bridge.set_use_attn_result(False)
    respelled = bridge.run_with_cache(ids)[1]
    close(logits, expected)
    added = {name for name in set(cache.keys()) if name.endswith(ADDED_POINTS)}
    assert set(cache.keys()) - set(bridge_cache.keys()) == added
    shared = set(cache.keys()) & set(bridge_cache.keys())
    values = {name: respelled[name] for name in aliases(3)} | {name: bridge_cache[name] for name in shared}
    for name, value in values.items():
        if name.endswith("hook_attn_scores"):  # the bridge hides keys with the smallest finite number
            value = value.masked_fill(value == torch.finfo(value.dtype).min, -torch.inf)
        torch.testing.assert_close(
            cache[name], value, atol=1e-4, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("pos_slice", [-1, (2, 5), [0, 3, 6]])
def test_a_cache_can_be_cut_to_some_positions(model, ids, pos_slice):
    full, cut = model.run_with_cache(ids)[1], model.run_with_cache(ids, pos_slice=pos_slice)[1]
    index = slice(*pos_slice) if isinstance(pos_slice, tuple) else torch.tensor(pos_slice).view(-1)  # keeps the axis
    for name in in_a_pass(model):
        if name.endswith(("hook_pattern", "hook_attn_scores")):
            expected = full[name][:, :, index]
        elif name.endswith(("hook_sink_scores", "hook_attn_mask")):
            expected = full[name][..., index]
        else:
            expected = full[name][:, index]
        assert torch.equal(cut[name], expected), name


@pytest.mark.parametrize("kept", [["hook_z", "hook_resid_post"], ["hook_z", "hook_result", "hook_resid_post"]])
def test_head_results_and_the_remainder_add_up_to_the_stream(model, ids, kept):
    """From the cached results, or from hook_z and W_O if results were not cached."""
    cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith(tuple(kept)))[1]
    stack, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels == [*(f"L{layer}H{head}" for layer in range(3) for head in range(6)), "remainder"]
    plain = plain_pass(model, ids).values
    for layer in range(3):
        heads = stack[6 * layer : 6 * layer + 6]
        close(heads.movedim(0, 2), plain[f"blocks.{layer}.attn.hook_result"])
        close(heads.sum(0), plain[f"blocks.{layer}.hook_attn_out"])
    close(stack.sum(0), plain["blocks.2.hook_resid_post"])


def test_the_sizes_are_those_of_the_weights(model):
    cfg, layer = model.cfg, model.tree.hf.model.layers[0]
    d_vocab, d_model = model.tree.hf.lm_head.weight.shape
    expected = {
        "d_vocab": d_vocab, "d_vocab_out": d_vocab, "d_model": d_model, "d_mlp": len(layer.mlp.up_proj.weight),
        "n_layers": len(model.tree.hf.model.layers), "n_heads": len(layer.self_attn.q_proj.weight) // cfg.d_head,
        "n_key_value_heads": len(layer.self_attn.k_proj.weight) // cfg.d_head, "act_fn": model.config.hidden_act,
        "attn_scale": pytest.approx(1 / layer.self_attn.scaling), "eps": layer.input_layernorm.variance_epsilon,
    }  # fmt: skip
    assert {name: getattr(cfg, name) for name in expected} == expected
    assert cfg.to_dict()["n_layers"] == cfg.n_layers


def halve(value, hook):
    return value / 2


def fail(value, hook):
    raise ZeroDivisionError("from a hook")


@pytest.mark.parametrize("causal", [False, True])
def test_the_logits_are_unchanged_after_any_kind_of_run(model, ids):
    before = model(ids)
    model.run_with_cache(ids)
    model.run_with_hooks(ids, fwd_hooks=[(everything, lambda value, hook: None)])
    assert not torch.equal(model.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_z", halve)]), before)
    with pytest.raises(ZeroDivisionError, match="from a hook"):
        model.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_pattern", halve), ("blocks.1.hook_mlp_out", fail)])
    with pytest.raises(ZeroDivisionError, match="from the block"), model.hooks(fwd_hooks=[(everything, halve)]):
        raise ZeroDivisionError("from the block")
    with pytest.raises(HookNameError, match="nothing_like_it"):
        model.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_z", halve), ("nothing_like_it", halve)])
    assert not any(point.watched for point in model.tree.hook_dict.values())
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize(
    "spelling",
    ["blocks.2.attn.hook_z", "blocks.2.attn.o.hook_in", "blocks.-1.attn.hook_z", lambda name: "2.attn.hook_z" in name],
)
def test_hooks_are_set_in_any_spelling(model, ids, spelling):
    expected = plain_pass(model, ids, edits={"blocks.2.attn.hook_z": lambda z: z / 2}).logits
    close(model.run_with_hooks(ids, fwd_hooks=[(spelling, halve)]), expected)
    model.tree.add_hook(spelling, halve)
    added = model(ids)
    model.tree.reset_hooks()
    close(added, expected)


def test_a_permanent_hook_stays_until_permanent_hooks_are_removed(model, ids):
    plain, halved = model(ids), model.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_z", halve)])
    model.tree.add_perma_hook("blocks.-2.attn.hook_z", halve)
    model.tree.reset_hooks()
    assert torch.equal(model(ids), halved)
    model.tree.reset_hooks(including_permanent=True)
    assert torch.equal(model(ids), plain)


@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_steps_with_a_cache_give_the_logits_of_one_pass(architecture, real):
    model, ids = shared_model(architecture, causal=True), random_ids()
    mask = torch.ones_like(ids) if real is None else real
    past, parts = DynamicCache(), []
    for start, stop in [(0, 4), (4, 5), (5, 7)]:
        parts.append(model.tree.hidden(ids[:, start:stop], mask[:, :stop], past))
    logits = model.tree.head(torch.cat(parts, dim=1))
    counted = mask.bool()
    close(logits[counted], model(ids, attention_mask=real)[counted])


def gradients(hf, logits) -> dict[str, torch.Tensor]:
    hf.zero_grad()
    logits.sum().backward()
    return {name: parameter.grad.clone() for name, parameter in hf.named_parameters()}


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("watched", [None, "hook_sink_scores", ""], ids=["nothing", "sink scores", "everything"])
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_gradients_of_a_hooked_pass_are_those_of_plain_torch(model, ids, watched):
    expected = gradients(model.tree.hf, plain_pass(model, ids).logits)
    hooks = [] if watched is None else [(lambda name: name.endswith(watched), lambda value, hook: None)]
    found = gradients(model.tree.hf, model.run_with_hooks(ids, fwd_hooks=hooks))
    model.tree.hf.zero_grad()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=2e-3, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", ["blocks.1.attn.hook_z", "blocks.1.attn.hook_pattern", "blocks.-2.hook_in"])
def test_a_backward_hook_sees_the_gradient_of_its_point(name):
    model, ids, seen = shared_model(), random_ids(), {}
    with model.hooks(bwd_hooks=[(name, lambda gradient, hook: seen.update(found=gradient))]):
        model(ids).sum().backward()
    model.tree.hf.zero_grad()
    plain = plain_pass(model, ids)
    (expected,) = torch.autograd.grad(plain.logits.sum(), plain.values[model.tree.resolve(name)])
    torch.testing.assert_close(seen["found"], expected, atol=1e-3, rtol=1e-3)


def test_a_backward_hook_that_zeroes_the_gradient_cuts_off_earlier_parameters(model, ids):
    with model.hooks(bwd_hooks=[("blocks.2.attn.hook_z", lambda gradient, hook: torch.zeros_like(gradient))]):
        found = gradients(model.tree.hf, model(ids))
    model.tree.hf.zero_grad()
    detached = plain_pass(model, ids, edits={"blocks.2.attn.hook_z": lambda z: z.detach()})
    expected = torch.autograd.grad(
        detached.logits.sum(), [model.tree.W_E, model.tree.hf.model.layers[2].self_attn.o_proj.weight]
    )
    assert (found["model.layers.2.self_attn.v_proj.weight"] == 0).all()
    torch.testing.assert_close(found["model.embed_tokens.weight"], expected[0], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(found["model.layers.2.self_attn.o_proj.weight"], expected[1], atol=2e-3, rtol=1e-3)


@pytest.mark.extended
@pytest.mark.parametrize("part", ["", "model", "model.layers.1", "model.layers.0.mlp", "a compiled copy"])
def test_a_compiled_model_is_refused(part):
    model = sinklens.load(random_hf("llama", causal=False))
    if part == "a compiled copy":
        layer, part = model.tree.hf.model.layers[1], "model.layers.1.mlp"
        layer.mlp = torch.compile(layer.mlp)
    else:
        model.tree.hf.get_submodule(part).compile()
    for call in (model, lambda ids: model.run_with_hooks(ids, fwd_hooks=[]), lambda ids: sinklens.generate(model, ids)):
        with pytest.raises(SinklensError, match=f"{part or 'the model'} was compiled"):
            call(random_ids())
