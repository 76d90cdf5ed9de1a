"""Resampling from matching donors: values of other runs, taken at positions of the same step, state and kind.

A value of a position that does not match changes more than what is studied: values differ between masked and decided
positions, and between step 2 and step 20. Each position takes its value from a random donor position that agrees with
it in everything in ``match``; causal scrubbing needs this.

Limitation: exact matching needs many donors. A position without a donor is an error; there is no second-best match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.points import Point
from sinklens.interventions.places import CANVAS, AtPositions, Places
from sinklens.interventions.scores import kinds_now, states_now
from sinklens.model import Model
from sinklens.runs.caches import chosen_points
from sinklens.runs.intervention import Canvas, Pairs, RunContext, layer_of
from sinklens.sinks.kinds import Kind, PlaceState
from sinklens.utils.arguments import Seed, plainly_shown

CODES: dict[str, Any] = {"state": PlaceState, "kind": Kind}
MATCHED = ("step", "state", "position", "kind")


@dataclass(frozen=True)
class Donors:
    """Values of other runs with the labels of their positions, collected by `sinklens.experiments.donors`.

    Attributes:
        values: point -> [sample, ...], the values at the same places for all points.
        step: the step that computed each sample; in an autoregressive run, the step that the position belongs to.
        state: its `PlaceState` on the canvas of that step.
        position: counted from 0 at the first answer position; in the prompt −1, −2, … from the row's first token on.
        kind: the `Kind` of its token; MISSING if the model has no tokenizer.
    """

    values: dict[str, Tensor]
    step: Int[Tensor, " sample"]
    state: Int[Tensor, " sample"]
    position: Int[Tensor, " sample"]
    kind: Int[Tensor, " sample"]

    def __repr__(self) -> str:
        return f"Donors({len(self.step)} samples of {', '.join(self.values)})"

    def of_point(self, name: str) -> Tensor:
        """The values of a point.

        Raises:
            SettingError: the values were not collected.
        """
        require(name in self.values, f"the donors have no {name!r}; they hold {', '.join(self.values)}.")
        return self.values[name]


def labels_now(run: RunContext, canvas: Any, step: int, kinds: bool) -> dict[str, Int[Tensor, "batch pos"]]:
    """The labels of the positions of a step's canvas; without `kinds`, every kind is MISSING."""
    ids = canvas.ids
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = run.real.long().argmax(dim=1, keepdim=True).to(ids.device)
    answer = columns - run.prompt_length
    owner = (answer + 1).clamp(min=0) if run.causal else torch.full_like(columns, step)
    kind = kinds_now(run, canvas, "match='kind'") if kinds else torch.full_like(columns, int(Kind.MISSING))
    position = torch.where(answer >= 0, answer, starts - columns - 1)
    return {"step": owner, "state": states_now(run, canvas), "position": position, "kind": kind}


class Draws:
    """Draws a donor for each position of one run."""

    def __init__(self, donors: Donors, match: Sequence[str], seed: int, run: RunContext) -> None:
        require(
            not isinstance(match, str) and match and set(match) <= set(MATCHED),
            f"match must be a list of {', '.join(MATCHED)}; got {match!r}.",
        )
        self._donors, self._match, self._seed, self._run = donors, tuple(match), seed, run
        self._canvas = Canvas(run)
        labels = torch.stack([getattr(donors, name).long() for name in match], dim=1)
        self._samples: dict[tuple[int, ...], list[int]] = {}
        for sample, label in enumerate(labels.tolist()):
            self._samples.setdefault(tuple(label), []).append(sample)
        self._labels = torch.zeros(0)

    def first(self) -> Pairs:
        """The hook that reads the canvas; list it before those that draw."""
        return [(CANVAS, self._begin)]

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        self._canvas.hook(value, hook)
        now = labels_now(self._run, self._canvas.now, int(hook.step or 0), "kind" in self._match)
        self._labels = torch.stack([now[name].long() for name in self._match], dim=-1).cpu()

    def values(self, hook: Point, name: str, wanted: Bool[Tensor, "#batch pos"], dtype: torch.dtype) -> Tensor:
        """A donor's value at each `wanted` position of the text, [batch, pos, ...]; 0 elsewhere."""
        source, step = self._donors.of_point(name), int(hook.step or 0)
        rows = len(self._run.real)
        wanted = wanted.expand(rows, -1) & self._run.real[:, : wanted.shape[1]].to(wanted.device)
        new = torch.zeros(rows, wanted.shape[1], *source.shape[1:], dtype=dtype, device=wanted.device)
        layer = layer_of(hook) if name.startswith("blocks.") else -1
        noise = random_places(self._run, hook, self._seed, layer + 1)
        for row, column in wanted.nonzero().tolist():
            label = tuple(self._labels[row, column].tolist())
            if label not in self._samples:
                shown = ", ".join(
                    f"{name} {CODES[name](code).name.lower() if name in CODES else code}"
                    for name, code in zip(self._match, label, strict=True)
                )
                raise SettingError(
                    f"no donor matches position {column} of row {row} at step {step} ({shown}); collect donors from "
                    f"more prompts, or match fewer of {', '.join(MATCHED)}."
                )
            samples = self._samples[label]
            new[row, column] = source[samples[int(noise[row, column] * len(samples))]].to(new)
        return new


def random_places(run: RunContext, hook: Point, seed: int, *place: int) -> Float[Tensor, "batch pos"]:
    """A random number in [0, 1) for each position of the text, the same in every batch.

    It depends only on the seed, the row's prompt, the step (in a diffusion run), the position and `place`.
    """
    real = (hook.forward_pass.real if run.single else run.real).cpu()
    found, step = torch.zeros(real.shape, dtype=torch.float64), 0 if run.causal else int(hook.step or 0)
    for row, there in enumerate(real):
        rng = np.random.default_rng([seed, 0 if run.single else run.row_keys[row], step, *place])
        found[row, there] = torch.from_numpy(rng.random(int(there.sum())))
    return found


@plainly_shown
@dataclass(frozen=True, kw_only=True)
class Resample(AtPositions):
    """Replace the values of points at each position by those of a matching donor position.

    Attributes:
        donors: values of other runs; see `sinklens.experiments.donors`.
        names: points to change, which have a position axis; by default all that `donors` holds.
        match: what donor and position must have in common, of "step", "state", "position" (in the prompt or in the
            answer) and "kind".
        seed: seed of the draws, which depend only on the seed, the row's prompt, the step (in a diffusion run), the
            layer and the position.
        heads: heads whose values are replaced, at points with a head axis (key/value heads where the point has those).
        positions, where: positions whose values are replaced.
    """

    needs_run: ClassVar[str] = "Resample matches donors to the steps of a run; use it in trace or generate."

    donors: Donors
    names: Sequence[str] | Any | None = None
    match: Sequence[str] = MATCHED
    seed: Seed = 0

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        points = chosen_points(list(self.donors.values) if self.names is None else self.names, model, self.layers)
        places, draws = Places(self, model, run, points), Draws(self.donors, self.match, self.seed, run)

        def resample(value: Tensor, hook: Point) -> Tensor | None:
            chosen, first = places.along(hook, value, self.heads), hook.forward_pass.first(value.shape[1])
            if chosen is None:
                return None
            wanted = torch.nn.functional.pad(chosen.flatten(2).any(dim=2), (first, 0))
            return torch.where(chosen, draws.values(hook, str(hook.name), wanted, value.dtype)[:, first:], value)

        return [*draws.first(), *places.around([(name, resample) for name in points])]
