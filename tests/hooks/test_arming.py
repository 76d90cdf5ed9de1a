"""The model's computation is connected to the points that may be watched, and to no others."""

import nnsight
import numpy as np
import torch
from building import random_ids, random_model

import sinklens


def connected(model):
    """How many modules of transformers have a hook, or another forward than that of their class."""
    modules = list(model.tree.hf.modules())
    return sum(bool(one._forward_hooks or one._forward_pre_hooks) for one in modules), sum(
        "forward" in vars(module) for module in modules
    )


def test_only_points_with_hooks_are_connected():
    model, ids, in_block = random_model(), random_ids(), []
    model(ids)  # the first pass without hooks
    assert connected(model) == (0, 0)
    with model.hooks([("blocks.1.attn.hook_q", lambda value, hook: value * 2), ("blocks.1.hook_resid_mid", print)]):
        assert connected(model) == (1, 0)
    with model.trace(ids):
        model.hook_embed.output  # noqa: B018  the model waits here
        in_block.append(connected(model))
    assert min(in_block[0]) > 10
    assert sinklens.generate(model, ids, gen_length=4, steps=2, block_length=4).sinks is not None
    assert connected(model) == (0, 0)


def test_a_hook_that_another_hook_sets_in_the_middle_of_a_pass_is_called_in_it():
    model, ids, seen = random_model(), random_ids(), []

    def set_another(value, hook):
        model.tree.hook_dict["blocks.2.mlp.hook_post"].add_hook(lambda value, hook: seen.append(hook.name))

    model.run_with_hooks(ids, fwd_hooks=[("blocks.0.hook_resid_pre", set_another)])
    assert seen == ["blocks.2.mlp.hook_post"]


def test_another_wrapper_of_the_same_modules_works_between_trace_blocks():
    model, ids = random_model(), random_ids()
    with model.trace(ids):
        ours = model.blocks[1].hook_resid_post.output.save()
    other = nnsight.NNsight(model.tree.hf)
    with model.trace(ids):
        again = model.blocks[1].hook_resid_post.output.save()
    with other.trace(ids):
        at_last = other.model.layers[1].output.save()
    assert torch.equal(again, ours)
    assert torch.equal(at_last, ours)


def test_a_hook_that_removes_itself_leaves_the_record_of_a_run_complete():
    model, ids = random_model(), random_ids()
    settings = {"gen_length": 4, "steps": 2, "block_length": 4, "progress": False}
    expected = sinklens.generate(model, ids, **settings)
    handle = model.tree.blocks[1].attn.hook_sink_scores.register_forward_hook(lambda *_: handle.remove())
    np.testing.assert_allclose(
        sinklens.generate(model, ids, **settings).sinks["score"], expected.sinks["score"], atol=1e-5
    )
