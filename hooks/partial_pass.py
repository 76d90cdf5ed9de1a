"""A single pass that may stop before a layer, and what it returns.

A pass that stops before a layer returns the stream that would enter it and computes nothing further.

Known failure: a module whose forward catches every exception would also catch the one that ends a pass early.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinklens.errors import SettingError

RETURN_TYPES = ("logits", "loss", "both", None)
LOSSES = ("loss", "both")


class Stopped(Exception):
    """Ends a pass before a layer and carries the stream; not an error."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class Logits(Tensor):
    """Logits that are also their own attribute ``logits``, as those of a transformers model's output.

    The output of a traced pass has this class; copies keep it, and results of other functions are plain tensors.
    """

    @property
    def logits(self) -> Tensor:
        """The logits as a plain tensor, a view."""
        return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            kept = func in (Tensor.clone, Tensor.detach, Tensor.narrow) and type(result) is Tensor
            return result.as_subclass(Logits) if kept else result

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.logits.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.logits.__reduce_ex__(protocol)  # files hold plain tensors


def layers_run(n_layers: int, stop_at_layer: int | None) -> range:
    """The layers of a pass that stops before one, which may be negative, counting from the end.

    Raises:
        SettingError: there is no such layer.
    """
    stop = n_layers if stop_at_layer is None else stop_at_layer
    if not -n_layers <= stop <= n_layers:
        raise SettingError(f"stop_at_layer={stop} is out of range; 0 to {n_layers}, or -{n_layers} to -1 from the end.")
    return range(stop + n_layers if stop < 0 else stop)


def stream_before(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """The stream that enters `module` during `run`, which stops there."""

    def stop(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise Stopped(inputs[0] if inputs else named["hidden_states"])

    handle = module.register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
    try:
        run()
    except Stopped as stopped:
        return stopped.stream
    finally:
        handle.remove()
    raise SettingError(f"the pass did not reach {type(module).__name__}, where it should stop.")
