"""An edit at any point has the same effect as in plain PyTorch."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from building import KINDS, close, left_padding, plain_pass, random_hf, random_ids, random_model, shared_model

from sinklens.hooks import HookTree, architecture_of, names
from sinklens.model import Model
from sinklens.model.loading import from_pretrained_model

LAYER = [f"blocks.1.{name}" for name, _ in names.block_specs()]
READ_ONLY = tuple(f"blocks.1.attn.{name}" for name in names.READ_ONLY)
EDITABLE = [
    "hook_embed",
    *(name for name in LAYER if name not in READ_ONLY),
    "ln_final.hook_scale",
    "ln_final.hook_normalized",
]


def shift(value):
    """`value` with a different number added to each element."""
    return value + 0.3 * torch.arange(value.numel()).cos().view(value.shape)


def hooked(model, ids, edits, **kwargs):
    hooks = [(name, lambda value, hook: edits[hook.name](value)) for name in edits]
    return model.run_with_hooks(ids, fwd_hooks=hooks, **kwargs)


@pytest.mark.fast_cases(30)
@pytest.mark.parametrize("name", EDITABLE)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_an_edit_has_the_same_effect_as_in_plain_torch(model, ids, name):
    expected = plain_pass(model, ids, edits={name: shift}).logits
    assert (expected - plain_pass(model, ids).logits).abs().max() > 1e-3
    close(hooked(model, ids, {name: shift}), expected)


@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_edits_at_all_points_at_once_combine(architecture, causal):
    model, ids, real = shared_model(architecture, causal), random_ids(), left_padding()
    edits = dict.fromkeys(EDITABLE, shift)
    # Real queries must not read padding, whose stream depends on the attention kernel of the layer below.
    edits["blocks.1.attn.hook_pattern"] = lambda pattern: torch.where(real[:, None, None], shift(pattern), pattern)
    close(hooked(model, ids, edits, attention_mask=real)[real], plain_pass(model, ids, real, edits).logits[real])


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("name", EDITABLE)
def test_an_edit_in_a_trace_block_has_the_same_effect(model, ids, name):
    with torch.no_grad():
        expected = hooked(model, ids, {name: shift})
        with model.trace(ids):
            model.get(name).output = shift(model.get(name).output)
            assigned = model.output.save()
        with model.trace(ids):
            model.get(name).output[:] = shift(model.get(name).output)
            in_place = model.output.save()
    assert torch.equal(assigned, expected)
    assert torch.equal(in_place, expected)


def test_a_biased_output_projection_adds_its_bias_once_to_the_results():
    model, ids = random_model(attention_bias=True), random_ids()
    assert model.tree.hf.model.layers[1].self_attn.o_proj.bias.abs().min() > 0.1
    for name in ("blocks.1.attn.hook_result", "blocks.1.attn.hook_z", "blocks.1.attn.hook_v"):
        close(hooked(model, ids, {name: shift}), plain_pass(model, ids, edits={name: shift}).logits)
        close(hooked(model, ids, {name: lambda value: value}), plain_pass(model, ids).logits)


class Counting(ModelHook):
    """Replaces accelerate's hook that moves a layer's inputs between devices."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


@pytest.mark.parametrize("under_nnsight", [False, True])
def test_layers_wrapped_by_accelerate_stay_wrapped_and_reach_their_points(under_nnsight):
    hf, counting, ids = random_hf(), Counting(), random_ids()
    for layer in hf.model.layers:
        add_hook_to_module(layer, counting)
    wrapped = Model(from_pretrained_model(hf, None)) if under_nnsight else HookTree(hf, architecture_of("llama"))
    name = "blocks.1.hook_resid_mid"
    assert torch.equal(hooked(wrapped, ids, {name: shift}), hooked(shared_model(), ids, {name: shift}))
    assert counting.calls == 3


def test_a_tapped_layer_keeps_its_transformers_class_and_hidden_states(ids):
    layer, untapped = shared_model().tree.hf.model.layers[0], random_hf().model.layers[0]
    assert isinstance(layer, type(untapped))
    assert type(layer).__name__ == type(untapped).__name__
    hidden = shared_model().tree.hf(ids, output_hidden_states=True, use_cache=False).hidden_states
    for number in range(3):
        close(hidden[number], plain_pass(shared_model(), ids).values[f"blocks.{number}.hook_resid_pre"])
