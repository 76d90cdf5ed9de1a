"""What sinklens raises when it refuses something; each text says what came, what is allowed, and what to do.

`SinklensError` is the one base to catch. The subclasses also derive from the built-in error a caller would expect
(`ValueError`, `KeyError`, ...), so code that already catches those keeps working. All of them stand here, but for
`NotServed` in evaluation/harness.py, which cannot be met without lm-evaluation-harness.

Not among them: `AttributeError` for a name that an object or a module lacks; what the processes that isolate a
generated program raise inside themselves (the caller is told of it as an outcome); and plain `ValueError`s of
sinklens.zoo, which trains the shipped models.
"""

import difflib
from collections.abc import Iterable


class SinklensError(Exception):
    """Base of all errors raised on purpose."""


class CheckpointError(SinklensError, ValueError):
    """A checkpoint cannot be loaded: unknown family, unsupported setting, missing, surplus or broken weights."""


class SelfCheckError(SinklensError, RuntimeError):
    """A loaded model failed its self-check: its hook points do not show what the model computes."""


class PromptError(SinklensError, ValueError):
    """A prompt is empty, too long, holds the mask token, or is text for a model without a tokenizer."""


class PromptWarning(UserWarning):
    """A prompt can be used, and what comes of it may not be what was meant. No error, and shown once."""


class SettingError(SinklensError, ValueError):
    """A sampler setting is unknown or out of range."""


class HookNameError(SinklensError, KeyError):
    """No hook point bears this name."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0])


class HookFunctionError(SinklensError, TypeError):
    """A hook function cannot be called as ``fn(value, hook=point)``, or gives back another shape than it got."""


class HookOrderError(SinklensError, RuntimeError):
    """A hook point was asked for after the run had passed it, or outside the trace block."""


class ReadOnlyHookError(SinklensError, TypeError):
    """A read-only hook point was written to."""


class TrackError(SinklensError, ValueError):
    """A sink track cannot be opened, or lacks what was asked of it."""


class TaskError(SinklensError, ValueError):
    """A task is unknown, or its data are missing or not what they should be."""


class LedgerError(SinklensError, RuntimeError):
    """A ledger of evaluation records cannot be read or written, or is being written by another process."""


class DeviceMemoryError(SinklensError, MemoryError):
    """A run needed more memory than its device, or the machine, has left."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """' Nearest: a, b, c.' for an unknown name, or '' when nothing is close.

    >>> nearest("stpes", ["steps", "seed"])
    ' Nearest: steps.'
    """
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)
    return f" Nearest: {', '.join(close)}." if close else ""
