"""Directions of tokens and caches of networks that the noise level modulates, in plain torch."""

import pytest
import torch
from oracles import TIME, two_inputs

from sinklens.errors import SettingError

pytestmark = [
    pytest.mark.parametrize("oracle", ["duo", "mdlm", "gidd"], indirect=True),
    pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning"),
]


def close(found, expected, share=2e-5):
    torch.testing.assert_close(found, expected, atol=share * float(expected.abs().max()), rtol=0)


@torch.no_grad()
def test_directions_of_tokens_carry_the_final_scale(oracle):
    model, ids, token = oracle.model, two_inputs()[0], 17
    passed = oracle(ids)
    normalized, shift = passed.values["ln_final.hook_normalized"], passed.values["hook_final_shift"]
    rest = model.b_U[token] + shift @ model.W_U[:, token]
    directions = model.tokens_to_residual_directions(token, time=TIME)
    if model.config.time_conditioning:
        assert directions.shape == (2, model.cfg.d_model)
        with pytest.raises(SettingError, match="reads the noise level of its canvas; pass time="):
            model.tokens_to_residual_directions(token)
        with pytest.raises(SettingError, match="time= has 2 numbers, and tokens has 3 rows"):
            model.tokens_to_residual_directions(ids[:1].repeat(3, 1), time=TIME)
    else:
        close(directions[0], model.tokens_to_residual_directions(token))
    close(torch.einsum("bpd,bd->bp", normalized, directions) + rest[:, None], passed.logits[..., token])
    close(model.tokens_to_residual_directions(token, time=0.8), directions[1])
    each = model.tokens_to_residual_directions(ids, time=TIME)
    close(each[1, 3], model.tokens_to_residual_directions(int(ids[1, 3]), time=0.8))


@pytest.mark.fast_cases(1)
@torch.no_grad()
def test_components_of_a_cache_are_gated_and_add_up_to_the_logits(oracle):
    model, ids = oracle.model, two_inputs()[0]
    passed, cache = oracle(ids), model.run_with_cache(ids, time=TIME)[1]
    values, shift, token = passed.values, passed.values["hook_final_shift"], 17
    stack, labels = cache.get_full_resid_decomposition(expand_neurons=True, return_labels=True)
    close(stack.sum(0), values["blocks.2.hook_resid_post"])
    close(stack[labels.index("L1H2")], values["blocks.1.attn.hook_result"][:, :, 2])
    gate, down = values["blocks.1.adaln.hook_mlp_gate"], oracle.dit.weights["blocks.1.mlp.2.weight"]
    neuron = values["blocks.1.mlp.hook_post"][..., 5, None] * down[:, 5] * gate[:, None]
    close(stack[labels.index("L1N5")], neuron)
    close(cache.get_neuron_results(1, neuron_slice=5), neuron)
    close(cache.get_neuron_results(1, pos_slice=-1)[:, 5], neuron[:, -1])
    for parts in (stack, cache.decompose_resid()):
        found = cache.logit_attrs(parts, token).sum(0) + model.b_U[token] + (shift @ model.W_U[:, token])[:, None]
        close(found, passed.logits[..., token])
    answers = torch.tensor([3, 17])
    rest = model.b_U[answers] + torch.einsum("bd,db->b", shift, model.W_U[:, answers])
    found = cache.logit_attrs(stack, answers).sum(0) + rest[:, None]
    close(found, torch.stack([passed.logits[0, :, 3], passed.logits[1, :, 17]]))
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), 7, incorrect_tokens=9, pos_slice=-1).sum(0)
    difference = model.b_U[7] - model.b_U[9] + shift @ (model.W_U[:, 7] - model.W_U[:, 9])
    close(last + difference, passed.logits[:, -1, 7] - passed.logits[:, -1, 9])


@pytest.mark.fast_cases(1)
@torch.no_grad()
def test_slices_norms_and_projections_of_a_gated_cache_agree(oracle):
    model, ids = oracle.model, two_inputs()[0]
    points = lambda name: not name.endswith("hook_result")  # noqa: E731  to be made from hook_z
    cache = model.run_with_cache(ids, time=TIME, names_filter=points)[1]
    stream, direction = cache["resid_post", 1], torch.randn(model.cfg.d_model, dtype=torch.float64)
    for expand in (True, False):
        stack = cache.get_full_resid_decomposition(2, expand_neurons=expand, apply_ln=True)
        close(stack.sum(0), (stream - stream.mean(-1, keepdim=True)) / cache["blocks.2.ln1.hook_scale"])
        along = {"expand_neurons": expand, "apply_ln": True, "project_output_onto": direction}
        close(cache.get_full_resid_decomposition(2, **along), stack @ direction)
    row, whole = cache.apply_slice_to_batch_dim(1), cache.decompose_resid()
    close(row.get_full_resid_decomposition(2), cache.get_full_resid_decomposition(2)[:, 1])
    close(row.logit_attrs(whole[:, 1], 5, has_batch_dim=False), cache.logit_attrs(whole, 5)[:, 1])
    close(cache.logit_attrs(whole, 5, batch_slice=1), cache.logit_attrs(whole, 5)[:, 1])
    with pytest.raises(SettingError, match=r"use sinklens\.experiments\.logit_lens on a run"):
        cache.logit_lens()
