"""Errors that sinklens raises; each message states what was given, what is allowed, and what to do.

`SinklensError` is the base class to catch. The subclasses also derive from the built-in error a caller would expect
(`ValueError`, `KeyError`, ...), so code that catches those keeps working.

Not included are `AttributeError` for a missing name of an object or module, and errors in the processes that isolate
generated programs, which are returned as an outcome.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

BETWEEN = (  # packages whose frames are not user code
    "sinklens", "nnsight", "jaxtyping", "contextlib", "torch", "transformer_lens", "transformers",
)  # fmt: skip


class SinklensError(Exception):
    """Base class of all errors that sinklens raises."""


class CheckpointError(SinklensError, ValueError):
    """A checkpoint cannot be loaded: unknown family, unsupported setting, or missing, surplus or broken weights."""


class CheckpointWarning(UserWarning):
    """A checkpoint was loaded, but a part of its files was not used."""


class SelfCheckError(SinklensError, RuntimeError):
    """A loaded model failed its self-check: its hook points do not show what the model computes."""


class PromptError(SinklensError, ValueError):
    """A prompt is empty, too long, contains the mask token, or is text for a model without a tokenizer."""


class PromptWarning(UserWarning):
    """A prompt is valid, but its result may not be what was intended. Shown once per model."""


class ControlWarning(UserWarning):
    """A control has fewer keys than it controls for at some steps, or its condition was not evaluated."""


class InterventionWarning(UserWarning):
    """An intervention found no place to act on in any step of a run."""


class SettingError(SinklensError, ValueError):
    """An argument or a sampler setting is unknown, of the wrong type, or out of range."""


class HookNameError(SinklensError, KeyError):
    """No hook point has this name."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class HookFunctionError(SinklensError, TypeError):
    """A hook function cannot be called as ``fn(value, hook=point)``, or its result does not fit the point."""


class NotANumberError(SinklensError, ValueError):
    """The logits of a step hold NaN."""


class HookOrderError(SinklensError, RuntimeError):
    """A hook point was requested after the run had passed it, or outside the trace block."""


class ReadOnlyHookError(SinklensError, TypeError):
    """A read-only hook point was written to."""


class TrackError(SinklensError, ValueError):
    """A sink track cannot be opened, or lacks the requested quantity."""


class TaskError(SinklensError, ValueError):
    """A task is unknown, or its data are missing or malformed."""


class LedgerError(SinklensError, RuntimeError):
    """A ledger of evaluation records cannot be read or written, or is being written by another process."""


class DeviceMemoryError(SinklensError, MemoryError):
    """A run needed more memory than its device, or the machine, had left."""


def require(condition: object, text: str, error: Callable[[str], Exception] = SettingError) -> None:
    """Raise an `error` with this text unless the condition holds; the text is built either way."""
    if not condition:
        raise error(text)


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """' Nearest: a, b, c.' for an unknown name, or '' when nothing is close.

    >>> nearest("stpes", ["steps", "seed"])
    ' Nearest: steps.'
    >>> nearest("logits", ["denoise.hook_canvas", "denoise.hook_logits"])
    ' Nearest: denoise.hook_logits.'
    >>> nearest("hook_z", ["embed.hook_out", "blocks.0.attn.hook_z"])
    ' Nearest: blocks.0.attn.hook_z.'
    """
    known = list(known)
    close = (
        [one for one in known if one.endswith(f".{name}")]
        or difflib.get_close_matches(name, known, count, 0.5)
        or [one for one in known if name[2:] and name in one]
    )
    return f" Nearest: {', '.join(close[:count])}." if close else ""


def calling_frame() -> Any:
    """The innermost frame outside `BETWEEN`."""
    frame: Any = inspect.currentframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    return frame


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the caller's line (outside `BETWEEN`), once for each text and line."""
    frame = calling_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=registry)
