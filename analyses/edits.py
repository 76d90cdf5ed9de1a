"""Do sinks move more when a model decides a token than when any token is edited?

    sinklens analyse edits tiny-llada tiny-dream tiny-llama

A step of a diffusion model edits one token of its canvas, so its null edits one token, too. (The null of the study
`dynamics` edits none: it shows bookkeeping alone.) All measures compare the strongest key of every head, the largest
column sum, on two canvases that differ in one decision or one edit:

- ``decided``: consecutive canvases of the run;
- ``shuffled``: the same tokens, decided in random order;
- ``another answer``: the answer to another prompt of the study, written in in the order of the run;
- ``decided, later``: as ``decided``, with sums over the queries after the decided position only;
- ``prompt token``, ``answer token``, ``operand``: one token of the finished text (one of the prompt, of the answer, or
  a number of the prompt) is replaced by another token of its kind, with sums over the queries after it only.

In an autoregressive model, earlier queries cannot see an edit, and the first three do not exist. Sums over *later*
queries can move in every model, so the last three compare an autoregressive model with a diffusion model.

The *lead* of a jump is the margin of the new strongest key over the next, in column sums. A jump with a small lead is a
change between two nearly equal keys: ``jump_share`` is given for every jump and for those with a lead of at least 0.1,
0.3, 1 and 3.

Caveat: an edit within the finished text can contradict the rest of it, which a decision seldom does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.runs import OwnRun
from sinklens.analyses.study import Study
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks.kinds import Kind
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

EDITS = {
    "decided": "consecutive canvases of the run, all queries",
    "shuffled": "the same tokens decided in random order, all queries",
    "another answer": "another prompt's answer written in, all queries",
    "decided, later": "consecutive canvases of the run, later queries",
    "prompt token": "a token of the prompt replaced by one of its kind, later queries",
    "answer token": "a token of the answer replaced by one of its kind, later queries",
    "operand": "a number of the prompt replaced by another, later queries",
}
COMPARED = {
    "decided − shuffled": ("decided", "shuffled"),
    "decided − another answer": ("decided", "another answer"),
    "decided, later − prompt token": ("decided, later", "prompt token"),
    "decided, later − answer token": ("decided, later", "answer token"),
    "decided, later − operand": ("decided, later", "operand"),
}
LEADS = (0.0, 0.1, 0.3, 1.0, 3.0)
MEASURES = {
    "jump_share": "share of heads and edits at which the strongest key changes with at least this lead",
    "near_tie_share": "share of the jumps with a lead below 0.1",
}
FIXED = (Kind.START, Kind.END, Kind.FILLING, Kind.MARKUP, Kind.MASK)  # not edited


class Jumps(NamedTuple):
    """Jumps between pairs of canvases, [pair, layer, head] each.

    Attributes:
        moved: whether the strongest key differs.
        lead: margin of the strongest key over the next on the second canvas.
    """

    moved: Bool[np.ndarray, "pair layer head"]
    lead: Float[np.ndarray, "pair layer head"]


@dataclass
class Edits(Study):
    """See the module.

    Attributes:
        draws: number of edits of each sort for each prompt.
    """

    name: ClassVar[str] = "edits"
    needs_mask_token: ClassVar[str] = "its steps accept tokens and take them back, so no single step decides a position"
    draws: Count = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._others: dict[str, SinglePrompt] = {}
        self._answers: dict[tuple[str, str], Int[Tensor, " pos"]] = {}

    def refusal(self, model: "Model") -> str:
        if model.tree.timed:
            return "a network that reads a noise level: an edit has none. Leave it out."
        if model.tree.changes_attention:
            return "a model that changes its attention from pass to pass: an edit is no such pass. Leave it out."
        return super().refusal(model) if not model.causal else ""

    def begin(self, models: Sequence[str], prompts: Sequence[SinglePrompt]) -> None:
        """Choose the prompt whose answer is written in: the next."""
        self._others = {repr(one): prompts[number - len(prompts) + 1] for number, one in enumerate(prompts)}
        self._answers = {}

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES`: ``jump_share`` [prompt, edit, lead] and ``near_tie_share`` [prompt, edit]."""
        found = self.generate(model, prompts, settings, record_sinks=False)
        self._keep(model, prompts, found)
        rows = [self._of_row(model, found, row, prompts[row], settings) for row in range(len(prompts))]
        share, ties = (np.stack(part) for part in zip(*rows, strict=True))
        coords = {"edit": list(EDITS), "lead": list(LEADS)}
        axes = ("prompt", "edit", "lead")
        return xr.Dataset({"jump_share": (axes, share), "near_tie_share": (axes[:2], ties)}, coords)

    def _keep(self, model: "Model", prompts: Sequence[SinglePrompt], found: OwnRun) -> None:
        """Keep the answers of a run, which other prompts need."""
        run = found.run
        for row, prompt in enumerate(prompts):
            real = run.real[row, run.prompt_length :]
            self._answers[model.name, repr(prompt)] = run.tokens[row, run.prompt_length :][real]

    def _other(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> Int[Tensor, " pos"]:
        """The answer to the next prompt of the study; empty if the study has no other prompt."""
        other = self._others.get(repr(prompt), prompt)
        if other == prompt:
            return torch.empty(0, dtype=torch.long)
        if (model.name, repr(other)) not in self._answers:
            self._keep(model, [other], self.generate(model, [other], settings, record_sinks=False))
        return self._answers[model.name, repr(other)]

    def _of_row(
        self, model: "Model", found: OwnRun, row: int, prompt: SinglePrompt, settings: Settings
    ) -> tuple[Float[np.ndarray, "edit lead"], Float[np.ndarray, " edit"]]:
        """`MEASURES` of one prompt."""
        run, noise = found.run, np.random.default_rng([self.seed, *repr(prompt).encode()])
        real = run.real[row]
        text, start = run.tokens[row][real], int(real[: run.prompt_length].sum())
        jumps: dict[str, Jumps | None] = dict.fromkeys(EDITS)
        if not model.causal:
            order = run.unmask_step[row][real][start:].numpy()
            jumps |= trajectories(model, text, start, order, self._other(model, prompt, settings), noise)
        jumps |= self._single(model, text[text >= 0], start, noise)
        share, ties = zip(*(measures(jumps[name]) for name in EDITS), strict=True)
        return np.stack(share), np.array(ties)

    def _single(
        self, model: "Model", text: Int[Tensor, " pos"], start: int, noise: np.random.Generator
    ) -> dict[str, Jumps | None]:
        """Jumps after single edits of the finished text."""
        kinds, place = kinds_of_vocabulary(model), np.arange(len(text))
        kind = kinds[text.numpy()]
        ends = np.flatnonzero((place >= start) & (kind == Kind.END))
        length = int(ends[0]) if len(ends) else len(text)
        free = ~np.isin(kind, FIXED) & (place < min(length, len(text) - 1))
        sorts = {
            "prompt token": free & (place < start), "answer token": free & (place >= start),
            "operand": free & (place < start) & (kind == Kind.DIGIT),
        }  # fmt: skip
        drawn = {name: places_drawn(where, self.draws, noise) for name, where in sorts.items()}
        return {name: edited(model, text, places, kinds, noise) for name, places in drawn.items()}

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``jumps``: `MEASURES`; ``differences``: `COMPARED`, paired by prompt, with p values over the family of a
        model.
        """
        differences = {name: self.contrasts(data) for name, data in measured.items()}
        tables = {
            "jumps": interval_table(measured, list(MEASURES), self.seed),
            "differences": judged(interval_table(differences, ["jump_share"], self.seed, null=0.0), "more", "less"),
        }
        return {name: table.assign(meaning=table["measure"].map(MEASURES)) for name, table in tables.items()}

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """``jump_share`` of `COMPARED` [prompt, compared, lead]."""
        share = data["jump_share"]
        pairs = [share.sel(edit=one, drop=True) - share.sel(edit=other, drop=True) for one, other in COMPARED.values()]
        return xr.Dataset({"jump_share": xr.concat(pairs, dim="compared")}).assign_coords(compared=list(COMPARED))

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``leads``: the share of jumps against the lead, a panel per sort of edit."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import curves
        from sinklens.views.figures import panels

        table = interval_table(measured, ["jump_share"], self.seed)
        figure, axes = panels(len(EDITS), columns=4, size=(4, 3))
        for (edit, meaning), ax in zip(EDITS.items(), axes, strict=True):
            curves(table[table["edit"] == edit], "lead", ax).set(
                xlabel="least lead", ylabel="jumps, share", title=wrapped(meaning, 34)
            )
        return {"leads": figure}


def places_drawn(allowed: Bool[np.ndarray, " pos"], number: int, noise: np.random.Generator) -> list[int]:
    """`number` allowed places, with replacement; none if there are none."""
    places = np.flatnonzero(allowed)
    return noise.choice(places, number).tolist() if len(places) else []


def measures(jumps: Jumps | None) -> tuple[Float[np.ndarray, " lead"], float]:
    """``jump_share`` for every lead, and ``near_tie_share`` (NaN without a jump); NaN without canvases."""
    if jumps is None or not jumps.moved.size:
        return np.full(len(LEADS), np.nan), float("nan")
    near = (jumps.lead[jumps.moved] < LEADS[1]).mean() if jumps.moved.any() else np.nan
    return by_layer(jumps).mean(axis=1), float(near)


def by_layer(jumps: Jumps) -> Float[np.ndarray, "lead layer"]:
    """``jump_share`` of each layer."""
    return np.stack([(jumps.moved & (jumps.lead >= least)).mean(axis=(0, 2)) for least in LEADS])


def trajectories(
    model: "Model",
    text: Int[Tensor, " pos"],
    start: int,
    order: Int[np.ndarray, " answer"],
    other: Int[Tensor, " other"],
    noise: np.random.Generator,
) -> dict[str, Jumps | None]:
    """Jumps along the run's canvases and along those of its nulls.

    Args:
        text: the finished text without padding.
        start: its first answer position.
        order: the step that decides each answer position.
        other: the answer to another prompt, as long as this one or it is cut or left out.
    """
    assert model.mask_token_id is not None
    mask = model.mask_token_id
    canvases = revealed(text, start, order, mask)
    found = dict(zip(("decided", "decided, later"), _along(model, canvases), strict=True))
    shuffled = revealed(text, start, noise.permutation(order), mask)
    found["shuffled"] = _along(model, shuffled, later=False)[0]
    if len(other) >= len(order):
        written = torch.cat([text[:start], other[: len(order)]])
        found["another answer"] = _along(model, revealed(written, start, order, mask), later=False)[0]
    return found


def revealed(
    text: Int[Tensor, " pos"], start: int, order: Int[np.ndarray, " answer"], mask: int
) -> Int[Tensor, "step pos"]:
    """The canvases with which the steps begin that decide the answer of `text` in the given order."""
    steps = np.unique(order)
    canvases = text.repeat(len(steps), 1)
    late = torch.from_numpy(order[None] >= steps[:, None])
    canvases[:, start:][late] = mask
    return canvases


def compared(
    before: Float[np.ndarray, "#pair layer head pos"], after: Float[np.ndarray, "#pair layer head pos"]
) -> Jumps:
    """Jumps between pairs of canvases."""
    lead = np.diff(np.partition(after, -2, axis=-1)[..., -2:], axis=-1)[..., 0]
    return Jumps(before.argmax(axis=-1) != after.argmax(axis=-1), lead)


def _along(model: "Model", canvases: Int[Tensor, "step pos"], later: bool = True) -> tuple[Jumps | None, Jumps | None]:
    """Jumps from each canvas to the next, over all queries, and over those after the last changed position."""
    if len(canvases) < 2:
        return None, None
    changed = (canvases[1:] != canvases[:-1]).numpy()
    last = np.where(changed.any(axis=1), changed.shape[1] - 1 - changed[:, ::-1].argmax(axis=1), -1)
    usable = (last >= 0) & (last < changed.shape[1] - 1)
    first = np.zeros((len(canvases), 3), dtype=int)  # all queries; those after what this, and the next step, change
    first[1:, 1] = first[:-1, 2] = last + 1
    sums = column_sums(model, canvases, first if later else None)
    every = compared(sums[:-1, 0], sums[1:, 0])
    if not later or not usable.any():
        return every, None
    return every, compared(sums[:-1, 2][usable], sums[1:, 1][usable])


def edited(
    model: "Model",
    text: Int[Tensor, " pos"],
    places: Sequence[int],
    kinds: Int[np.ndarray, " vocab"],
    noise: np.random.Generator,
    later: bool = True,
) -> Jumps | None:
    """Jumps after replacing the token at each place by another of its kind; None without places.

    Args:
        later: whether sums are over the queries after the edit only.
    """
    canvases, first = [], []
    for place in places:
        same = np.flatnonzero(kinds == kinds[int(text[place])])
        same = same[same != int(text[place])]
        if len(same):
            canvas = text.clone()
            canvas[place] = int(noise.choice(same))
            canvases.append(canvas)
            first.append(place + 1 if later else 0)
    if not canvases:
        return None
    queries = np.array(first)
    before = column_sums(model, text[None], queries[None])[0]
    return compared(before, column_sums(model, torch.stack(canvases), queries[:, None])[:, 0])
