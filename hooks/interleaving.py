"""Everything sinklens knows of nnsight's inside; nothing else imports or touches it.

nnsight runs the body of a trace block in step with the model. The block *waits* at a *location*, a string such as
``"model.blocks.0.attn.hook_z.output"``; when the model reaches it, nnsight's interleaver *serves* the value and takes
it back, perhaps changed.
"""

from collections.abc import Callable
from typing import Any

from nnsight.intervention.source import STATE
from torch import nn


def replace_body(module: nn.Module, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Let nnsight's controller of `module` run `new(module, ...)` where it runs the unbound forward `old` now.

    Wrapping a module, nnsight takes the `forward` of the instance and remembers the one of its class, so a forward
    that a class gets later would be passed by. Nothing happens where nnsight has not wrapped `module`, or runs a
    forward that somebody put there.
    """
    state = module.__dict__.get(STATE)
    if state is not None and state.original is old:
        state.body = state.original = new
        state.sourced, state.compiled = False, None  # `.source` is read from the new one
