"""A fast route is used on a device only after it has agreed there with the plain version.

sinklens has two routes for GPUs whose results could depend on the GPU, the driver or a version: the Triton kernels
(column_sums_triton.py) and PyTorch's private operators that return the log-sum-exp (fused.py). The first call on a
device, for each element type and head width, runs a *probe*: a few small cases of odd sizes, compared with the plain
version. If the probe fails for any reason, sinklens warns once and uses the plain version from then on.

A verdict is valid for one process. The next process probes again, quickly: Triton stores compiled kernels on disk.

Limitation: a probe uses small tensors only. ``make gpu`` tests longer ones.
"""

import warnings
from collections.abc import Callable, Hashable

import torch
from jaxtyping import Float
from torch import Tensor

VERDICTS: dict[tuple[Hashable, ...], str] = {}
"""Why a route may not be used at a place; empty if it passed its probe."""


def trusted(route: str, place: tuple[Hashable, ...], probe: Callable[[], None]) -> bool:
    """Whether `route` may be used at `place`: (device, type, width).

    Args:
        probe: raises if the route fails or disagrees; runs once per route and place.
    """
    key = (route, *place)
    if key not in VERDICTS:
        VERDICTS[key] = _verdict(probe)
        if VERDICTS[key]:
            warnings.warn(
                f"{route} cannot be used on {', '.join(map(str, place))}; the plain version is used instead, which is "
                f"slower and gives the same results ({VERDICTS[key]})",
                RuntimeWarning,
                stacklevel=3,
            )
    return not VERDICTS[key]


def _verdict(probe: Callable[[], None]) -> str:
    try:
        with torch.no_grad():
            probe()
    except torch.OutOfMemoryError:
        raise  # not evidence against the route
    except Exception as error:  # noqa: BLE001 — compilers, drivers and comparisons raise many kinds; the warning names it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def numbers(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Random numbers for a probe, with the type and device of `like`; global generators are not used."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32)
    return drawn.to(device=like.device, dtype=like.dtype)


def explicit_scores(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    scale: float,
    mask: Float[Tensor, "#batch #head #query key"] | None,
    causal: bool,
) -> Float[Tensor, "batch head query key"]:
    """q_i · k_j · scale + mask[i, j] in float64 on the CPU; −inf where causal order hides a key."""
    scores = query.cpu().double() @ key.cpu().double().transpose(-2, -1) * scale
    if mask is not None:
        scores = scores + mask.cpu().double()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores
