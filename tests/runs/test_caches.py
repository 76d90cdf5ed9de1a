"""``t.cache``: values by step as TransformerLens caches, after the block's edits; and nnsight's cache."""

import pytest
import torch
from transformer_lens import ActivationCache

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
PROMPT = PROMPTS[0]
RESID, Z, MLP = "blocks.2.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.hook_mlp_out"
SHORT = {"gen_length": 6, "record_sinks": False}


def hooked(model):
    """Number of functions on the model's points."""
    points = model.tree.hook_dict.values()
    return sum(len(point._forward_hooks) + len(point._functions) + len(point.fwd_hooks) for point in points)


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_values_are_those_read_in_the_block(request, name):
    model, read = request.getfixturevalue(name), {}
    before = hooked(model)
    with sinklens.trace(model, PROMPTS, **SHORT) as t:
        caches = t.cache([Z, RESID, "denoise.hook_canvas"])
        for step in t.steps:
            read[step] = [t[point].clone() for point in ("denoise.hook_canvas", Z, RESID)]
    assert list(caches) == list(read) == list(range(6))
    for step, values in read.items():
        assert isinstance(caches[step], ActivationCache)
        for point, value in zip(("denoise.hook_canvas", Z, RESID), values, strict=True):
            assert torch.equal(caches[step][point], value)
    assert hooked(model) == before
    assert not torch.equal(caches[0][RESID][:, -1], caches[5][RESID][:, -1])


def test_values_are_cached_after_edits(tiny_llada):
    """After hook functions, in-place edits and assignments; later changes of the value do not reach the cache."""

    def halve(value, hook):
        return value * 0.5

    with sinklens.trace(tiny_llada, PROMPT, hooks=[(MLP, halve)], **SHORT) as t:
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
    plain = sinklens.generate(tiny_llada, PROMPT, **SHORT)
    _, cache = tiny_llada.run_with_cache(plain.canvas[:, 0], names_filter=MLP)
    torch.testing.assert_close(caches[0][MLP], cache[MLP] * 0.5)


@pytest.mark.parametrize(
    ("steps", "kept"), [(None, [0, 1, 2, 3, 4, 5]), ([0, 4], [0, 4]), ([-1, 1, 1], [1, 5]), (range(0, 6, 3), [0, 3])]
)
def test_steps_are_chosen(tiny_llada, steps, kept):
    with sinklens.trace(tiny_llada, PROMPT, **SHORT) as t:
        caches = t.cache(RESID, steps=steps)
    assert list(caches) == kept
    assert len(caches) == len(kept)
    with pytest.raises(
        SettingError, match=r"step 2 was not cached; cached steps: \[0, 4\]" if kept == [0, 4] else "cached"
    ):
        caches[2 if 2 not in kept else 17]


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda t: t.cache(["blocks.2.hook_resid_pst"]), HookNameError, r"blocks\.2\.hook_resid_post"),
        (lambda t: t.cache("blocks.9.hook_resid_post"), HookNameError, r"layers? .*4|0 to 3"),
        (lambda t: t.cache(lambda name: name == "nothing"), HookNameError, "no hook point|matches"),
        (lambda t: t.cache([]), SettingError, "name at least one"),
        (lambda t: t.cache(RESID, steps=[6]), SettingError, r"step 6 does not exist; there are 6"),
    ],
)
def test_an_unknown_name_or_step_is_rejected_with_what_exists(tiny_llada, ask, error, text):
    before = hooked(tiny_llada)
    with pytest.raises(error, match=text):
        with sinklens.trace(tiny_llada, PROMPT, **SHORT) as t:
            ask(t)
    assert hooked(tiny_llada) == before


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
