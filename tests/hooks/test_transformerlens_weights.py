"""Weights and the helpers of `ActivationCache`, compared with the parameters and plain PyTorch."""

import warnings

import pytest
import torch
from building import SIZES, close, plain_pass, random_hf, random_ids, random_model, shared_model, small_tokenizer

import sinklens
from sinklens.errors import PromptError, SettingError

KINDS = [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False)]
HEADS, KV_HEADS, D_MODEL, D_HEAD, LAYERS = 6, 2, SIZES["hidden_size"], SIZES["head_dim"], 3


def with_biases():
    """A Llama whose projections all have biases."""
    return random_model("llama", attention_bias=True, mlp_bias=True)


def head_with_bias(model):
    """`model`, with a bias added to its language-model head."""
    model.tree.hf.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, SIZES["vocab_size"]))
    return model


@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_attention_weights_give_the_projections_of_the_layer(architecture, causal):
    model, x = shared_model(architecture, causal), torch.randn(2, 3, D_MODEL)
    for number, layer in enumerate(model.tree.hf.model.layers):
        attn, self_attn = model.tree.blocks[number].attn, layer.self_attn
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weight, bias = getattr(attn, f"W_{letter.upper()}"), getattr(attn, f"b_{letter.upper()}")
            assert (weight.shape, bias.shape) == ((heads, D_MODEL, D_HEAD), (heads, D_HEAD))
            close(
                (torch.einsum("bpm,hmd->bphd", x, weight) + bias).flatten(-2), getattr(self_attn, f"{letter}_proj")(x)
            )
            assert torch.equal(getattr(model, f"W_{letter.upper()}")[number], weight)
            assert torch.equal(getattr(model, f"b_{letter.upper()}")[number], bias)
        z = torch.randn(2, 3, HEADS, D_HEAD)
        close(torch.einsum("bphd,hdm->bpm", z, model.W_O[number]) + model.b_O[number], self_attn.o_proj(z.flatten(-2)))
    assert (model.b_Q.abs().sum() > 0) == (architecture == "qwen2")


@pytest.mark.parametrize("make", [shared_model, with_biases])
def test_mlp_weights_give_the_output_of_the_layer(make):
    model, x = make(), torch.randn(2, 3, D_MODEL)
    for number, layer in enumerate(model.tree.hf.model.layers):
        gate, linear = x @ model.W_gate[number] + model.b_gate[number], x @ model.W_in[number] + model.b_in[number]
        close(torch.nn.functional.silu(gate) * linear @ model.W_out[number] + model.b_out[number], layer.mlp(x))
        assert torch.equal(model.tree.blocks[number].mlp.W_out, model.W_out[number])
    assert (model.W_in.shape, model.W_out.shape) == ((3, D_MODEL, 40), (3, 40, D_MODEL))


def test_embedding_and_unembedding_are_those_of_the_model():
    model, x, ids = head_with_bias(random_model()), torch.randn(2, 3, D_MODEL), random_ids()
    close(x @ model.W_U + model.b_U, model.tree.hf.lm_head(x))
    close(model.unembed(x), model.tree.hf.lm_head(x))
    assert torch.equal(model.embed.W_E, model.W_E)
    assert torch.equal(model.embed(ids), model.W_E[ids])
    assert torch.equal(shared_model().b_U, torch.zeros(SIZES["vocab_size"]))
    assert torch.equal(model.ln_final.w, model.tree.hf.model.norm.weight)


@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_circuits_pair_each_query_head_with_its_group(architecture, causal):
    model = shared_model(architecture, causal)
    for layer in range(LAYERS):
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            close(model.QK[layer, head].AB, model.W_Q[layer, head] @ model.W_K[layer, group].T)
            close(model.OV[layer, head].AB, model.W_V[layer, group] @ model.W_O[layer, head])


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_are_the_ratio_of_norms(model, mode):
    scores = model.all_composition_scores(mode)
    assert scores.head_labels[7] == model.all_head_labels[7] == "L1H1"
    ov, qk = model.OV.AB, model.QK.AB
    for left, right in [((0, 1), (1, 4)), ((0, 5), (2, 0)), ((1, 2), (2, 3))]:
        read = {"Q": qk[right], "K": qk[right].T, "V": ov[right]}[mode]
        close(scores[(*left, *right)], (ov[left] @ read).norm() / (ov[left].norm() * read.norm()))
    assert (scores[1, :, :2] == 0).all()


def test_biases_add_up_by_layer():
    model = with_biases()
    layers = model.tree.hf.model.layers
    attn, mlp = [one.self_attn.o_proj.bias for one in layers], [one.mlp.down_proj.bias for one in layers]
    close(model.accumulated_bias(0), torch.zeros(D_MODEL))
    close(model.accumulated_bias(2), attn[0] + mlp[0] + attn[1] + mlp[1])
    close(model.accumulated_bias(1, mlp_input=True), attn[0] + mlp[0] + attn[1])
    close(model.accumulated_bias(3, include_mlp_biases=False), attn[0] + attn[1] + attn[2])


# Attributions


@pytest.mark.parametrize(
    "make", [shared_model, with_biases, lambda: head_with_bias(random_model("qwen2", causal=True))]
)
def test_attributions_of_all_components_add_up_to_the_logits(make):
    model, ids = make(), random_ids()
    cache = model.run_with_cache(ids)[1]
    plain = plain_pass(model, ids).logits + model.b_U if model.b_O.sum() == 0 else model.tree.hf(ids).logits
    stack = cache.decompose_resid()
    answers = torch.tensor([3, 17])
    for tokens, column in [(7, plain[..., 7]), (answers, torch.stack([plain[0, :, 3], plain[1, :, 17]]))]:
        bias = model.b_U[tokens] if isinstance(tokens, int) else model.b_U[answers][:, None]
        close(cache.logit_attrs(stack, tokens).sum(0) + bias, column)
    each = cache.logit_attrs(stack, ids)  # a different token for each position
    close(each.sum(0) + model.b_U[ids], plain.gather(-1, ids[..., None])[..., 0])
    last = cache.logit_attrs(cache.decompose_resid(pos_slice=-1), 7, incorrect_tokens=9, pos_slice=-1)
    close(last.sum(0) + model.b_U[7] - model.b_U[9], plain[:, -1, 7] - plain[:, -1, 9])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("make", [shared_model, with_biases])
@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("expand", [True, False])
def test_heads_neurons_embedding_and_biases_add_up_to_the_stream(make, layer, expand):
    cache = make().run_with_cache(random_ids())[1]
    stack, labels = cache.get_full_resid_decomposition(layer, expand_neurons=expand, return_labels=True)
    neurons = (
        [f"L{one}N{n}" for one in range(layer) for n in range(40)] if expand else [f"{n}_mlp_out" for n in range(layer)]
    )
    assert labels == [*(f"L{one}H{h}" for one in range(layer) for h in range(6)), *neurons, "embed", "bias"]
    close(stack.sum(0), cache["resid_post", layer - 1])
    normed = cache.get_full_resid_decomposition(layer, expand_neurons=expand, apply_ln=True).sum(0)
    scale = cache["ln_final.hook_scale" if layer == 3 else f"blocks.{layer}.ln1.hook_scale"]
    close(normed, cache["resid_post", layer - 1] / scale)
    direction = torch.randn(D_MODEL)
    projected = cache.get_full_resid_decomposition(layer, expand_neurons=expand, project_output_onto=direction)
    close(projected, stack @ direction)


def test_neuron_results_are_activations_times_output_weights(model, ids):
    cache, plain = model.run_with_cache(ids)[1], plain_pass(model, ids).values
    expected = plain["blocks.1.mlp.hook_post"][..., None] * model.tree.hf.model.layers[1].mlp.down_proj.weight.T
    close(cache.get_neuron_results(1), expected)
    close(cache.get_neuron_results(1, neuron_slice=[3, 5], pos_slice=-1), expected[:, -1, [3, 5]])
    stack, labels = cache.stack_neuron_results(3, neuron_slice=4, incl_remainder=True, return_labels=True)
    assert labels == ["L0N4", "L1N4", "L2N4", "remainder"]
    close(stack[1], expected[:, :, 4])
    close(stack.sum(0), plain["blocks.2.hook_resid_post"])


def test_a_row_of_a_cache_gives_the_results_of_that_row():
    cache = shared_model().run_with_cache(random_ids())[1]
    row = cache.apply_slice_to_batch_dim(1)
    assert not row.has_batch_dim
    for apply_ln in (False, True):
        close(row.accumulated_resid(apply_ln=apply_ln), cache.accumulated_resid(apply_ln=apply_ln)[:, 1])
        close(row.stack_head_results(apply_ln=apply_ln), cache.stack_head_results(apply_ln=apply_ln)[:, 1])
        close(
            row.decompose_resid(2, mlp_input=True, apply_ln=apply_ln),
            cache.decompose_resid(2, mlp_input=True, apply_ln=apply_ln)[:, 1],
        )


def test_a_stack_for_the_final_norm_comes_with_a_warning_that_its_weight_is_not_folded(model, ids):
    cache = model.run_with_cache(ids)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.accumulated_resid(apply_ln=True)
        cache.logit_attrs(cache.decompose_resid(), tokens=5)
        cache.apply_ln_to_stack(cache.accumulated_resid(), layer=1)
    with pytest.warns(UserWarning, match=r"not folded into W_U: multiply the result by ln_final\.w before W_U"):
        scaled = cache.apply_ln_to_stack(cache.accumulated_resid())[-1]
    close((scaled * model.ln_final.w) @ model.W_U, plain_pass(model, ids).logits)


def test_the_lens_calls_no_hook_of_the_final_norm():
    """Otherwise the helpers of a cache whose hooks stay would overwrite it."""
    model, seen = shared_model(), []
    cache = model.run_with_cache(random_ids())[1]
    with model.hooks(fwd_hooks=[("ln_final.hook_scale", lambda value, hook: seen.append(value))]):
        cache.accumulated_resid(apply_ln=True)
    assert seen == []


# Directions of tokens


def test_directions_of_tokens_give_logits_of_the_normalized_stream(model, ids):
    plain = plain_pass(model, ids)
    close(plain.values["ln_final.hook_normalized"] @ model.tokens_to_residual_directions(5), plain.logits[..., 5])
    close(model.tokens_to_residual_directions(5), model.ln_final.w * model.W_U[:, 5])
    directions = model.tokens_to_residual_directions(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert directions.shape == (2, 3, D_MODEL)
    close(directions[1, 0], model.tokens_to_residual_directions(4))
    assert model.tokens_to_residual_directions(torch.tensor([4])).shape == (D_MODEL,)


def test_a_text_that_is_one_token_names_its_direction(tmp_path):
    tokenizer = small_tokenizer(tmp_path)
    model = sinklens.load(random_hf(vocab_size=len(tokenizer)), tokenizer=tokenizer)
    token = tokenizer(" apples", add_special_tokens=False).input_ids
    assert len(token) == 1
    close(model.tokens_to_residual_directions(" apples"), model.tokens_to_residual_directions(token[0]))
    cache = model.run_with_cache(random_ids())[1]
    stack = cache.decompose_resid()
    close(cache.logit_attrs(stack, " apples"), cache.logit_attrs(stack, token[0]))
    with pytest.raises(PromptError, match=r"' apples apples' is 2 tokens, \[' apples', ' apples'\]; pass text"):
        model.tree.to_single_token(" apples apples")


REFUSED = [
    (
        lambda model: [model.set_ungroup_grouped_query_attention(value) for value in (False, True)],
        SettingError,
        r"keep their 2 key/value heads; query head h reads key/value head h // 3\.",
    ),
    (lambda model: model.all_composition_scores("X"), SettingError, "mode must be one of 'Q', 'K' and 'V'; got 'X'"),
    (
        lambda model: model.accumulated_bias(3, mlp_input=True),
        SettingError,
        "layer 3 has no MLP; mlp_input=True takes layers 0 to 2",
    ),
    (
        lambda model: model.tokens_to_residual_directions("a"),
        PromptError,
        "has no tokenizer, so it accepts token ids",
    ),
    *(
        (
            lambda model, given=given: model.tokens_to_residual_directions(given),
            SettingError,
            f"tokens must be a text, an id or a tensor of ids; got {type(given).__name__}",
        )
        for given in (True, 1.5, [1, 2])
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_modes_layers_and_tokens_that_do_not_exist_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(shared_model())
