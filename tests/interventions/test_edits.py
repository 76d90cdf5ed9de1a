"""Interventions that edit values at places: each step of a run equals a plain pass with the same edit."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from watching import PADDED, again, compared, entered, watch

from sinklens.interventions import (
    Ablate,
    AblateHeads,
    AblateMLPs,
    AtPositions,
    SkipLayers,
    Steer,
)
from sinklens.interventions.streams import Directions

WAYS = [("llama", False, {}), ("sdar", False, {}), ("llama", True, {}), ("llama", True, {"use_cache": False})]
OTHERS = [("dream", False, {}), ("qwen3_moe", False, {}), ("qwen2", True, {}), ("qwen3", False, {})]
DIRECTION = torch.linspace(-1.0, 2.0, 24)
UNIT = DIRECTION / sum(float(x) ** 2 for x in DIRECTION) ** 0.5
MIDDLE = Directions(torch.stack([DIRECTION * factor for factor in (1.0, 2.0, 3.0)]), "hook_resid_mid")


class Edit(NamedTuple):
    """What an intervention does at layer 1.

    Attributes:
        hooks: the intervention.
        point: the point of layer 1.
        new: from a value [batch, pos, ...], which positions are real, and the stream that entered the layer.
        steps: steps whose positions are changed.
        positions: positions that are changed, and whether only those of decided answers are.
        heads: heads that are changed.
    """

    hooks: Any
    point: str
    new: Any
    steps: range = range(99)
    positions: list[int] | None = None
    decided: bool = False
    heads: list[int] | None = None


def zero(value, real, entered):
    return torch.zeros_like(value)


def mean(z, real, entered):
    return torch.stack([row[there].mean(dim=0).expand_as(row) for row, there in zip(z, real, strict=True)])


def along(stream):
    """The component along the direction."""
    return sum(stream[..., dim] * UNIT[dim] for dim in range(24))[..., None]


@dataclass(frozen=True, kw_only=True)
class ScaleHeads(AtPositions):
    """Multiply the output of heads, z = A·V, by three: as a new value, or in place."""

    acts_on = "attn.hook_z"
    how: str = "new"

    def edit(self, value, hook):
        if self.how == "new":
            return 3 * value
        value *= 3.0
        return value if self.how == "in place, returned" else None


DECIDED = {"layers": [1], "where": "committed"}
EDITS = {
    "heads": Edit(AblateHeads(layers=[1], heads=[2, -1]), "attn.hook_z", zero, heads=[2, 5]),
    "MLP": Edit(AblateMLPs(layers=[1], steps=[1]), "hook_mlp_out", zero, range(1, 2)),
    "MLP at positions": Edit(AblateMLPs(layers=[1], positions=[0, -2]), "hook_mlp_out", zero, positions=[0, -2]),
    "skipped layer": Edit(
        SkipLayers(**DECIDED, steps=[1, 2, 3]), "hook_resid_post", lambda value, real, entered: entered, range(1, 4),
        decided=True,
    ),
    "skipped attention": Edit(SkipLayers("attn", **DECIDED), "hook_attn_out", zero, decided=True),
    "skipped MLP": Edit(SkipLayers("mlp", **DECIDED), "hook_mlp_out", zero, decided=True),
    "add": Edit(
        Steer(DIRECTION, 2.0, **DECIDED), "hook_resid_pre", lambda x, *_: x + 2 * DIRECTION, decided=True
    ),
    "directions": Edit(Steer(MIDDLE, 0.5, **DECIDED), "hook_resid_mid", lambda x, *_: x + DIRECTION, decided=True),
    "project out": Edit(
        Steer(DIRECTION, mode="project_out", **DECIDED), "hook_resid_pre", lambda x, *_: x - along(x) * UNIT,
        decided=True,
    ),
    "set": Edit(
        Steer(DIRECTION, 3.0, mode="set", **DECIDED), "hook_resid_pre", lambda x, *_: x + (3.0 - along(x)) * UNIT,
        decided=True,
    ),
    "dimensions": Edit(
        Ablate(point="hook_resid_pre", dims=[5, -1], by=7, **DECIDED), "hook_resid_pre",
        lambda x, *_: x.index_fill(2, torch.tensor([5, 23]), 7.0), decided=True,
    ),
    **{
        f"of one's own, {how}": Edit(
            ScaleHeads(how=how, layers=[1], heads=[0, 4], steps=[1, 2], positions=[0, 2, -1, -5, -8]), "attn.hook_z",
            lambda z, *_: 3 * z, range(1, 3), positions=[0, 2, -1, -5, -8], heads=[0, 4],
        )
        for how in ("new", "in place", "in place, returned")
    },
    "mean of heads": Edit(
        AblateHeads(by="mean", layers=[1], heads=[4], positions=[0, -2]), "attn.hook_z", mean, positions=[0, -2],
        heads=[4],
    ),
}  # fmt: skip


def changed_places(edit, run, step):
    """The positions [batch, pos] of a step's text that an edit changes: those of the steps that own them."""
    ids, real = entered(run, step)
    columns, starts = torch.arange(ids.shape[1]), real.long().argmax(dim=1)
    causal = bool(run.model.config.is_causal)
    owner = (columns - run.prompt_length + 1).clamp(min=0) if causal else torch.full_like(columns, step)
    places = real & torch.isin(owner, torch.tensor(edit.steps))
    if edit.decided:
        places &= (columns >= run.prompt_length) & (ids != -1) & (ids != run.model.mask_token_id)
    if edit.positions is not None:
        at = [starts + place if place >= 0 else starts * 0 + run.real.shape[1] + place for place in edit.positions]
        places &= torch.stack([columns == place[:, None] for place in at]).any(dim=0)
    return places


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize(
    ("architecture", "causal", "settings", "name"),
    [(*way, name) for way in WAYS for name in EDITS if not (way[1] and name == "mean of heads")]
    + [(*way, name) for way in OTHERS for name in ("heads", "MLP")],
)
def test_every_step_equals_a_plain_pass_with_the_edit(model, settings, name):
    edit, at = EDITS[name], f"blocks.1.{EDITS[name].point}"
    watched = watch(model, PADDED, [edit.hooks], [at, "hook_logits"], **settings)
    count = 0

    def edits(step):
        places, real = changed_places(edit, watched.run, step), entered(watched.run, step)[1]
        before = again(watched.run, step).values["blocks.1.hook_resid_pre"]

        def change(value):
            chosen = places.view(*places.shape, *[1] * (value.ndim - 2))
            if edit.heads is not None:
                chosen = chosen & torch.isin(torch.arange(6), torch.tensor(edit.heads))[:, None]
            return torch.where(chosen, edit.new(value, real, before), value)

        return {at: change}

    for step, plain in compared(watched, edits):
        count += int((again(watched.run, step).values[at] != plain.values[at]).any())
    assert count > 0
