"""Captured passes, on the CPU: a recorder of operations takes the place of CUDA graphs.

It records every operation of the pass, refuses those that a capture does not allow, and replays them into the same
tensors. A replay that equals the plain pass shows that no call of Python in it depends on the canvas.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from building import random_model
from operators import Copies, Operators, tensors
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils

import sinklens
from sinklens.hooks import captured
from sinklens.interventions import MaskSinks
from sinklens.runs.request import RunRequest
from sinklens.runs.session import denoising_of
from sinklens.sampling import DualCache
from sinklens.sinks import Record
from sinklens.utils.allocations import LiveBytes


class Graph(Operators):
    """The operations of a pass."""

    def __init__(self, counts):
        super().__init__(Counter())
        self.calls, self.counts, self.pool = [], counts, lambda: None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen["constants"] += func.overloadpacket.__name__ == "lift_fresh"  # a copy to the device
        given = {one.untyped_storage().data_ptr() for one in tensors((args, kwargs))}
        in_place, view = (
            func._schema.is_mutable,
            any(one.untyped_storage().data_ptr() in given for one in tensors(found)),
        )
        self.calls += [(partial(func, *args, **(kwargs or {})), [] if in_place else found)] * (in_place or not view)
        return found

    def replay(self):
        self.counts["replays"] += 1
        for again, kept in self.calls:
            for one, value in zip(tensors(kept), tensors(again()), strict=kept != []):
                one.copy_(value)


def capture(counts, run, device, pool):
    graph = Graph(counts)
    with pytest.MonkeyPatch.context() as patch, Copies(graph.seen), graph:
        patch.setattr(masking_utils, "is_tracing", lambda *_: True)  # as while CUDA captures
        found = run()
    if waiting := +graph.seen:
        raise RuntimeError(f"it waits for the device: {waiting}")
    for one in tensors(found):
        one.fill_(torch.nan)  # a capture computes nothing
    counts["captures"] += 1
    return found, graph


def compiled(counts, run, device, pool):
    """A graph of the one piece that Dynamo traces, called without the Python that it was traced from."""
    torch.compiler.reset()
    calls = []

    def backend(graph, inputs):
        return lambda *given: calls.append((graph, given, graph(*given))) or calls[-1][2]

    found = torch.compile(run, fullgraph=True, backend=backend)()
    ((graph, given, outputs),) = calls
    for one in outputs:
        one.fill_(torch.nan)

    def replay():
        for kept, value in zip(outputs, graph(*given), strict=True):
            kept.copy_(value)

    counts["captures"] += 1
    return found, SimpleNamespace(replay=replay, pool=lambda: None)


@pytest.fixture
def counts(monkeypatch):
    """How often passes were captured and replayed."""
    found = Counter()
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    monkeypatch.setattr(captured, "capture", partial(capture, found))
    return found


def generate(model, seed=0, rows=1, **given):
    drawn = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 50, (9 + 4 * row,), generator=drawn).tolist() for row in range(rows)]
    settings = {"gen_length": 16, "steps": 6, "seed": seed, "progress": False} | given
    return sinklens.generate(model, prompts, **{name: value for name, value in settings.items() if value is not None})


def check(model, plain, **given):
    """A run equals that of another model without captures, bit for bit."""
    found = generate(model, **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "DEVICES", ())
        expected = generate(plain, **given)
    assert torch.equal(found.canvas, expected.canvas)
    if found.sinks is not None:
        assert np.array_equal(found.sinks.data["score"], expected.sinks.data["score"], equal_nan=True)


def nudge(value, hook):
    value[..., 4 + hook.step] = -3.0 * hook.layer()
    return value


@pytest.mark.parametrize(("given", "kinds"), [
    ({}, 1),
    ({"record_sinks": False}, 1),
    ({"rows": 3}, 1),
    ({"rows": 3, "hooks": MaskSinks(3)}, 2),  # the first step masks nothing
    ({"record_sinks": False, "hooks": MaskSinks(3, layers=[1, 2])}, 2),
    ({"rows": 2, "hooks": [(lambda name: name.endswith("attn_mask"), nudge)]}, 1),
    ({"temperature": 0.7, "hooks": [("denoise.hook_candidates", lambda ids, hook: ids)]}, 1),
])  # fmt: skip
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream", "tiny-mmada"])
def test_replays_equal_the_plain_pass_bit_for_bit(counts, name, given, kinds):
    model, plain = sinklens.load(name), sinklens.load(name)
    for seed in (0, 5):
        check(model, plain, seed=seed, **given)
    assert counts == {"captures": kinds, "replays": 12}  # one replay of each is compared with a plain pass


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("architecture", "given"), [
    ("llama", {"rows": 2, "temperature": 0.7, "hooks": MaskSinks(3)}),
    ("qwen3", {"rows": 2}),
    ("qwen2", {"record_sinks": False, "hooks": MaskSinks(3)}),
])  # fmt: skip
def test_a_captured_pass_is_one_graph_for_a_compiler(counts, monkeypatch, unchecked, architecture, given):
    monkeypatch.setattr(captured, "capture", partial(compiled, counts))
    model, plain = (random_model(architecture, num_hidden_layers=2) for _ in range(2))
    check(model, plain, **given)
    assert counts["captures"] == 1


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(("record", "hooks"), [(False, ()), (True, ()), (True, [MaskSinks(3)])])
def test_a_step_leaves_no_tensor_but_its_canvas(counts, monkeypatch, replayed, record, hooks):
    model, found = sinklens.load("tiny-llada"), []
    monkeypatch.setattr(captured, "DEVICES", ("cpu",) if replayed else ())
    monkeypatch.setattr(captured, "_under_a_mode", lambda device: False)
    given = {"gen_length": 16, "block_length": 16, "steps": 12}
    run = denoising_of(model, RunRequest([[3, 4, 5, 6]] * 2, 0, False, hooks, record, None, None, False, False, given))
    with LiveBytes(model.tree.hf.state_dict().values()) as live:
        listener = SimpleNamespace(before=lambda step, state: found.append(live.now), after=lambda step, state: None)
        run.carry_out([listener])
    # the canvas; which rows ran, and how many positions were chosen among equals. A record has room for all steps
    assert np.diff(found[4:]).tolist() == [2 * 20 * 8 + 2 * (1 + 8)] * 7
    assert bool(counts) is replayed


@pytest.mark.parametrize(("change", "captures"), [
    (lambda hf: [one.data.mul_(1.02) for one in hf.parameters()], 1),  # a replay reads the same memory
    (lambda hf: [setattr(one, "data", 1.02 * one.data) for one in hf.parameters()], 2),
    (lambda hf: setattr(hf.model.norm, "variance_epsilon", 0.1), 2),
    (lambda hf: setattr(hf.model, "scales", {"adapter": [0.5]}), 2),
])  # fmt: skip
def test_a_changed_model_is_never_replayed_as_it_was(counts, change, captures):
    model, plain = sinklens.load("tiny-llada"), sinklens.load("tiny-llada")
    generate(model)
    change(model.tree.hf)
    change(plain.tree.hf)
    check(model, plain)
    assert counts["captures"] == captures


def mlp(hf):
    return hf.model.layers[1].mlp


@pytest.mark.parametrize(("name", "change", "given"), [
    ("tiny-llada", lambda hf: mlp(hf).register_forward_hook(lambda module, inputs, output: 1.1 * output), {}),
    ("tiny-llada", lambda hf: setattr(mlp(hf), "forward", partial(torch.mul, torch.tensor(1.1))), {}),
    ("tiny-llada", lambda hf: mlp(hf).train(), {}),
    ("tiny-llada", None, {"hooks": [("blocks.1.hook_resid_post", lambda value, hook: 1.1 * value)]}),
    ("tiny-llada", None, {"hooks": [("blocks.1.attn.hook_pattern", lambda value, hook: None)]}),
    ("tiny-llada", None, {"cache": DualCache()}),
    ("tiny-llada", None, {"record_sinks": Record(quantities=["values"])}),
    ("tiny-llada-moe", None, {}),
    ("tiny-llama", None, {"steps": None}),
    ("tiny-sdar", None, {"steps": None}),
])  # fmt: skip
def test_a_pass_that_python_takes_part_in_runs_as_it_always_did(counts, name, change, given):
    model, plain = sinklens.load(name), sinklens.load(name)
    for one in (model, plain) if change else ():
        change(one.tree.hf)
    check(model, plain, **given)
    assert not counts


@pytest.fixture
def model():
    """One whose passes no other test has captured."""
    return sinklens.load("tiny-llada")


def test_under_what_sees_every_operation_and_in_a_trace_block_nothing_is_captured(model, counts):
    for inside in (FlopCounterMode(), torch.autocast("cpu", torch.bfloat16)):
        with inside:
            generate(model)
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    generate(model)
    handle.remove()
    with sinklens.trace(model, "a b", gen_length=8, steps=4, progress=False) as t:
        found = [t["blocks.1.hook_resid_post"].save() for _ in t.steps]
    assert not torch.equal(found[2], found[3])
    assert not counts


def raising(error, run, device, pool):
    run()
    raise error


def scaled(which, by, run, device, pool):
    """A graph whose replays scale one of the outputs at one place."""
    outputs, graph = capture(Counter(), run, device, pool)
    replay = graph.replay
    graph.replay = lambda: (replay(), outputs[which].select(1, 0).mul_(by))
    return outputs, graph


@pytest.mark.parametrize(("instead", "why"), [
    (partial(raising, RuntimeError("no graphs here")), "RuntimeError: no graphs here"),
    (partial(scaled, 0, 1.01), "its replay differs from it by 0.01 of its length"),
    (partial(scaled, 1, 1.01), "its replay differs from it by 0.01 of its length"),
    (partial(scaled, 1, torch.nan), "its replay differs from it by nan of its length"),
])  # fmt: skip
def test_a_pass_that_no_graph_repeats_runs_plainly_and_warns_once(model, counts, monkeypatch, instead, why):
    monkeypatch.setattr(captured, "capture", instead)
    with pytest.warns(RuntimeWarning, match=f"without a CUDA graph.*{why}") as warned:
        for _ in range(2):
            check(model, sinklens.load("tiny-llada"))
    assert len([one for one in warned if "CUDA graph" in str(one.message)]) == 1


def test_an_interrupted_capture_leaves_the_model_usable(model, counts, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="now"):
        patch.setattr(captured, "capture", partial(raising, KeyboardInterrupt("now")))
        generate(model)
    check(model, sinklens.load("tiny-llada"))
    assert counts["captures"] == 1


def test_the_passes_used_last_are_kept_and_long_ones_are_not_captured(model, counts, monkeypatch):
    monkeypatch.setattr(captured, "KEPT", 2)
    monkeypatch.setattr(captured, "POSITIONS", 30)
    for length in (8, 12, 16, 12, 16, 8, 22):
        generate(model, gen_length=length)
    assert counts["captures"] == 4  # 8 gave way to 16; 22 is too long
