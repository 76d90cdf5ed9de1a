"""How often a step waits for the device, counted on the CPU in the calls that would wait on a GPU.

No call inside the layers waits, recorded or masked: what they need to know is decided when the step begins.
"""

from collections import Counter

import pytest
import torch
from building import random_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sinklens
from sinklens.interventions import MaskSinks

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"}
COPYING = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}


class Operators(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        chosen = name in ("index", "index_put", "index_put_") and any(
            one.dtype == torch.bool for one in tree_leaves(args[1]) if isinstance(one, torch.Tensor)
        )
        self.seen[name] += chosen or name in WAITING
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen["copies"] += func in COPYING
        return func(*args, **(kwargs or {}))


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


SAMPLER = {"_local_scalar_dense": 5, "index": 4, "nonzero": 1, "copies": 1}
"""Whether the block is done, rows run alone, padding is known and logits are NaN; the masked positions; the commit."""


@pytest.mark.parametrize(
    ("record", "hooks", "other"),
    [
        (False, (), {}),
        (True, (), {"copies": 10}),  # what the track keeps of the step
        # ids that a hook may have written; the keys that there are, and how many are taken; layers without any
        (False, MaskSinks(5), {"nonzero": 2, "_local_scalar_dense": 7, "copies": 2}),
    ],
    ids=["unwatched", "recorded", "masked"],
)
def test_a_step_waits_in_the_sampler_and_not_in_the_layers(tiny_llada, record, hooks, other):
    assert waits(tiny_llada, record, hooks) == SAMPLER | other
    shallow, deep = (waits(random_model(num_hidden_layers=layers), record, hooks) for layers in (2, 8))
    assert shallow == deep
