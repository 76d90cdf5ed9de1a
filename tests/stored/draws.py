"""Hooks that put in the random draws of another program, or of another run."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def given_draws(point: str, draws: Tensor) -> tuple[str, Any]:
    """Replaces a run's random draws at a point of the sampler, step by step."""

    def replaced(value: Tensor, hook: Any) -> Tensor:
        now = draws[hook.step].to(value)
        return now[..., None] if now.ndim < value.ndim else now

    return f"denoise.{point}", replaced


def given_starts(starts: Int[Tensor, "canvas batch pos"]) -> tuple[str, Any]:
    """Replaces the random tokens with which each canvas of a run begins."""
    seen: list[int] = []

    def begun(value: Tensor, hook: Any) -> Tensor | None:
        if hook.step == 0:
            seen.clear()
        if value.shape[1] in seen:
            return None
        seen.append(value.shape[1])
        return torch.cat([value[:, : -starts.shape[2]], starts[len(seen) - 1].to(value)], dim=1)

    return "denoise.hook_canvas", begun
