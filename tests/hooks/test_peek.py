"""A peek: a separate pass in the middle of another, without hooks; and masks that are read but not changed."""

import pytest
import torch
from building import KINDS, PADDINGS, plain_pass, random_ids, shared_model
from transformers import DynamicCache

from sinklens.errors import HookNameError, SinklensError
from sinklens.hooks.attention import attention as module

PEEKED = ["hook_embed", "blocks.1.attn.hook_sink_scores", "blocks.-1.attn.o.hook_in", "ln_final.hook_normalized"]
NAMES = ["hook_embed", "blocks.1.attn.hook_sink_scores", "blocks.2.attn.hook_z", "ln_final.hook_normalized"]


@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_a_peek_returns_the_values_of_a_separate_pass(model, ids, real):
    peeked = model.tree.peek(ids, real, PEEKED)
    plain = plain_pass(model, ids, real).values
    counted = slice(None) if real is None else real
    assert list(peeked) == NAMES
    for name, value in peeked.items():
        where = slice(None) if name.endswith("sink_scores") else counted
        torch.testing.assert_close(value[where], plain[name][where], atol=1e-4, rtol=1e-5)
        assert not value.requires_grad


def test_a_peek_inside_a_hook_calls_no_hooks_and_applies_no_edits():
    model, ids, other = shared_model(), random_ids(), random_ids()
    expected = model.tree.peek(other, None, NAMES)
    called, peeked = [], {}

    def count(value, hook):
        called.append(hook.name)
        return value * 1.5

    def peek(value, hook):
        called.append("peek")
        peeked.update(model.tree.peek(other, None, NAMES))

    hooks = [
        ("hook_embed", count),
        ("blocks.0.hook_resid_post", peek),
        ("blocks.1.attn.hook_pattern", count),
        ("blocks.2.hook_resid_pre", count),
    ]
    logits = model.run_with_hooks(ids, fwd_hooks=hooks)
    assert called == ["hook_embed", "peek", "blocks.1.attn.hook_pattern", "blocks.2.hook_resid_pre"]
    assert all(torch.equal(peeked[name], expected[name]) for name in NAMES)
    assert torch.equal(model.run_with_hooks(ids, fwd_hooks=[pair for pair in hooks if pair[1] is not peek]), logits)


def test_a_failed_peek_leaves_the_model_unchanged(model, ids, monkeypatch):
    before = model(ids)

    def fail(*args, **kwargs):
        raise ZeroDivisionError("in the pass")

    with monkeypatch.context() as changed:
        changed.setattr(model.tree.hf.model.layers[1].mlp.down_proj, "forward", fail)
        with pytest.raises(ZeroDivisionError, match="in the pass"):
            model.tree.peek(ids, None, NAMES)
    assert model.tree.watch.peeked is None
    assert not any(point.watched for point in model.tree.hook_points())
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize(("names", "peeked", "error", "text"), [
    (["hook_embd"], None, HookNameError, r"'hook_embd'\. Nearest: hook_embed"),
    (["hook_embed", "denoise.hook_logits"], None, HookNameError, r"'denoise\.hook_logits' belongs to the sampler"),
    (["hook_embed"], {}, SinklensError, "another peek is running; call peek after it returns"),
])  # fmt: skip
def test_a_peek_at_unknown_or_sampler_points_or_inside_another_peek_is_refused(monkeypatch, names, peeked, error, text):
    monkeypatch.setattr(shared_model().tree.watch, "peeked", peeked)
    with pytest.raises(error, match=text):
        shared_model().tree.peek(random_ids(), None, names)


# --- masks that are read but not changed -------------------------------------------------------------------------

READ = [lambda value, hook: None, lambda value, hook: value]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("read", READ, ids=["returns None", "returns the mask"])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_reading_a_mask_does_not_change_attention_or_logits_in_any_bit(model, ids, monkeypatch, real, read, inference):
    original, called = module.sdpa_attention_forward, []

    def count(attn, *args, **kwargs):
        called.append(attn.layer_idx)
        return original(attn, *args, **kwargs)

    monkeypatch.setattr(module, "sdpa_attention_forward", count)
    with torch.inference_mode(inference):
        before = model(ids, attention_mask=real)
        hooks = [(lambda name: name.endswith("hook_attn_mask"), read)]
        assert torch.equal(model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks), before)
    assert called == [0, 1, 2] * 2


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda value: value.fill_(-1.0).clamp_(max=-1.0) * (torch.arange(7) == 2),
        lambda value: value[..., 2].sub_(1.0),
        lambda value: value.masked_fill_(torch.arange(7) == 2, -1.0),
    ],
    ids=["new", "a view in place", "in place"],
)
def test_every_kind_of_write_to_a_mask_takes_effect(model, ids, write, inference):
    expected = plain_pass(
        model, ids, edits={"blocks.1.attn.hook_attn_mask": lambda mask: mask - 1.0 * (torch.arange(7) == 2)}
    ).logits

    def edit(value, hook):
        changed = write(value)
        return changed if changed.shape == value.shape else None

    with torch.inference_mode(inference):
        found = model.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_attn_mask", edit)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("point", ["hook_attn_mask", "hook_sink_scores", "hook_rot_q", "hook_z"])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_watching_does_not_change_cached_steps_in_any_bit(architecture, real, point):
    """For one query and grouped heads, transformers rounds differently than attention over repeated heads."""
    model, ids = shared_model(architecture, causal=True), random_ids()
    mask = torch.ones_like(ids).bool() if real is None else real

    def steps(hooks):
        past = DynamicCache()
        with torch.no_grad(), model.tree.hooks(fwd_hooks=hooks):
            parts = [
                model.tree.hidden(ids[:, start:stop], mask[:, :stop], past) for start, stop in ((0, 5), (5, 6), (6, 7))
            ]
        return torch.cat(parts, dim=1)[mask]

    assert torch.equal(steps([(lambda name: name.endswith(point), lambda value, hook: None)]), steps([]))
