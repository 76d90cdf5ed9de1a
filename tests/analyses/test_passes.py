"""Passes by hand: with hidden keys, with stale keys, and what values write."""

import numpy as np
import pytest
import torch

from sinklens.analyses.passes import (
    TextCanvas,
    earlier_canvas,
    log_ratio,
    loss,
    losses,
    no_ops,
    outdating,
    read,
    uniform,
    written,
)
from sinklens.tasks import held_out

PROBLEMS = [problem.prompt for problem in held_out(1)]


def test_uniform_attention_gives_later_keys_less_only_if_they_are_seen_by_fewer_queries():
    torch.testing.assert_close(uniform(5, causal=False), torch.ones(5))
    naive = [sum(1 / (query + 1) for query in range(key, 5)) for key in range(5)]
    torch.testing.assert_close(uniform(5, causal=True), torch.tensor(naive))


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama", "tiny-dream"])
def test_a_pass_with_hidden_keys_is_one_whose_attention_is_divided_among_the_others(name, toy):
    model = toy(name)
    ids = model.encode(PROBLEMS[0])[0][0]
    masked = torch.zeros(len(ids), dtype=torch.bool)
    masked[5:9] = not model.causal
    canvas = TextCanvas(ids, masked)
    hidden = (
        torch.rand(model.cfg.n_layers, model.cfg.n_heads, len(ids), generator=torch.Generator().manual_seed(0)) < 0.2
    )

    def rescale(pattern, hook):
        layer = int(hook.name.split(".")[1])
        for head in range(model.cfg.n_heads):
            for query in range(len(ids)):
                for key in range(len(ids)):
                    if hidden[layer, head, key] and key != query:
                        pattern[0, head, query, key] = 0
        return pattern / pattern.sum(dim=-1, keepdim=True)

    points = [(f"blocks.{layer}.attn.hook_pattern", rescale) for layer in range(model.cfg.n_layers)]
    logits = model.run_with_hooks(canvas.tokens(model)[None], fwd_hooks=points)[0].double()
    predicted = range(1, len(ids)) if model.causal else [at for at in range(len(ids)) if masked[at]]
    shift = model.causal or name == "tiny-dream"
    expected = np.mean([-logits[at - shift].log_softmax(-1)[ids[at]].item() for at in predicted])
    plain = read(model, canvas)
    late = hidden & (torch.arange(len(hidden)) == 2)[:, None, None]  # passes that begin at layer 2
    found = losses(model, canvas, plain, torch.stack([torch.zeros_like(hidden), hidden, late]))
    assert found[:2] == pytest.approx([plain.loss, expected], abs=1e-5)
    assert losses(model, canvas, plain, late[None]) == pytest.approx(found[2:], abs=1e-6)
    assert plain.loss != pytest.approx(expected, abs=1e-4)


def test_a_pass_with_stale_keys_reads_rotated_keys_and_values_of_the_earlier_canvas(tiny_llada):
    canvas, earlier = canvases(tiny_llada)
    stale = torch.rand(tiny_llada.cfg.n_layers, tiny_llada.cfg.n_heads, len(canvas.ids)) < 0.3
    _, cache = tiny_llada.run_with_cache(earlier.tokens(tiny_llada)[None])

    def outdate(value, hook):
        layer = int(hook.name.split(".")[1])
        for head in range(value.shape[2]):
            for key in range(value.shape[1]):
                if stale[layer, head, key]:
                    value[0, key, head] = cache[hook.name][0, key, head]
        return value

    points = [f"blocks.{layer}.attn.{name}" for layer in range(len(stale)) for name in ("hook_rot_k", "hook_v")]
    tokens = canvas.tokens(tiny_llada)[None]
    logits = tiny_llada.run_with_hooks(tokens, fwd_hooks=[(point, outdate) for point in points])[0].double()
    expected = torch.nn.functional.cross_entropy(logits[canvas.masked], canvas.ids[canvas.masked]).item()
    before, plain = read(tiny_llada, earlier), read(tiny_llada, canvas)
    assert loss(tiny_llada, canvas, outdating(stale, before)) == pytest.approx(expected, abs=1e-5)
    assert plain.loss != pytest.approx(expected, abs=1e-3)
    assert loss(tiny_llada, canvas, outdating(stale, plain)) == pytest.approx(plain.loss, abs=1e-6)


def canvases(model):
    """A canvas with twelve masks, and one with four more."""
    ids = model.encode(PROBLEMS[0])[0][0]
    masked = torch.zeros(len(ids), dtype=torch.bool)
    masked[5:17] = True
    earlier = earlier_canvas(TextCanvas(ids, masked), 4, np.random.default_rng(0))
    assert earlier.masked.sum() == 16
    assert (earlier.masked >= masked).all()
    assert not earlier.masked[0]
    return TextCanvas(ids, masked), earlier


def test_what_a_value_writes_is_its_part_of_the_output_in_medians(tiny_llada):
    ids = tiny_llada.encode(PROBLEMS[0])[0][0]
    found = written(tiny_llada, read(tiny_llada, TextCanvas(ids, torch.ones(len(ids), dtype=torch.bool))))
    _, cache = tiny_llada.run_with_cache(torch.full_like(ids, tiny_llada.mask_token_id)[None])
    value, weight = cache["blocks.1.attn.hook_v"][0], tiny_llada.blocks[1].attn.W_O
    for head, key in ((0, 3), (5, 20)):
        norms = (value[:, head * value.shape[1] // len(weight)] @ weight[head]).norm(dim=-1)
        assert found[1, head, key] == pytest.approx((norms[key] / norms.median()).item(), rel=1e-4)


def test_a_no_op_writes_less_than_a_fifth_of_the_median():
    sizes = torch.tensor([[[1.0, 0.19, 0.21, 4.0], [1.0, 1.0, 1.0, 0.01]]])
    sinks = torch.tensor([[[False, True, True, True], [False] * 4]])
    assert no_ops(sizes, sinks) == pytest.approx(1 / 3)
    assert np.isnan(no_ops(sizes, torch.zeros_like(sinks)))
    assert log_ratio(sizes, sinks).nanmean().item() == pytest.approx(np.log2(4.4 / 3))
