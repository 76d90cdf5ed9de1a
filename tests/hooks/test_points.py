"""When a point is watched, and which values hooks and trace blocks receive from it."""

import cProfile

import pytest
import torch
from building import random_ids, random_model, shared_model
from torch import nn

from sinklens.hooks import Point, Watch
from sinklens.hooks.points import at

NAME = "blocks.1.attn.hook_z"


@pytest.fixture
def point():
    """A point outside any tree."""
    point = Point(Watch())
    point.name = NAME
    return point


def double(value, hook):
    return value * 2


def add_one(value, hook):
    return value + 1


@pytest.mark.parametrize(
    "register",
    [
        lambda point: point.add_hook(double).hook,
        lambda point: point.add_hook(double, dir="bwd").hook,
        lambda point: point.register_forward_hook(lambda *_: None),
        lambda point: point.register_forward_hook(lambda *_: None, with_kwargs=True),
        lambda point: point.register_forward_hook(lambda *_: None, always_call=True),
        lambda point: point.register_forward_pre_hook(lambda *_: None),
        lambda point: point.register_full_backward_hook(lambda *_: None),
        lambda point: point.register_full_backward_pre_hook(lambda *_: None),
    ],
)
def test_a_point_is_watched_until_its_hook_is_removed_for_every_kind_of_hook(point, register):
    handle = register(point)
    assert point.watched
    handle.remove()
    assert not point.watched


def test_hooks_run_in_the_order_they_were_added_and_prepended_ones_first(point):
    seen, value = [], torch.tensor(3.0)
    point.add_hook(lambda value, hook: seen.append(value))  # returns None, so the value stays
    assert at(point, value) is seen[0] is value
    point.add_hook(double)
    point.add_hook(add_one)
    assert at(point, value) == 3 * 2 + 1
    point.add_hook(add_one, prepend=True)
    assert at(point, value) == (3 + 1) * 2 + 1


def test_unwatched_points_of_a_model_are_not_called(model, ids, monkeypatch):
    call, called = nn.Module.__call__, []

    def count(self, *args, **kwargs):
        called.extend([self.name] if isinstance(self, Point) else [])
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", count)
    model(ids)
    assert called == []
    model.run_with_hooks(ids, fwd_hooks=[(NAME, double)])
    assert called == [NAME]


def test_while_a_trace_block_waits_for_a_point_only_that_point_is_watched(model, ids):
    watched = []

    def look(value, hook):
        watched.extend(name for name, point in model.tree.hook_dict.items() if point.watched and name != hook.name)

    with model.tree.hooks(fwd_hooks=[("hook_embed", look)]), model.trace(ids):
        model.blocks[1].attn.hook_pattern.output  # noqa: B018
    assert watched == ["blocks.1.attn.hook_pattern"]


def test_a_trace_block_reads_the_hooked_value_at_output_and_sets_what_hooks_receive_at_input():
    model, ids, received = shared_model(), random_ids(), []
    computed = model.run_with_cache(ids, names_filter=NAME)[1][NAME]
    with model.tree.hooks(fwd_hooks=[(NAME, lambda value, hook: received.append(value.clone())), (NAME, double)]):
        with model.trace(ids):
            before = model.blocks[1].attn.hook_z.input.save()
            model.blocks[1].attn.hook_z.input = before * 3
            after = model.blocks[1].attn.hook_z.output.save()
    assert torch.equal(before, computed)
    assert torch.equal(received[0], computed * 3)
    assert torch.equal(after, computed * 6)


def test_the_cost_of_finding_hooks_by_name_is_linear_in_their_number():
    """Counted in function calls, so that no clock decides."""

    def calls(layers):
        model, profile = random_model(num_hidden_layers=layers), cProfile.Profile()
        names = [name for name in model.hook_names() if not name.startswith("denoise.")]
        with profile:
            model.run_with_hooks(random_ids(), fwd_hooks=[(name, lambda value, hook: None) for name in names])
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(16) < 5 * calls(4)
