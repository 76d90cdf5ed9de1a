"""A trace block of a file that was edited and reloaded is the one that runs."""

import importlib
import os

import pytest
import torch

import sinklens
from sinklens import errors

MODULE = """
import sinklens{note}

def run(model, prompt):
    with sinklens.trace(model, prompt, gen_length=2) as t:
        for step in t.steps:
            t["blocks.0.attn.hook_z"][:, :, {head}] = 0
    return t.generation

def single(model, ids):
    with model.trace(ids):
        model.blocks[0].attn.hook_z.output[:, :, {head}] = 0
        logits = model.output.save()
    return logits
"""


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Writes the module; later versions differ in their head, and some in their line numbers."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(errors, "BETWEEN", (*errors.BETWEEN, "typechecks"))  # the tests' checks of types
    path, versions = tmp_path / "edited_block.py", []

    def write(head, note=""):
        path.write_text(MODULE.format(head=head, note=note))
        versions.append(head)
        os.utime(path, ns=(len(versions) * 10**9,) * 2)

    return write


def ablated(model, prompt, head):
    """The logits of the last step with a head's output set to zero, and those of a single pass."""
    hook = ("blocks.0.attn.hook_z", lambda z, hook: z.index_fill(2, torch.tensor(head), 0))
    run = sinklens.generate(model, prompt, gen_length=2, hooks=[hook])
    ids = torch.tensor([[5, 6, 7, 8]])
    return run.sinks["score"].to_numpy(), model.run_with_hooks(ids, fwd_hooks=[hook]), ids


@pytest.mark.parametrize("note", ["", "  # a\n# b"])
def test_a_reloaded_block_runs_as_it_is_now(worded, edited, note):
    model, prompt = worded("llama"), "one two three"
    edited(0)
    module = importlib.import_module("edited_block")
    try:
        for head, more in ((0, ""), (1, note), (0, "")):
            edited(head, more)
            importlib.reload(module)
            scores, logits, ids = ablated(model, prompt, head)
            assert (module.run(model, prompt).sinks["score"].to_numpy() == scores).all()
            assert torch.equal(module.single(model, ids), logits)
        other = ablated(model, prompt, 1)[0]
        edited(1)  # without a reload, the code that runs is the old one, and so is its block
        assert (module.run(model, prompt).sinks["score"].to_numpy() == scores).all()
        assert (other != scores).any()
    finally:
        del importlib.sys.modules["edited_block"]
