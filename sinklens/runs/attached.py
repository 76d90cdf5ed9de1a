"""The hooks of a run, attached to their points while it lasts.

Under guidance the batch of a pass is the conditional rows followed by the unconditional ones; hooks see the conditional
rows alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

import torch
from torch import Tensor

from sinklens.hooks.forward_pass import ForwardPass
from sinklens.hooks.hook_functions import label, refuse_other
from sinklens.hooks.points import Point
from sinklens.hooks.tree import HookTree
from sinklens.runs.intervention import HookFunction


@contextmanager
def attached(tree: HookTree, pairs: Sequence[tuple[str, HookFunction]], rows: int, guided: bool) -> Iterator[None]:
    """Attach (point, function) pairs for a batch of `rows`; on exit, restore the model."""
    with tree.hooks([(name, _conditional(function, rows) if guided else function) for name, function in pairs]):
        try:
            yield
        finally:
            tree.watch.forward_pass = ForwardPass()


def _conditional(function: HookFunction, rows: int) -> HookFunction:
    """`function` on the conditional rows alone."""

    @wraps(function)
    def call(value: Tensor, hook: Point) -> Tensor | None:
        if len(value) != 2 * rows:
            return function(value, hook=hook)
        seen, rest = value[:rows], value[rows:]
        changed = function(seen, hook=hook)
        if changed is None:
            return None
        what = f"what {label(function)} returned at {hook.name} (step {hook.step})"
        refuse_other(changed, seen, what, hook.name)
        # the function may have expanded a mask to one row per query
        sizes = torch.broadcast_shapes(changed.shape[1:], rest.shape[1:])
        return torch.cat([changed.expand(-1, *sizes), rest.expand(-1, *sizes)])

    return call
