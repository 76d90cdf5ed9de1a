"""Checks of hook functions and of the values that they return.

Limitation: a function whose signature Python cannot read, such as a builtin, is accepted, and fails at its first call.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sinklens.errors import HookFunctionError, require

MASK = "hook_attn_mask"


def takes_hook(function: Callable[..., Any]) -> bool:
    """Whether `function` can be called with a value and ``hook=``; True if its signature is unknown."""
    try:
        inspect.signature(function).bind(None, hook=None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def label(function: Callable[..., Any]) -> str:
    """How errors name `function`."""
    return f"hook function {getattr(function, '__name__', repr(function))}"


def refuse_other(
    value: Any,
    there: Tensor,
    what: str,
    point: str | None,
    advice: str = "return the same shape, or None to change nothing",
) -> None:
    """Check that `value` may replace the value `there` at `point`.

    Raises:
        HookFunctionError: `value` is not a tensor of the same shape, dtype and device; the model would broadcast it,
            fail later, far from the hook, or round differently.
    """
    require(
        same_shape(value, there, point),
        f"{what} is {shape_of(value)}, but the value at this point has shape {list(there.shape)}; {advice}.",
        HookFunctionError,
    )
    require(
        same_kind(value, there, point),
        f"{what} is {_kind(value)}, but the value at this point is {_kind(there)}; convert it with new.to(value), "
        f"where value is the one it replaces.",
        HookFunctionError,
    )


def same_kind(value: Tensor, there: Tensor, point: str | None) -> bool:
    """Whether `value` has the dtype and the device of `there`; a mask may have any floating dtype."""
    if value.device != there.device:
        return False
    return value.dtype == there.dtype or ((point or "").endswith(MASK) and value.is_floating_point())


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} on {value.device}"


def same_shape(value: Any, there: Tensor, point: str | None) -> bool:
    """Whether `value` has the shape of `there`; a mask may have one row, or one row per query."""
    free = 2 if (point or "").endswith(MASK) else None
    if not isinstance(value, Tensor):
        return False
    found, wanted = ([size for axis, size in enumerate(one.shape) if axis != free] for one in (value, there))
    return found == wanted


def shape_of(value: Any) -> str:
    """The shape of a tensor, or the type of another value."""
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__
