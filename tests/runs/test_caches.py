"""``t.cache``: values by step as TransformerLens caches, after the block's edits; and nnsight's cache."""

import pytest
import torch
from asked import TWO as PROMPTS
from transformer_lens import ActivationCache

import sinklens

PROMPT = PROMPTS[0]
RESID, Z, MLP = "blocks.2.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.hook_mlp_out"
SHORT = {"gen_length": 6, "record_sinks": False}


def hooked(model):
    """Number of functions on the model's points."""
    points = model.tree.hook_dict.values()
    return sum(len(point._forward_hooks) + len(point._functions) + len(point.fwd_hooks) for point in points)


@pytest.mark.parametrize(
    ("name", "steps", "kept"),
    [
        ("tiny_llada", None, [0, 1, 2, 3, 4, 5]),
        ("tiny_llama", None, [0, 1, 2, 3, 4, 5]),
        ("tiny_llada", [-1, 1, 1], [1, 5]),
        ("tiny_llada", range(0, 6, 3), [0, 3]),
    ],
)
def test_values_are_those_read_in_the_block(request, name, steps, kept):
    model, read = request.getfixturevalue(name), {}
    before = hooked(model)
    with sinklens.trace(model, PROMPTS, **SHORT) as t:
        caches = t.cache([Z, RESID, "denoise.hook_canvas"], steps)
        for step in t.steps:
            read[step] = [t[point].clone() for point in ("denoise.hook_canvas", Z, RESID)]
    assert list(caches) == kept
    for step, values in ((step, read[step]) for step in kept):
        assert isinstance(caches[step], ActivationCache)
        for point, value in zip(("denoise.hook_canvas", Z, RESID), values, strict=True):
            assert torch.equal(caches[step][point], value)
        assert caches[step]["resid_post", -2] is caches[step]["blocks.-2.hook_out"] is caches[step][RESID]
    assert hooked(model) == before


def test_values_are_cached_after_edits(tiny_llada):
    """After hook functions, in-place edits and assignments; later changes of the value do not reach the cache."""

    with sinklens.trace(tiny_llada, PROMPT, hooks=[(MLP, lambda value, hook: value * 0.5)], **SHORT) as t:
        caches = t.cache([MLP, Z, RESID])
        for step in t.steps:
            seen = t[MLP].clone()
            z = t[Z]
            z[:, :, 3] = step
            t[RESID] = t[RESID] * 0 + 7
    for step in range(6):
        assert (caches[step][Z][:, :, 3] == step).all()
        assert caches[step][Z][:, :, 2].abs().max() > 0
        assert (caches[step][RESID] == 7).all()
    assert torch.equal(caches[5][MLP], seen)
    _, cache = tiny_llada.run_with_cache(sinklens.generate(tiny_llada, PROMPT, **SHORT).canvas[:, 0], names_filter=MLP)
    torch.testing.assert_close(caches[0][MLP], cache[MLP] * 0.5)


def test_nnsights_cache_keeps_working(tiny_llada):
    """Without names, or with modules, it is nnsight's cache; both kinds work in one block."""
    with sinklens.trace(tiny_llada, PROMPT, **SHORT) as t:
        everything = t.cache()
        by_step = t.cache([RESID, Z])
    with sinklens.trace(tiny_llada, PROMPT, **SHORT) as s:
        chosen = s.cache(modules=[s.blocks[2].hook_resid_post])
        listed = s.cache([s.blocks[1].attn.hook_z])
    assert list(by_step) == list(range(6))
    for cache, name in ((everything, RESID), (chosen, RESID), (listed, Z)):
        kept = cache[f"model.{name}"]
        assert len(kept) == 6
        torch.testing.assert_close(kept.output[3], by_step[3][name], atol=1e-4, rtol=1e-4)
