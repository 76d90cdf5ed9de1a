"""How much memory operations would take, without taking it.

Inside `without_memory`, PyTorch makes *fake tensors*: they have shape, type and device, and no storage, so a model of
any size can be built and called on them. `LiveBytes` adds up the storages that exist at a time; on fake tensors it
counts what real ones would take. Both act on every operation, whatever code calls it.

Pitfall: a fake tensor has no values. Code that asks for one (``if value.any()``) raises an error, so a pass can be
tried, but a sampler's loop cannot. What a kernel allocates for itself is not seen either.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@contextmanager
def without_memory() -> Iterator[None]:
    """A block whose tensors are fake.

    PyTorch's grouped products, which compute all experts at once, have a fake result in bfloat16 only. Inside the
    block, transformers calls its own operation for them, whose fake result has the same size in any element type.
    """
    from unittest.mock import patch

    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.integrations import moe

    own = patch.object(moe, moe._can_use_grouped_mm.__name__, lambda *_, **__: False)
    with own, FakeTensorMode(allow_non_fake_inputs=True):
        yield


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the block created and that still exist.

    Args:
        known: tensors that exist before the block, such as weights; views of them are not counted.

    Attributes:
        now: bytes of the storages that exist.
        most: the largest `now` so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: dict[int, Any] = {}
        self._known = [tensor.untyped_storage() for tensor in known]  # kept, so that their ids stay theirs
        self._seen |= dict.fromkeys(map(id, self._known))

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages of its results."""
        result = operation(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._seen:
            return
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        self._seen[id(storage)] = weakref.finalize(storage, self._gone, id(storage), storage.nbytes())

    def _gone(self, number: int, size: int) -> None:
        del self._seen[number]
        self.now -= size
