"""Initial models: their sizes, what they start from, and the loss that balances experts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from training import RECIPES, initial, loop
from training.corpus import build_corpus


def divergence(model, start, rows):
    """KL(start ‖ model) of next tokens, under a causal mask."""
    causal = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        wanted = start(rows).log_softmax(dim=-1)
        found = model(input_ids=rows, attention_mask=causal).logits.log_softmax(dim=-1)
    return (wanted.exp() * (wanted - found)).sum(dim=-1).mean().item()


def test_fitted_norms_make_tiny_sdar_start_as_tiny_llama(tiny_llama, monkeypatch):
    monkeypatch.setattr(initial, "FIT_STEPS", 8)
    recipe = replace(RECIPES["tiny-sdar"], problems=400)
    tokenizer = loop.make_tokenizer(recipe)
    corpus = build_corpus(tokenizer, recipe)
    model = loop.build_model(recipe, tokenizer)
    _, rows = corpus.batch(recipe.seed, 1, 16)
    before = divergence(model, tiny_llama, rows)
    others = {name: value.clone() for name, value in model.named_parameters() if "q_norm" not in name}
    initial.fit_norms(model, recipe, tokenizer, corpus)
    after = divergence(model, tiny_llama, rows)
    assert before > 1
    assert after < 0.2 * before
    changed = {name for name, value in others.items() if not torch.equal(value, model.get_parameter(name))}
    assert changed == {f"model.layers.{layer}.self_attn.k_norm.weight" for layer in range(recipe.n_layers)}
    assert all(value.grad is None for value in model.parameters())


def test_the_balance_loss_is_the_share_of_tokens_times_the_mean_probability_of_each_expert(small):
    recipe = small("tiny-llada-moe")
    tokenizer = loop.make_tokenizer(recipe)
    model = loop.build_model(recipe, tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(20)
    ids = torch.randint(3, 600, (8, 40))
    losses = [
        loop._masked_loss(model, replace(recipe, balance_weight=weight), ids, 16, tokenizer.mask_token_id, 3).item()
        for weight in (0.0, 10.0)
    ]
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + 3 + 500_000_003)
    noisy, _, _ = loop.corrupt(ids, 16, tokenizer.mask_token_id, generator)
    tokens, probability, total = torch.zeros(8), torch.zeros(8), 0
    inputs = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, given: inputs.append((module.gate.weight, given[0])))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=noisy)
        for weight, given in inputs:
            for row in F.linear(given.flatten(0, 1), weight).softmax(dim=-1):
                tokens[row.topk(2).indices] += 1
                probability += row
                total += 1
    for hook in hooks:
        hook.remove()
    expected = 8 * (tokens / total * probability / total).sum()
    assert expected > 2.001  # perfectly balanced experts have 2, the number of experts per token
    assert (losses[1] - losses[0]) / 10 == pytest.approx(expected.item(), rel=1e-3)
