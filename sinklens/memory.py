"""Running out of memory, as one clear error that leaves the model usable.

PyTorch says how much it tried to allocate, not what to change. `explained` turns its error, and Python's own, into a
`DeviceMemoryError` that does. The tensors of the failed pass are released, also those that the traceback would keep
alive, and the allocator's cache is emptied, so that a smaller run can follow at once.

One way this fails: a process that Linux kills for memory raises nothing.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sinklens.errors import DeviceMemoryError

CPU_TEXT = "can't allocate memory"  # how PyTorch's allocator for main memory says it, in a plain RuntimeError


@contextmanager
def explained(advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory inside the block into a `DeviceMemoryError`.

    Args:
        advice: says where it happened and what to lower; called only then.

    Raises:
        DeviceMemoryError: memory ran out, of a device or of the machine.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, DeviceMemoryError) or not ran_out(error):
            raise
        said, failure = advice(), error
        traceback.clear_frames(error.__traceback__)  # their locals hold the pass's tensors
        release()
        first = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise DeviceMemoryError(f"{said} PyTorch said: {first or type(error).__name__}.") from failure


def ran_out(error: BaseException) -> bool:
    """Whether `error` says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_TEXT in str(error)


def release() -> None:
    """Give cached memory of GPUs back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
