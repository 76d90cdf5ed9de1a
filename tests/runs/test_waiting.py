"""How often a step waits for the device, counted on the CPU in the calls that would wait on a GPU.

No call inside the layers waits, recorded or masked: what they need to know is decided when the step begins.
"""

from collections import Counter

import pytest
import torch
from building import random_model
from operators import Copies, Operators

import sinklens
from sinklens.interventions import MaskSinks
from sinklens.runs import recorder
from sinklens.sinks.steps import Steps


def waits(model, record, hooks):
    """Calls that wait, in a step."""
    found = []
    for steps in (8, 16):
        given = {"gen_length": 32, "block_length": 32, "steps": steps, "record_sinks": record, "progress": False}
        seen, prompt = Counter(), torch.arange(3, 23)[None]
        with Operators(seen), Copies(seen):
            sinklens.generate(model, prompt, hooks=hooks, **given)
        found.append(seen)
    return {name: (found[1][name] - count) / 8 for name, count in found[0].items() if found[1][name] > count}


SAMPLER = {"_local_scalar_dense": 4, "index": 1, "nonzero": 1, "copies": 1}
"""Whether the block is done, rows run alone, padding is known and logits are NaN; the masked positions; the commit."""


@pytest.mark.parametrize(
    ("record", "hooks", "other"),
    [
        (False, (), {}),
        (True, (), {"copies": 8}),  # what the track keeps of the step
        # ids that a hook may have written; the keys that there are, and how many are taken; layers without any
        (False, MaskSinks(5), {"nonzero": 2, "_local_scalar_dense": 6, "copies": 2}),
    ],
    ids=["unwatched", "recorded", "masked"],
)
def test_a_step_waits_in_the_sampler_and_not_in_the_layers(tiny_llada, record, hooks, other):
    assert waits(tiny_llada, record, hooks) == SAMPLER | other
    shallow, deep = (waits(random_model(num_hidden_layers=layers), record, hooks) for layers in (2, 8))
    assert shallow == deep


def test_a_step_is_stored_between_the_next_pass_and_its_decisions(tiny_llada, monkeypatch):
    order, append = [], Steps.append
    monkeypatch.setattr(recorder, "LATER", ("cpu",))
    monkeypatch.setattr(Steps, "append", lambda *given: order.append("stored") or append(*given))
    hooks = [(name, lambda value, hook: order.append(hook.name)) for name in ("hook_embed", "denoise.hook_logits")]
    run = sinklens.generate(tiny_llada, torch.arange(3, 23)[None], gen_length=4, block_length=4, steps=2, hooks=hooks)
    assert order == ["hook_embed", "denoise.hook_logits", "hook_embed", "stored", "denoise.hook_logits", "stored"]
    assert run.sinks.steps == 2
