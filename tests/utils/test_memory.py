"""A run that exhausts memory reports what to lower and leaves the model unchanged."""

import gc
import importlib
import weakref
from contextlib import nullcontext

import accelerate
import pytest
import torch
from building import random_hf, random_ids, shared_model

import sinklens
from sinklens.errors import CheckpointError, DeviceMemoryError
from sinklens.utils.memory import explained

GIVEN = {"gen_length": 4, "steps": 4, "progress": False}
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB. And much more."
ERRORS = {
    "of a GPU": torch.OutOfMemoryError(MESSAGE),
    "of a GPU, by its older name": torch.cuda.OutOfMemoryError(MESSAGE),
    "of the machine, in PyTorch": RuntimeError(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ),
    "of the machine, in PyTorch on Windows": RuntimeError(
        "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."
    ),
    "of the machine, in Python": MemoryError("Unable to allocate 9 GiB"),
}


def failing(error, step=2):
    """A hook function that raises `error` in `step`."""

    def fail(value, hook):
        if hook.step == step:
            raise error

    return fail


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ERRORS)
def test_the_error_reports_where_it_happened_and_what_to_lower(kind):
    hooks = [("blocks.1.attn.hook_pattern", failing(ERRORS[kind]))]
    expected = (
        r"^llama ran out of memory on cpu in step 2 of 4, with 2 rows of 11 positions. Lower .* remains usable. "
        r"PyTorch said: (CUDA out of memory|DefaultCPUAllocator: .* 9 bytes|Unable to allocate 9 GiB)\.$"
    )
    with pytest.raises(DeviceMemoryError, match=expected) as raised:
        sinklens.generate(shared_model(), random_ids(), hooks=hooks, **GIVEN)
    assert raised.value.__cause__ is ERRORS[kind]


@pytest.mark.parametrize("offloaded", [False, True])
def test_afterwards_the_model_runs_unchanged(monkeypatch, offloaded):
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    hf, ids = random_hf(), random_ids()
    if offloaded:
        accelerate.cpu_offload(hf, torch.device("cpu"))
    model = sinklens.load(hf)
    before = sinklens.generate(model, ids, **GIVEN)
    with pytest.raises(DeviceMemoryError, match="in step 2 of 4"):
        hooks = [("blocks.1.hook_resid_mid", failing(torch.OutOfMemoryError(MESSAGE)))]
        sinklens.generate(model, ids, hooks=hooks, **GIVEN)
    assert emptied == [True]
    assert not any(model.tree.hook_dict[name].watched for name in model.hook_names())
    assert torch.equal(sinklens.generate(model, ids, **GIVEN).canvas, before.canvas)


def test_the_error_does_not_keep_the_tensors_of_the_pass_alive():
    model, ids, references = shared_model(), random_ids(), []

    def fail(value, hook):
        large = value * 2
        references.append(weakref.ref(large))
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(DeviceMemoryError, match="in step 0 of 4") as raised:
        sinklens.generate(model, ids, hooks=[("hook_embed", fail)], **GIVEN)
    gc.collect()
    assert raised.value.__traceback__ is not None
    assert references[0]() is None


def test_other_errors_pass_through():
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        with explained(lambda: "never called"):
            raise RuntimeError("shapes differ")


@pytest.mark.parametrize("name", ["tiny-llada", "./nothing-here"])
def test_garbage_collection_pauses_only_while_a_model_is_loaded(name, monkeypatch):
    running, module = [], importlib.import_module("sinklens.model.model")
    read, wrap = module.load_checkpoint, module.Model
    monkeypatch.setattr(module, "load_checkpoint", lambda *given: running.append(gc.isenabled()) or read(*given))
    monkeypatch.setattr(module, "Model", lambda *given: running.append(gc.isenabled()) or wrap(*given))
    with pytest.raises(CheckpointError, match=r"nothing-here") if name.startswith(".") else nullcontext():
        sinklens.load(name)
    assert not any(running)
    assert gc.isenabled()
