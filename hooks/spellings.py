"""Dictionaries and caches by hook point, in which every accepted spelling of a name finds its value.

Keys are the points' own names, so iterating shows each point once; looking up ``blocks.0.attn.q.hook_out``,
``blocks.-1.hook_resid_post`` or the ``…_grad`` of either finds what names.py says they mean.

One way this fails: ``dict(cache.cache_dict)`` is a plain dictionary again, which knows the points' own names only.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor
from transformer_lens import ActivationCache

from sinklens.errors import HookNameError

Value = TypeVar("Value")
GRADIENT = "_grad"  # TransformerLens's ending of the name under which a point's gradient is cached


class ByPoint(dict[str, Value]):
    """A dictionary whose keys are names of hook points and whose look-ups take every spelling.

    Attributes:
        resolve: from a spelling to the name of its point; raises `HookNameError` where there is none.
    """

    def __init__(
        self, resolve: Callable[[str], str], values: Mapping[str, Value] | Iterable[tuple[str, Value]] = ()
    ) -> None:
        super().__init__(values)
        self.resolve = resolve

    def __contains__(self, key: object) -> bool:
        try:
            return super().__contains__(self._own(key))
        except HookNameError:
            return False

    def __missing__(self, key: str) -> Value:
        own = self._own(key)
        if not super().__contains__(own):
            raise HookNameError(f"{key!r} was not kept; {len(self)} values were: {', '.join(list(self)[:5])}, …")
        return self[own]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` in any spelling; `default` where it was not kept."""
        return super().get(self._own(key), default) if key in self else default

    def _own(self, key: Any) -> Any:
        """The key under which `key` is kept."""
        if not isinstance(key, str) or super().__contains__(key):
            return key
        name = key.removesuffix(GRADIENT)
        return self.resolve(name) + key[len(name) :]


@runtime_checkable
class Spelling(Protocol):
    """A model that knows which point a spelling means."""

    def spelled(self, name: str) -> str:
        """The name of the point that `name` means."""


class HookCache(ActivationCache):
    """TransformerLens's `ActivationCache`; every accepted spelling of a name works."""

    cache_dict: ByPoint[Tensor]

    def __init__(self, cache_dict: Mapping[str, Tensor], model: Spelling, has_batch_dim: bool = True) -> None:
        kept = cache_dict if isinstance(cache_dict, ByPoint) else ByPoint(model.spelled, cache_dict)
        super().__init__(kept, model, has_batch_dim)

    def __contains__(self, key: object) -> bool:
        return key in self.cache_dict

    def to(self, device: Any) -> "HookCache":
        """The cache, its values moved to `device`."""
        resolve = self.cache_dict.resolve
        super().to(device)
        self.cache_dict = ByPoint(resolve, self.cache_dict)
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "HookCache":
        """A cache of some rows of the batch; an integer drops the batch axis."""
        cut = super().apply_slice_to_batch_dim(batch_slice)
        return HookCache(ByPoint(self.cache_dict.resolve, cut.cache_dict), self.model, cut.has_batch_dim)  # type: ignore[arg-type]
