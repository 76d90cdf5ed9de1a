"""Paths from a component at one step to a component at a later step.

Steps of a diffusion run share nothing but the canvas. A path from a sender at step s to a receiver at step t > s is
therefore a chain of direct effects:

1. At step s the sender's output is that of another run, as the logits see it, and nothing else changes (`PathPatch` to
   "logits"). The step may then decide other tokens, or other positions.
2. The steps between carry the change on the canvas. ``through="canvas"``: they run freely on what they find.
   ``through="frozen"``: their decisions are those of the base run, so the canvas of step t differs only where step s
   left another token than in the base run.
3. At step t the receiver reads the embeddings of the changed canvas; everything else at t reads the canvas of the base
   run (`PathPatch` from "embed").

Pitfall: decisions are discrete. Most patches change no token, and then the effect is exactly 0, however much the logits
moved; look at ``changed``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.corruption import again
from sinklens.interventions.paths import PathPatch
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation, require_run

THROUGH = ("canvas", "frozen")


@dataclass(frozen=True)
class AcrossSteps:
    """The last link of a path across steps, and what the path did to the canvas.

    Attributes:
        patch: patches the receiver at its step: ``generate(model, prompt, replay=base, hooks=[patch, …])``.
        canvas: the canvas of that step as the path leaves it.
        changed: where it differs from the base run's; without a difference the patch changes nothing.
    """

    patch: PathPatch
    canvas: Int[Tensor, "batch pos"]
    changed: Bool[Tensor, "batch pos"]


def path_across_steps(
    base: Generation,
    sender: str | Sequence[str],
    receiver: str | Sequence[str],
    source: Mapping[int, Any],
    *,
    step: int,
    receiver_step: int,
    through: Literal["canvas", "frozen"] = "canvas",
    positions: Sequence[int] | None = None,
) -> AcrossSteps:
    """Patch the path from `sender` at `step` to `receiver` at `receiver_step`; see the module for its links.

        found = path_across_steps(base, "L1H3", "L2H4.k", kept.caches, step=5, receiver_step=6)
        run = sinklens.generate(model, prompt, replay=base, hooks=[found.patch, logits])

    Args:
        base: a run of a diffusion model without hooks.
        sender, receiver, source: as in `PathPatch`.
        step, receiver_step: the two steps; negative ones count from the last step that ran.
        through: "canvas" or "frozen": what the steps between do.
        positions: positions at which the sender is patched, not counting padding.

    Raises:
        SettingError: steps in the wrong order, an autoregressive run or one under a cache policy, whose later steps
            also read cached keys and values, or a base run that cannot be repeated because it had hooks.
    """
    require_run(base, "base")
    first, last = (within("step", [one], base.steps_run)[0] for one in (step, receiver_step))
    if last <= first:
        raise SettingError(
            f"the receiver's step must be later than the sender's; got {last} and {first}. Within a step use PathPatch."
        )
    if through not in THROUGH:
        raise SettingError(f"through must be one of {', '.join(map(repr, THROUGH))}; got {through!r}.")
    if base.model.causal:
        raise SettingError(
            "steps of an autoregressive run share keys and values, not only the canvas; use PathPatch at the step of "
            "the sender, whose keys and values later steps read."
        )
    if base.key_reuse:
        raise SettingError(
            f"with {base.key_reuse}, steps share keys and values, not only the canvas; make the base run without "
            f"{base.key_reuse.partition('=')[0]}=."
        )
    if not torch.equal(again(base, record_sinks=False, progress=False).canvas, base.canvas):
        raise SettingError(
            "the base run cannot be repeated: its canvases differ without its hooks. Make it without hooks."
        )
    patch = PathPatch(sender=sender, receiver="logits", source=source, steps=[first], positions=positions)
    moved = again(base, hooks=[patch], record_sinks=False, progress=False).canvas
    canvas = _reached(moved, base.canvas, first, last, through)
    ids = canvas.to(base.model.cfg.device)
    embedded = {last: {"hook_embed": base.model.embed(ids).detach()}}
    changed = canvas != base.canvas[:, last]
    return AcrossSteps(PathPatch(sender="embed", receiver=receiver, source=embedded, steps=[last]), canvas, changed)


def _reached(
    moved: Int[Tensor, "batch _ pos"], base: Int[Tensor, "batch _ pos"], first: int, last: int, through: str
) -> Int[Tensor, "batch pos"]:
    """The canvas of step `last` after the change that step `first` made."""
    if through == "frozen":
        after = moved[:, first + 1]
        return torch.where(after != base[:, first + 1], after, base[:, last])
    if moved.shape[1] <= last:
        raise SettingError(
            f"the patched run ended after {moved.shape[1] - 1} steps, before step {last}; pass through='frozen'."
        )
    return moved[:, last]
