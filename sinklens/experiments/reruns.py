"""Runs made again with one cause changed: another prompt, or a path from one step to a later one.

A run of a corrupted prompt soon works on another canvas, because it decides other tokens. Its activations then carry
the tokens that it has already decided, and a patch from it moves them along with the cause under study. `corrupted`
changes the prompt and keeps the canvases, so that only the prompt differs, at every step.

Steps of a diffusion run share nothing but the canvas. A path from a sender at step s to a receiver at step t > s
(`path_across_steps`) is therefore a chain of direct effects:

1. At step s the sender's output is that of another run, as the logits see it, and nothing else changes (`PathPatch` to
   "logits"). The step may then decide other tokens, or other positions.
2. The steps between carry the change on the canvas. ``through="canvas"``: they run freely on what they find.
   ``through="frozen"``: their decisions are those of the base run, so the canvas of step t differs only where step s
   left another token than in the base run.
3. At step t the receiver reads the embeddings of the changed canvas; everything else at t reads the canvas of the base
   run (`PathPatch` from "embed").

Pitfall: the answer of a corrupted run is that of the earlier run, by construction; compare logits, not texts. Decisions
are discrete: most patched paths change no token, and then the effect is exactly 0, however much the logits moved; look
at ``changed``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import PromptError, SettingError
from sinklens.interventions.paths import PathPatch
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.intervention import within
from sinklens.runs.request import Hooks
from sinklens.runs.result import Generation, require_run
from sinklens.utils.arguments import read_as


def corrupted(base: Generation, changes: Mapping[str, str], *, hooks: Hooks = (), **options: Any) -> Generation:
    """Run the prompts of `base`, with some of their text replaced, on the canvases of `base`.

        kept = Activations(names=["blocks.0.attn.hook_z"])
        other = corrupted(base, {" 6": " 8"}, hooks=kept)
        run = sinklens.generate(model, prompt, replay=base, hooks=PatchHooks(source=kept.caches))

    Args:
        base: a run.
        changes: old text -> new text, with as many tokens each. Every occurrence of the old tokens in a prompt is
            replaced; in a batch, prompts that lack them stay the same.
        hooks: as in `sinklens.generate`.
        **options: further keyword arguments of `sinklens.generate`, such as ``record_sinks``.

    Returns:
        The run. Its settings and seed are those of `base`, and ``text`` is a string if that of `base` is one.

    Raises:
        PromptError: `changes` is empty, or an old text occurs in no prompt or has another number of tokens than its
            new text.
        SettingError: `base` is not a run.
    """
    require_run(base, "base")
    ids = replaced_prompts(base.canvas[:, 0, : base.prompt_length], base, changes)
    return _run(base, ids, replay=base, hooks=hooks, **options)


def replaced_prompts(
    ids: Int[Tensor, "batch pos"], base: Generation, changes: Mapping[str, str]
) -> Int[Tensor, "batch pos"]:
    """`ids`, prompts or canvases of `base`, with texts of the prompt replaced, as in `corrupted`.

    Raises:
        PromptError: see `corrupted`.
    """
    if not changes:
        raise PromptError("changes is empty; pass the texts to replace, such as {' 6': ' 8'}.")
    prompts = ids[:, : base.prompt_length].cpu()
    for old, new in changes.items():
        prompts = _replaced(prompts, base.model, old, new)
    return torch.cat([prompts.to(ids.device), ids[:, base.prompt_length :]], dim=1)


def again(base: Generation, *, hooks: Hooks = (), **options: Any) -> Generation:
    """Run the prompts of `base` again with its settings, seed and cache policy.

    Args:
        base: a run.
        hooks: as in `sinklens.generate`.
        **options: further keyword arguments of `sinklens.generate`, such as ``replay``.
    """
    return _run(base, base.canvas[:, 0, : base.prompt_length], hooks=hooks, **options)


def _run(base: Generation, ids: Int[Tensor, "batch pos"], **options: Any) -> Generation:
    """A run of the prompts `ids`, left-padded as those of `base`, with its settings, seed and cache policy."""
    prompts = [row[keep].tolist() for row, keep in zip(ids, base.real[:, : base.prompt_length], strict=True)]
    chosen = base.settings  # the run fills in the other fields
    settings = {"sampler": chosen.name, "cache": base.cache, "seed": base.seed}
    settings |= {name: getattr(chosen, name) for name in chosen.setting_names()}
    return replace(generate(base.model, prompts, **settings | options), single=base.single)


def _replaced(ids: Int[Tensor, "batch pos"], model: Model, old: str, new: str) -> Int[Tensor, "batch pos"]:
    """`ids` with the tokens of `old` replaced by those of `new`."""
    before, after = (model.to_tokens(text, prepend_bos=False)[0].cpu() for text in (old, new))
    if len(before) != len(after):
        raise PromptError(
            f"{old!r} has {len(before)} tokens ({model.to_str_tokens(before)}) and {new!r} has {len(after)} "
            f"({model.to_str_tokens(after)}); positions stay aligned only if both have the same number of tokens."
        )
    windows = ids.unfold(1, len(before), 1) if len(before) <= ids.shape[1] else ids.new_zeros(len(ids), 0, len(before))
    found = (windows == before).all(dim=-1).nonzero().tolist()
    if not found:
        raise PromptError(
            f"{old!r} occurs in no prompt as the tokens {model.to_str_tokens(before)}; a leading space may be "
            f"part of a token (see model.to_str_tokens)."
        )
    changed = ids.clone()
    for row, start in found:
        changed[row, start : start + len(after)] = after
    return changed


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
    read_as(Literal["canvas", "frozen"], "through", through)
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
    if through == "canvas" and moved.shape[1] <= last:
        raise SettingError(
            f"the patched run ended after {moved.shape[1] - 1} steps, before step {last}; pass through='frozen'."
        )
    now, after = base.canvas[:, last], moved[:, first + 1]
    canvas = moved[:, last] if through == "canvas" else torch.where(after != base.canvas[:, first + 1], after, now)
    ids = canvas.to(base.model.cfg.device)
    embedded = {last: {"hook_embed": base.model.embed(ids).detach()}}
    return AcrossSteps(
        PathPatch(sender="embed", receiver=receiver, source=embedded, steps=[last]), canvas, canvas != now
    )
