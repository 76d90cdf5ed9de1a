"""A single pass over some of the layers, and what it returns.

A pass that starts at a layer takes the stream that enters it and skips the layers before. A pass that stops before a
layer returns the stream that would enter it and computes nothing further.

Known failure: a module whose forward catches every exception would also catch the one that ends a pass early.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinklens.errors import SettingError, require

RETURN_TYPES = ("logits", "loss", "both", None)
LOSSES = ("loss", "both")


class Stopped(Exception):
    """Ends a pass before a layer and carries the stream; not an error."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class StepOver(nn.Module):
    """Replaces a layer that a pass skips."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)  # transformers picks a mask by it

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The stream, unchanged."""
        return hidden_states


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


def layers_run(n_layers: int, start_at_layer: int | None, stop_at_layer: int | None) -> range:
    """The layers of a pass; either bound may be negative, counting from the end.

    Raises:
        SettingError: a bound is out of range.
    """
    start = _bound("start_at_layer", 0 if start_at_layer is None else start_at_layer, n_layers, n_layers - 1)
    stop = _bound("stop_at_layer", n_layers if stop_at_layer is None else stop_at_layer, n_layers, n_layers)
    return range(start, max(start, stop))


def _bound(name: str, layer: int, n_layers: int, last: int) -> int:
    require(
        -n_layers <= layer <= last, f"{name}={layer} is out of range; 0 to {last}, or -{n_layers} to -1 from the end."
    )
    return layer + n_layers if layer < 0 else layer


@contextmanager
def stepping_over(base: nn.Module, name: str, count: int) -> Iterator[None]:
    """Make `base` skip the first `count` of its layers, the submodule called `name`."""
    layers: Any = base.get_submodule(name)
    if count == 0:
        yield
        return
    setattr(base, name, nn.ModuleList([*map(StepOver, layers[:count]), *layers[count:]]))
    try:
        yield
    finally:
        setattr(base, name, layers)


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


def check_return_type(return_type: Any, stream_given: bool) -> None:
    """Refuse a return type that the pass cannot return.

    Raises:
        SettingError: `return_type` is unknown, or a loss where there are no token ids.
    """
    require(
        return_type in RETURN_TYPES, f"return_type={return_type!r} is not one of {', '.join(map(repr, RETURN_TYPES))}."
    )
    require(
        return_type not in LOSSES or not stream_given,
        f"return_type={return_type!r} needs token ids; with start_at_layer take the logits.",
    )
