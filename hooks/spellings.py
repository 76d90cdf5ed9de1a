"""Dictionaries and caches by hook point that accept every spelling of a name.

Keys are the canonical names of the points, so iterating yields each point once. A look-up of
``blocks.0.attn.q.hook_out``, ``blocks.-1.hook_resid_post`` or the ``…_grad`` of either resolves it as in names.py.

Pitfall: ``dict(cache.cache_dict)`` is a plain dictionary, which accepts only the canonical names.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformer_lens import ActivationCache

from sinklens.errors import HookNameError, SettingError, warn_caller
from sinklens.hooks.detached import without_model

Value = TypeVar("Value")
GRADIENT = "_grad"  # TransformerLens's suffix of the key under which a point's gradient is cached

GATED = (
    "compute_head_results",
    "stack_head_results",
    "get_neuron_results",
    "stack_neuron_results",
    "get_full_resid_decomposition",
    "logit_attrs",
    "logit_lens",
)
"""Methods of a cache that leave out what the noise level does to the stream."""
NOT_FOLDED = (
    "the final norm's weight is not folded into W_U: multiply the result by ln_final.w before W_U, or use "
    "cache.logit_attrs."
)


def refuse_gated(*_args: Any, **_options: Any) -> NoReturn:
    """Stands for the methods `GATED` in networks whose noise level gates, scales and shifts the stream.

    Raises:
        SettingError: always.
    """
    raise SettingError(
        "TransformerLens's decompositions and directions leave out the gates, scales and shifts of this network's "
        "noise level; use sinklens.experiments: logit_lens, write_attribution, read_attribution."
    )


class ByPoint(dict[str, Value]):
    """A dictionary whose keys are names of hook points and whose look-ups accept every spelling.

    Attributes:
        resolve: returns the name of the point that a spelling means; raises `HookNameError` for an unknown one.
    """

    def __init__(
        self, resolve: Callable[[str], str], values: Mapping[str, Value] | Iterable[tuple[str, Value]] = ()
    ) -> None:
        super().__init__(values)
        self.resolve = resolve

    def __contains__(self, key: object) -> bool:
        try:
            return super().__contains__(self._canonical(key))
        except HookNameError:
            return False

    def __missing__(self, key: str) -> Value:
        canonical = self._canonical(key)
        if not super().__contains__(canonical):
            raise HookNameError(
                f"{key!r} is not in the cache of {len(self)} values: {', '.join(list(self)[:5])}"
                f"{', …' * (len(self) > 5)}. Name it in names_filter=."
            )
        return self[canonical]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key` in any spelling; `default` if the cache does not contain it."""
        return super().get(self._canonical(key), default) if key in self else default

    def _canonical(self, key: Any) -> Any:
        """The key under which the value of `key` is stored."""
        if not isinstance(key, str) or super().__contains__(key):
            return key
        name = key.removesuffix(GRADIENT)
        return self.resolve(name) + key[len(name) :]


class HookCache(ActivationCache):
    """TransformerLens's `ActivationCache` that accepts every spelling of a name.

    Attributes:
        model: the tree of the values, whose `spelled` resolves names.
        windows: point -> the columns of its value, where a cache policy limited the pass to some.
        real: False on the left padding of the run [batch, pos]; None if unknown.
    """

    cache_dict: ByPoint[Tensor]

    def __init__(
        self,
        cache_dict: Mapping[str, Tensor],
        model: Any,
        has_batch_dim: bool = True,
        windows: Mapping[str, range] | None = None,
        real: Tensor | None = None,
    ) -> None:
        self.windows, self.real = dict(windows or {}), real
        by_point = cache_dict if isinstance(cache_dict, ByPoint) else ByPoint(model.spelled, cache_dict)
        super().__init__(by_point, model, has_batch_dim)
        if model.architecture.modulation:
            self.__dict__ |= dict.fromkeys(GATED, refuse_gated)

    __getstate__ = without_model

    def __contains__(self, key: object) -> bool:
        return key in self.cache_dict

    def to(self, device: Any) -> "HookCache":
        """The cache, with its values moved to `device`."""
        resolve = self.cache_dict.resolve
        super().to(device)
        self.cache_dict = ByPoint(resolve, self.cache_dict)
        return self

    def apply_ln_to_stack(self, residual_stack: Tensor, layer: int | None = None, *args: Any, **options: Any) -> Tensor:
        """As in TransformerLens, which divides by the scale of the norm and leaves its weight to a folded ``W_U``.

        Warns:
            UserWarning: the caller asks for the final norm, whose weight is not folded into ``W_U`` here.
        """
        final = layer in (None, -1, self.model.cfg.n_layers) and not options.get("recompute_ln")
        if final and bool((getattr(self.model.ln_final, "w", torch.ones(1)) != 1).any()):
            warn_caller(NOT_FOLDED, UserWarning)
        return super().apply_ln_to_stack(residual_stack, layer, *args, **options)

    def logit_attrs(self, *args: Any, **options: Any) -> Tensor:
        """As in TransformerLens; its directions, `tokens_to_residual_directions`, hold the weight of the final norm."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_FOLDED, UserWarning)
            return super().logit_attrs(*args, **options)

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "HookCache":
        """A cache of some rows of the batch; an integer drops the batch axis."""
        cut = super().apply_slice_to_batch_dim(batch_slice)
        values = ByPoint(self.cache_dict.resolve, cut.cache_dict)
        return type(self)(
            values, self.model, cut.has_batch_dim, self.windows, None if self.real is None else self.real[batch_slice]
        )
