"""Out-of-memory failures, as one clear error that leaves the model usable; and a pause of the garbage collector.

PyTorch reports how much it tried to allocate, not what to change. `explained` converts PyTorch's and Python's errors
into a `DeviceMemoryError` that does. It releases the tensors of the failed pass, including those that the traceback
would keep alive, and empties the allocator's cache, so a smaller run can start immediately.

Limitation: a process that Linux kills for lack of memory raises nothing.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sinklens.errors import DeviceMemoryError

CPU_TEXTS = ("can't allocate memory", "not enough memory")  # of the RuntimeError of PyTorch's CPU allocator, by system


@contextmanager
def explained(advice: Callable[[], str]) -> Iterator[None]:
    """Convert an out-of-memory error inside the block into a `DeviceMemoryError`.

    Args:
        advice: returns where it happened and what to lower; called only on failure.

    Raises:
        DeviceMemoryError: a device or the machine ran out of memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if isinstance(error, DeviceMemoryError) or not (of_memory or any(text in str(error) for text in CPU_TEXTS)):
            raise
        advised, failure = advice(), error
        traceback.clear_frames(error.__traceback__)  # their locals keep the pass's tensors alive
        release()
        first = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise DeviceMemoryError(f"{advised} PyTorch said: {first or type(error).__name__}.") from failure


def release() -> None:
    """Release cached GPU memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector inside the block: while many lasting objects are made, it would scan all of them
    again and again. Reference counts still free everything but cycles.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
