"""Jumps of sinks, and which paths make them: causal mediation between two steps of a run.

A *jump* is a change of a head's strongest key between two steps, where each of the two keys is a sink at its step. The
*lead* of the new key is its column sum minus that of the old one. The step before the jump and the step of the jump
differ in their canvases. `jump_undone` gives one reader, the head's queries or keys at the step of the jump, what some
components wrote one step before (`PathPatch`), and reports by how much the lead falls.

Limitation: shares of single senders need not add up to 1, because norms and the softmax are nonlinear, and a column
sum does not say which query looks where.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from sinklens.errors import SettingError, require
from sinklens.experiments.step_ids import StepIds, exact_step
from sinklens.interventions.paths import PathPatch, refuse_indirect, senders_of
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, within
from sinklens.runs.result import Generation
from sinklens.sinks.detectors import Detector
from sinklens.utils.arguments import checked


class Jump(NamedTuple):
    """A sink that moves from one key to another between two steps.

    Attributes:
        size: rise of the lead, in units of column sums.
        step: the step at which the new key is the strongest; at the step before it is the old one.
        layer, head: the head.
        old, new: columns of the canvas.
        row: row of the run.
    """

    size: float
    step: int
    layer: int
    head: int
    old: int
    new: int
    row: int = 0


@checked
def sink_jumps(run: "Generation", detector: Detector | None = None, *, row: int = 0) -> list[Jump]:
    """The jumps of a row from sink to sink, largest first, in all layers but the first, which reads only embeddings.

        jump = sink_jumps(run)[0]
        print(jump, jump_undone(run, jump, "L0H4", "q"))

    Args:
        detector: what counts as a sink; by default `EpsilonOverMean`.

    Raises:
        SettingError: a run of an autoregressive model or without recorded sinks, or a row that does not exist.
    """
    if run.sinks is None or run.causal:
        raise SettingError(
            "sink_jumps needs a run of a diffusion model with recorded sinks; repeat it without record_sinks=False."
        )
    part = run.key_reuse or ("use_cache=True" if run.settings.caches_keys else "")
    require(
        not part,
        f"with {part}, a step sums attention over the queries that it computes, which differ from step to step, so "
        f"its column sums do not show jumps. Repeat the run without {part.partition('=')[0]}= and with replay=run.",
    )
    row = within("row", [row], len(run.canvas))[0]
    sinks = run.sinks.detect() if detector is None else run.sinks.detect(detector)
    score, sinks = run.sinks.scores().to_numpy()[row], sinks.to_numpy()[row]
    top, found = np.nan_to_num(score).argmax(axis=-1), []
    for step, layer, head in np.argwhere(top[1:] != top[:-1]) + np.array([1, 0, 0]):
        old, new = int(top[step - 1, layer, head]), int(top[step, layer, head])
        if layer and sinks[step - 1, layer, head, old] and sinks[step, layer, head, new]:
            rise = score[step, layer, head] - score[step - 1, layer, head]
            found.append(Jump(float(rise[new] - rise[old]), int(step), int(layer), int(head), old, new, row))
    return sorted(found, reverse=True)


@checked
@torch.no_grad()
def jump_undone(
    run: "Generation",
    jump: Jump,
    sender: str | Sequence[str] | None = None,
    letter: Literal["q", "k"] = "q",
    *,
    positions: Sequence[int] | None = None,
) -> float:
    """Share of a jump that is undone if a path into its head carries what its senders wrote one step before.

    (lead at the step − lead with the path patched) / size of the jump: 1 if the sink moves back, 0 if nothing changes.
    This takes two passes of the run's model over the step's canvas, without the run's hooks.

    Args:
        sender: labels of components, as in `PathPatch`; None for all components that the head reads.
        letter: whether the head's queries ("q") or its keys ("k") read the senders.
        positions: positions of the queries or keys that are patched, not counting padding.

    Raises:
        SettingError: another letter, a sender that the head does not read, an autoregressive run, one
            whose steps reuse earlier keys (`exact_step`), or what `PathPatch` refuses.
    """
    model = run.model
    require(
        not model.causal,
        "jump_undone compares what components wrote on the canvases of two steps, and a step of an autoregressive "
        "run only adds a token to the text; pass a run of a diffusion model.",
    )
    steps = [exact_step(run, step) for step in (jump.step - 1, jump.step)]
    refuse_indirect(model, "jump_undone")
    before, now = (step.row(jump.row) for step in steps)
    points = ["hook_embed"]
    points += [f"blocks.{n}.{name}" for n in range(jump.layer) for name in ("attn.hook_z", "hook_mlp_out")]
    _, written = model.tree.run_with_cache(before.ids, names_filter=points, time=before.time)
    if sender is None:
        sender = [one.name for one in senders_of(model) if one.depth < 2 * jump.layer]
    head = jump.head if letter == "q" else jump.head * model.cfg.n_key_value_heads // model.cfg.n_heads
    receiver = f"L{jump.layer}H{head}.{letter}"
    path = PathPatch(sender=sender, receiver=receiver, source={0: dict(written)}, positions=positions)
    key = jump._replace(**{name: steps[1].place(jump.row, getattr(jump, name)) for name in ("old", "new")})
    lead, patched = (_lead(model, key, now, hooks) for hooks in ([], path.hooks_for(model)))
    return (lead - patched) / jump.size


def _lead(model: "Model", jump: Jump, step: StepIds, hooks: Pairs) -> float:
    """Column sum of the new key minus that of the old one in a pass over a row; `jump` has places in the row."""
    name = f"blocks.{jump.layer}.attn.hook_pattern"
    with model.tree.hooks(fwd_hooks=[*hooks]):
        _, cache = model.tree.run_with_cache(
            step.ids, attention_mask=step.attention_mask, time=step.time, names_filter=name
        )
    column = cache[name][0, jump.head].float().sum(dim=0)
    return float(column[jump.new] - column[jump.old])
