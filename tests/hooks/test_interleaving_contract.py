"""The nnsight internals that hooks/interleaving.py uses, one test for each; a failure names nnsight's version."""

import inspect

import pytest
import torch
from contracts import relied_on
from nnsight import NNsight, save
from torch import nn


class Doubling(nn.Module):
    """Two layers, called in order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.second(self.first(x) * 2)


@pytest.fixture
def root():
    return NNsight(Doubling())


ONES = torch.ones(2, 3)


def nnsight(what):
    return relied_on("nnsight", what)


def during(root, look):
    """What `look` returns in the middle of a traced pass, while a block waits at the second layer."""
    found = []
    root._module.first.register_forward_hook(lambda *_: found.append(look(root.interleaver)))
    with root.trace(ONES):
        root.second.output.save()
    return found[0]


def test_a_root_keeps_its_module_path_and_children(root):
    with nnsight("Envoy._module, .path and ._child_map"):
        assert isinstance(root._module, Doubling)
        assert (root.path, list(root._child_map)) == ("model", ["first", "second"])
        assert {envoy.path for envoy in root.modules()} == {"model", "model.first", "model.second"}


def test_edits_are_in_a_list_of_the_root_and_copies_have_their_own(root):
    with root.edit() as (_, edited):
        edited.first.output[:] = 0
    with nnsight("Envoy._edits, a list"):
        assert (len(root._edits), len(edited._edits)) == (0, 1)


def test_the_flag_of_a_running_block_is_set_and_stops_serving_when_taken_away(root):
    with nnsight("Interleaver.interleaving and .busy, True while a block runs"):
        assert during(root, lambda interleaver: (interleaver.interleaving, interleaver.busy)) == (True, True)
        assert not root.interleaver.interleaving


def test_a_waiting_block_says_where_and_for_which_visit(root):
    def look(interleaver):
        [mediator] = interleaver.mediators
        pending = mediator.pending
        return pending.provider, pending.event.name, pending.iteration, mediator.occurrence(pending.provider)

    with nnsight("Mediator.pending (provider, event, iteration) and .occurrence"):
        assert during(root, look) == ("model.second.output", "VALUE", 0, 0)


def test_what_a_cache_keeps_is_listed_by_location(root):
    found = []
    root._module.first.register_forward_hook(lambda *_: found.append(dict(root.interleaver.observers)))
    with root.trace(ONES) as tracer:
        tracer.cache(modules=[root.second])
    with nnsight("Interleaver.observers, caches by location, and .counts, visits by location"):
        assert "model.second.output" in found[0]
        assert root.interleaver.counts["model.second.output"] == 1


def test_a_custom_location_is_served_to_a_block_at_the_visit_it_waits_for(root):
    from nnsight.intervention.interleaver import Mediator

    seen = []
    root._module.first.register_forward_hook(
        lambda *_: [root.interleaver.handle("custom", n) for n in range(3)] and None
    )
    with root.trace(ONES):
        mediator = Mediator.current("custom")
        mediator.iteration = 1
        seen.append(Mediator.value("custom"))
        mediator.iteration = None
    with nnsight("Interleaver.handle, Mediator.current, .value and .iteration"):
        assert seen == [1]


def test_a_waiting_block_can_be_resumed_explicitly(root):
    from nnsight.intervention.interleaver import Mediator

    seen = []

    def release(*_):
        [mediator] = root.interleaver.mediators
        mediator.pending = mediator.switch("resumed")
        root.interleaver.reindex()

    root._module.first.register_forward_hook(release)
    with root.trace(ONES):
        seen.append(Mediator.value("custom"))
        seen.append(root.second.output.shape)
    with nnsight("Mediator.switch and Interleaver.reindex"):
        assert seen == ["resumed", ONES.shape]


class OnPurposeError(Exception):
    """Thrown into a block."""


def test_an_error_can_be_thrown_into_a_waiting_block(root):
    def throw(*_):
        root.interleaver.mediators[0].worker.throw(OnPurposeError("in the block"))

    root._module.first.register_forward_hook(throw)
    with nnsight("Mediator.worker, a greenlet"), pytest.raises(OnPurposeError, match="in the block"):
        with root.trace(ONES):
            root.second.output.save()


def test_a_barrier_is_an_event_without_a_location():
    from nnsight.intervention.interleaver import Event, Pending

    with nnsight("Event.BARRIER and Pending"):
        assert Pending(Event.BARRIER, None).provider is None


def test_a_run_of_a_function_of_ours_serves_the_blocks_that_were_appended(root):
    """The steps of `BlockTracer.execute`, written out."""
    from nnsight.intervention.batching import Batcher
    from nnsight.intervention.interleaver import Mediator

    class FirstRow(Batcher):
        total = 2

        @property
        def batching(self):
            return True

    with nnsight("Mediator(code, globals, locals, node=), .batch_group, .lcls.writes(), Batcher and Envoy.interleave"):
        batcher = FirstRow(root)
        batcher.total = 2
        mediator = Mediator(compile("got = root.first.output", "<x>", "exec"), {}, {"root": root}, node=None)
        mediator.batch_group = [0, 1]
        root.interleaver.mediators.append(mediator)
        root.interleave(lambda: root._module(ONES), batcher=batcher)
        root.interleaver.cancel()
        assert mediator.lcls.writes()["got"].shape == (1, 3)


def test_names_are_pushed_into_a_frame():
    from nnsight.tracing.util import push

    here = "before"
    push(inspect.currentframe(), {"here": "after"})
    with nnsight("tracing.util.push"):
        assert here == "after"


def test_a_tracer_knows_its_frame_its_block_and_reads_its_source():
    from nnsight.intervention.tracer import InterleavingTracer

    found = []

    class Looking(InterleavingTracer):
        def execute(self, code):
            found.append((self.info.frame.f_code.co_name, type(code).__name__, self.node is not None))

    with Looking(NNsight(Doubling()), "__call__"):
        pass
    with nnsight("InterleavingTracer.info.frame, .node, .execute(code) and .source"):
        assert found == [("test_a_tracer_knows_its_frame_its_block_and_reads_its_source", "code", True)]
        assert "Looking" in InterleavingTracer.source(__file__)
        assert not InterleavingTracer.source("<nowhere>")


def test_sources_and_blocks_are_kept_by_file_and_site(root):
    from nnsight.tracing.globals import BLOCKS, SOURCES

    with root.trace(ONES):
        doubled = root.first.output.save()
    assert doubled.shape == ONES.shape
    with nnsight("tracing.globals: SOURCES by file name, and BLOCKS by site, a tuple that begins with it"):
        assert "test_sources_and_blocks_are_kept" in SOURCES[__file__]
        assert any(site[0] == __file__ for site in BLOCKS)


def test_a_root_asks_its_class_how_invokes_make_a_batch():
    class Joining(NNsight):
        def _batch_size(self, *inputs, **kwargs):
            return len(inputs[0]) if inputs else 0

        def _batch(self, invokes, fn):
            return (torch.cat([inputs[0] for inputs, _ in invokes]),), {}

    model = Joining(Doubling())
    with model.trace() as tracer:
        with tracer.invoke(ONES):
            one = model.output.save()
        with tracer.invoke(ONES[:1] * 2):
            other = model.output.save()
    with nnsight("Envoy._batch_size and ._batch"):
        assert (one.shape, other.tolist()) == ((2, 3), [[4.0, 4.0, 4.0]])


def test_a_wrapped_module_keeps_the_forward_it_runs_where_it_can_be_replaced(root):
    from nnsight.intervention.source import STATE, Controller

    with nnsight("source.STATE, source.Controller, State.routes, .body, .original, .sourced and .compiled"):
        module = root._module
        state = module.__dict__[STATE]
        assert isinstance(module.__dict__["forward"], Controller)
        assert [route[0]() for route in state.routes] == [root.interleaver]
        assert state.original is state.body is Doubling.forward
        assert (state.sourced, state.compiled) == (False, None)
        state.body = state.original = lambda module, x: x * 5
        assert torch.equal(module(ONES), ONES * 5)


def test_save_can_be_taken_off_object_and_put_back():
    from nnsight._c import mount, unmount

    with nnsight("_c.mount and _c.unmount"):
        unmount("save")
        assert not hasattr(3, "save")
        mount(save, "save")
        assert vars(object)["save"].__func__ is save


def test_a_root_takes_second_names_and_classes_of_its_wrappers():
    from nnsight.intervention.envoy import Envoy

    class Own(Envoy):
        pass

    outer = nn.Sequential()
    outer.add_module("inner", Doubling())
    with nnsight("rename= and envoys= of NNsight, by the path of a module"):
        root = NNsight(outer, rename={"inner.second": "second"}, envoys={"first": Own})
        assert root.second is root.inner.second
        assert root.get("second").path == "model.inner.second"
        assert isinstance(root.inner.first, Own)
        assert not isinstance(root.inner.second, Own)
