"""A look: a pass of its own in the middle of another, which nobody sees, and a mask that is read and left alone."""

import pytest
import torch
from building import KINDS, left_padding, plain_pass, random_ids, shared_model
from transformers import DynamicCache

from sinklens.errors import HookNameError, SinklensError
from sinklens.hooks import attention as module

PADDINGS = [pytest.param(None, id="whole"), pytest.param(left_padding(), id="padded")]
LOOKED = ["hook_embed", "blocks.1.attn.hook_sink_scores", "blocks.-1.attn.o.hook_in", "ln_final.hook_normalized"]
NAMES = ["hook_embed", "blocks.1.attn.hook_sink_scores", "blocks.2.attn.hook_z", "ln_final.hook_normalized"]


@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_a_look_gives_the_values_of_a_pass_of_its_own(architecture, causal, real):
    model, ids = shared_model(architecture, causal), random_ids()
    peeked = model.tree.peek(ids, real, LOOKED)
    plain = plain_pass(model, ids, real).values
    counted = slice(None) if real is None else real
    assert list(looked) == NAMES
    for name, value in peeked.items():
        where = slice(None) if name.endswith("sink_scores") else counted
        torch.testing.assert_close(value[where], plain[name][where], atol=1e-4, rtol=1e-5)
        assert not value.requires_grad


def test_no_hook_is_called_and_no_edit_made_by_a_look_inside_a_hook():
    model, ids, other = shared_model(), random_ids(), random_ids()
    expected = model.tree.peek(other, None, NAMES)
    called, peeked = [], {}

    def count(value, hook):
        called.append(hook.name)
        return value * 1.5

    def look(value, hook):
        called.append("look")
        looked.update(model.tree.peek(other, None, NAMES))

    hooks = [("hook_embed", count), ("blocks.0.hook_resid_post", look), ("blocks.1.attn.hook_pattern", count)]
    hooks += [("blocks.2.hook_resid_pre", count)]
    logits = model.run_with_hooks(ids, fwd_hooks=hooks)
    assert called == ["hook_embed", "look", "blocks.1.attn.hook_pattern", "blocks.2.hook_resid_pre"]
    assert all(torch.equal(peeked[name], expected[name]) for name in NAMES)
    without = [pair for pair in hooks if pair[1] is not look]
    assert torch.equal(model.run_with_hooks(ids, fwd_hooks=without), logits)


def test_only_what_is_looked_at_is_computed(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the map was made explicit")

    monkeypatch.setattr(module, "_explicit", refuse)
    model, ids = shared_model(), random_ids()

    def look(value, hook):
        model.tree.peek(ids, None, ["blocks.2.attn.hook_sink_scores"])

    hooks = [("hook_embed", look), ("blocks.1.attn.hook_pattern", lambda value, hook: None)]
    with pytest.raises(AssertionError, match="the map was made explicit"):  # by the pass itself, after the look
        model.run_with_hooks(ids, fwd_hooks=hooks)
    model.run_with_hooks(ids, fwd_hooks=hooks[:1])


@pytest.mark.parametrize("raw", [False, True], ids=["points", "modules"])
def test_a_trace_block_is_served_by_its_own_pass(raw):
    model, ids, other = shared_model(), random_ids(), random_ids()
    cache = model.run_with_cache(ids, names_filter=["blocks.1.hook_mlp_out", "blocks.2.hook_resid_post"])[1]

    def look(value, hook):
        model.tree.peek(other, None, ["blocks.1.hook_mlp_out"])

    with model.tree.hooks(fwd_hooks=[("hook_embed", look)]), model.trace(ids):
        served = (model.hf.model.layers[1].mlp if raw else model.blocks[1].hook_mlp_out).output.save()
        later = model.blocks[2].hook_resid_post.output.save()
    assert torch.equal(served, cache["blocks.1.hook_mlp_out"])
    assert torch.equal(later, cache["blocks.2.hook_resid_post"])


def test_a_block_may_look_itself():
    model, ids, other = shared_model(), random_ids(), random_ids()
    expected, peeked = model.tree.peek(other, None, NAMES), {}
    cache = model.run_with_cache(ids, names_filter="blocks.1.attn.hook_z")[1]
    with model.trace(ids):
        model.blocks[0].hook_resid_post.output  # noqa: B018
        looked.update(model.tree.peek(other, None, NAMES))
        served = model.blocks[1].attn.hook_z.output.save()
    assert all(torch.equal(peeked[name], expected[name]) for name in NAMES)
    assert torch.equal(served, cache["blocks.1.attn.hook_z"])


def test_a_failed_look_leaves_the_model_as_it_was(monkeypatch):
    model, ids = shared_model(), random_ids()
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


def test_a_look_at_what_does_not_exist_or_inside_another_is_refused(monkeypatch):
    model, ids = shared_model(), random_ids()
    with pytest.raises(HookNameError, match=r"'hook_embd'\. Nearest: hook_embed"):
        model.tree.peek(ids, None, ["hook_embd"])
    with pytest.raises(HookNameError, match=r"'denoise\.hook_logits' belongs to the sampler; a single pass does not"):
        model.tree.peek(ids, None, ["hook_embed", "denoise.hook_logits"])
    monkeypatch.setattr(model.tree.watch, "looked", {})
    with pytest.raises(SinklensError, match="one look is going on already; a pass that is looked at calls no hooks"):
        model.tree.peek(ids, None, ["hook_embed"])


# --- a mask that is read and left alone --------------------------------------------------------------------------

READ = [lambda value, hook: None, lambda value, hook: value]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("read", READ, ids=["nothing given back", "itself given back"])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize(("architecture", "causal"), KINDS)
def test_a_mask_that_is_only_read_leaves_attention_and_logits_bit_for_bit(
    monkeypatch, architecture, causal, real, read, inference
):
    model, ids = shared_model(architecture, causal), random_ids()
    own, called = module.sdpa_attention_forward, []

    def count(attn, *args, **kwargs):
        called.append(attn.layer_idx)
        return own(attn, *args, **kwargs)

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
def test_every_way_of_writing_to_a_mask_takes_effect(write, inference):
    model, ids = shared_model(), random_ids()
    expected = plain_pass(
        model, ids, edits={"blocks.1.attn.hook_attn_mask": lambda mask: mask - 1.0 * (torch.arange(7) == 2)}
    ).logits

    def edit(value, hook):
        changed = write(value)
        return changed if changed.shape == value.shape else None

    with torch.inference_mode(inference):
        found = model.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_attn_mask", edit)])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("point", ["hook_attn_mask", "hook_sink_scores", "hook_rot_q", "hook_z"])
@pytest.mark.parametrize("real", PADDINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_watching_cached_steps_leaves_them_bit_for_bit(architecture, real, point):
    """For one query and grouped heads transformers' own attention rounds otherwise than that over repeated heads."""
    model, ids = shared_model(architecture, causal=True), random_ids()
    mask = torch.ones_like(ids).bool() if real is None else real

    def steps(hooks):
        past = DynamicCache()
        with torch.no_grad(), model.tree.hooks(fwd_hooks=hooks):
            parts = [
                model.tree.hidden(ids[:, start:stop], mask[:, :stop], past) for start, stop in ((0, 5), (5, 6), (6, 7))
            ]
        return torch.cat(parts, dim=1)[mask]

    watching = [(lambda name: name.endswith(point), lambda value, hook: None)]
    assert torch.equal(steps(watching), steps([]))
