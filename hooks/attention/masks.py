"""The values of ``hook_attn_mask`` before a pass begins.

Hooks there get zeros, which do not depend on the pass. In a captured pass they are called before it (captured.py). A
`MaskHook` gives the masks of all layers in one call; unless Python takes part in the pass in another way, it is called
once per step instead of once per layer.

Pitfall: a function that is no `MaskHook` may depend on what other hooks saw in the same pass, so outside captured
passes it is called when attention reaches it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.hooks.points import Point, SamplerPoint, Watch, writes

Mask = Float[Tensor, "batch head #query key"]


class MaskHook:
    """A hook function of ``hook_attn_mask`` that depends on nothing that the pass computes."""

    def __call__(self, value: Mask, hook: Point) -> Mask | None:
        """The mask of one layer; None leaves `value` as it is."""
        raise NotImplementedError

    def of_layers(self, zeros: Mask, points: Sequence[Point]) -> list[Mask | None] | None:
        """What a call with `zeros` returns at each of `points`; None if it has to be called at each."""
        raise NotImplementedError


def only_masks(watch: Watch) -> bool:
    """Whether Python takes part in the passes of a run at the sampler's points and through masks alone."""
    plain = not watch.served and watch.peeked is None and watch.cache is None
    return plain and all(isinstance(point, SamplerPoint) for point in watch.hooked.difference(watch.masks))


def hooked_masks(watch: Watch) -> list[Point]:
    """The points ``hook_attn_mask`` that have hooks, in the order of the layers."""
    return [point for point in watch.masks if point in watch.hooked]


def zeros_of(size: tuple[int, ...], like: Tensor) -> Mask:
    """The value that hooks get; inference tensors do not record in-place writes."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=like.dtype, device=like.device)


def bias_of(point: Point, size: tuple[int, ...], like: Tensor) -> Mask | None:
    """The value of ``hook_attn_mask``, zeros of `size` before its hooks; None if they left it unchanged.

    Attention that is read but unchanged is then computed as if it were unwatched.
    """
    zeros = zeros_of(size, like)
    bias, untouched = point(zeros), writes(zeros)
    return None if bias is zeros and untouched == 0 else bias


def known_bias(point: Point, like: Tensor) -> Mask | None:
    """The value of ``hook_attn_mask`` that was made before the pass; layers may be on several devices."""
    bias = point.watch.biases.get(point)
    return None if bias is None else bias.to(like)


def of_one_hook(watch: Watch, size: tuple[int, ...], like: Tensor) -> dict[Point, Mask | None]:
    """The masks of all points that have hooks, if one `MaskHook` gives them all before the pass; empty otherwise."""
    points = hooked_masks(watch) if only_masks(watch) else []
    hooks = [point.only_function for point in points]
    hook = hooks[0] if hooks and all(one is hooks[0] for one in hooks) else None
    found = hook.of_layers(zeros_of(size, like), points) if isinstance(hook, MaskHook) else None
    return {} if found is None else dict(zip(points, found, strict=True))


@contextmanager
def known(watch: Watch, biases: dict[Point, Mask | None], device: torch.device) -> Iterator[None]:
    """Let attention read `biases` inside this context, which runs a pass without keys of earlier ones.

    `Watch.short` is set here once, for checks that attention would otherwise repeat in every layer.
    """
    given = biases.keys() >= set(hooked_masks(watch))
    plain = given and only_masks(watch) and watch.forward_pass.counted is None
    watch.biases, watch.short = biases, plain and not torch.is_autocast_enabled(device.type)
    try:
        yield
    finally:
        watch.biases, watch.short = {}, False
