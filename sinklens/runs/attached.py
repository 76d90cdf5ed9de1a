"""The hooks of a run, attached to their points while it lasts, with a check of what they return.

Under guidance the batch of a pass is the conditional rows followed by the unconditional ones; hooks see the conditional
rows alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sinklens.errors import HookFunctionError
from sinklens.hooks.attention.masks import MaskHook
from sinklens.hooks.forward_pass import ForwardPass
from sinklens.hooks.hook_functions import label, refuse_kind, same_shape, shape_of
from sinklens.hooks.points import Point
from sinklens.hooks.tree import HookTree
from sinklens.runs.intervention import HookFunction


@contextmanager
def attached(tree: HookTree, pairs: Sequence[tuple[str, HookFunction]], rows: int, guided: bool) -> Iterator[None]:
    """Attach (point, function) pairs for a batch of `rows`; on exit, restore the model."""
    with tree.hooks([(name, _checked(function, rows, guided)) for name, function in pairs]):
        try:
            yield
        finally:
            tree.watch.forward_pass = ForwardPass()


def _checked(function: HookFunction, rows: int, guided: bool) -> HookFunction:
    """`function`, checked to preserve shape, dtype and device; under guidance it sees only the conditional rows."""
    if isinstance(function, MaskHook) and not guided:
        return function

    def call(value: Tensor, hook: Point) -> Tensor | None:
        doubled = guided and len(value) == 2 * rows
        seen = value[:rows] if doubled else value
        changed = function(seen, hook=hook)
        if changed is None:
            return None
        if not same_shape(changed, seen, hook.name or ""):
            raise HookFunctionError(
                f"{label(function)} at {hook.name} (step {hook.step}) got a value of shape {list(seen.shape)} and "
                f"returned {shape_of(changed)}; return the same shape, or None to change nothing."
            )
        refuse_kind(changed, seen, f"what {label(function)} returned at {hook.name} (step {hook.step})", hook.name)
        if not doubled:
            return changed
        rest = value[rows:]  # the function may have expanded a mask to one row per query
        sizes = torch.broadcast_shapes(changed.shape[1:], rest.shape[1:])
        return torch.cat([changed.expand(-1, *sizes), rest.expand(-1, *sizes)])

    return call
