"""Do sinks follow the noise level or the canvas? For the study `kinds`.

From one step of a run to another, the canvas changes and so does the noise level that the network reads. A pass can
change one without the other: the canvas of one step with the level of another. `GRID` steps of each run, evenly
spaced from its first to its last, give all pairs of a canvas and a level. For two of these steps, *s* and *t*:

- ``level``: what changes if only the level does: (canvas s, level s) against (canvas s, level t);
- ``canvas``: what changes if only the canvas does: (canvas s, level s) against (canvas t, level s);
- ``both``: what changes in the run: (canvas s, level s) against (canvas t, level t).

Each is the mean over all ordered pairs of different steps. All queries count, and they are the same in all passes.

Intervals resample groups of prompts, by default the templates of word problems, not single prompts, as prompts of one
template resemble each other (strata.py). Without groups, a prompt of no known template stands for itself.

Pitfall: a canvas with the level of another step is unlike anything in training, for ``level`` and ``canvas`` alike.
A difference between the two is therefore not one between usual and unusual inputs, but neither is small by default.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.intervals import interval_rows
from sinklens.analyses.runs import OwnRun
from sinklens.analyses.scales import DIFFERENCE, LOG, SHARE, Scale
from sinklens.analyses.strata import groups_of, shaped, stratified
from sinklens.model.prompts import SinglePrompt
from sinklens.sinks import EpsilonOverMean
from sinklens.sinks.detectors import over_others
from sinklens.sinks.matching import ratio
from sinklens.tasks.word_problems import PROBLEM_KINDS, template_of

if TYPE_CHECKING:
    from sinklens.model import Model

GRID = 5
EDITS = ("level", "canvas", "both")
MEASURES = {
    "moved": "heads whose strongest key differs, share",
    "kept": "sinks that are still a sink of the same head, share",
    "sinks": "sinks per head",
    "in_answer": "sinks that are in the answer, share",
}
Sums = Callable[..., np.ndarray]


def grid_steps(own: Bool[np.ndarray, "batch step"]) -> np.ndarray:
    """`GRID` of the active steps of each row, [batch, grid], evenly spaced; -1 in rows with fewer."""
    found = np.full((len(own), GRID), -1)
    for row, active in enumerate(own):
        steps = np.flatnonzero(active)
        if len(steps) >= GRID:
            found[row] = steps[np.linspace(0, len(steps) - 1, GRID).round().astype(int)]
    return found


def noise_levels(model: "Model", found: OwnRun, prompts: Sequence[SinglePrompt]) -> xr.Dataset:
    """What each prompt contributes to `level_rows`, and the number of its template.

    ``level_moved`` and ``level_moved_of`` [prompt, edit]: heads whose strongest key differs, and all heads, summed over
    the pairs; ``level_kept`` and ``level_kept_of``: sinks that remain, and all sinks; ``level_sinks`` and
    ``level_in_answer`` [prompt, canvas, level]: counts. All NaN for a network that reads no noise level.
    """
    known = [template_of(prompt) if isinstance(prompt, str) else None for prompt in prompts]
    template = np.array([-1 if name is None else PROBLEM_KINDS.index(name) for name in known])
    rows, edits = len(prompts), ("prompt", "edit")
    parts = {name: np.full((rows, len(EDITS)), np.nan) for name in ("moved", "moved_of", "kept", "kept_of")}
    counts = {name: np.full((rows, GRID, GRID), np.nan) for name in ("sinks", "in_answer")}
    if model.tree.timed:
        steps = grid_steps(found.own)
        scores = grid_scores(model, found, steps)
        for row in np.flatnonzero(steps[:, 0] >= 0).tolist():
            real = found.run.real[row].numpy()
            _fill(scores[row][..., real], int(real[: found.run.prompt_length].sum()), row, parts, counts)
    return xr.Dataset(
        {f"level_{name}": (edits, value) for name, value in parts.items()}
        | {f"level_{name}": (("prompt", "canvas", "level"), value) for name, value in counts.items()}
        | {"template": ("prompt", template)},
        {"edit": list(EDITS), "canvas": np.arange(GRID), "level": np.arange(GRID)},
    )


@torch.no_grad()
def grid_scores(
    model: "Model", found: OwnRun, steps: np.ndarray
) -> Float[np.ndarray, "batch grid_canvas grid_level layer head pos"]:
    """Column sums of all pairs of a canvas and a level of the steps, each row's own."""
    run, names = found.run, [f"blocks.{layer}.attn.hook_sink_scores" for layer in range(model.cfg.n_layers)]
    assert run.time is not None, "the network reads a noise level"
    batch, device = torch.arange(len(steps)), model.cfg.device
    chosen = torch.from_numpy(steps).clamp(min=0)
    passes: list[Tensor] = []
    for canvas in range(GRID):
        ids = run.canvas[batch, chosen[:, canvas]].to(device)
        for level in range(GRID):
            seen = model.tree.peek(ids, run.real.to(device), names, run.time[batch, chosen[:, level]].to(device))
            passes.append(torch.stack([seen[name].float().cpu() for name in names], dim=1))
    return torch.stack(passes, dim=1).unflatten(1, (GRID, GRID)).numpy()


def _fill(
    scores: Float[np.ndarray, "canvas level layer head pos"],
    prompt_length: int,
    row: int,
    parts: Mapping[str, np.ndarray],
    counts: Mapping[str, np.ndarray],
) -> None:
    """Write the numbers of one row."""
    strongest, sinks = scores.argmax(axis=-1), _sinks(scores)
    counts["sinks"][row] = sinks.sum(axis=(2, 3, 4))
    counts["in_answer"][row] = sinks[..., prompt_length:].sum(axis=(2, 3, 4))
    for number, edit in enumerate(EDITS):
        pairs = list(_compared(edit))
        parts["moved"][row, number] = sum((strongest[one] != strongest[other]).sum() for one, other in pairs)
        parts["moved_of"][row, number] = len(pairs) * strongest[0, 0].size
        parts["kept"][row, number] = sum((sinks[one] & sinks[other]).sum() for one, other in pairs)
        parts["kept_of"][row, number] = sum(sinks[one].sum() for one, _ in pairs)


def _compared(edit: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The two passes, each (canvas, level), of every ordered pair of steps."""
    for s, t in permutations(range(GRID), 2):
        yield (s, s), (t if edit != "level" else s, t if edit != "canvas" else s)


def _sinks(scores: Float[np.ndarray, "canvas level layer head pos"]) -> Bool[np.ndarray, "canvas level layer head pos"]:
    """Sinks by the default definition, `EpsilonOverMean`."""
    named = xr.DataArray(scores, dims=("canvas", "level", "layer", "head", "pos"))
    return (named - over_others(named) > EpsilonOverMean().epsilon).to_numpy()


def level_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`MEASURES` with intervals over templates.

    ``moved`` and ``kept`` for each edit and for the difference canvas − level; ``sinks`` and ``in_answer`` for the
    first and the last level with all canvases, and the first and the last canvas with all levels. Empty for a network
    that reads no noise level.
    """
    known = ~np.isnan(data["level_moved_of"].to_numpy()[:, 0])
    if not known.any():
        return []
    data = data.isel(prompt=known)
    template, group = data["template"].to_numpy(), groups_of(data)
    alone = np.where(template < 0, len(PROBLEM_KINDS) + np.arange(len(template)), template)
    cluster = alone if group is None else group
    rows: list[dict[str, Any]] = []

    def add(
        measure: str, group: str, statistic: Sums, *parts: np.ndarray, scale: Scale = SHARE, null: float = np.nan
    ) -> None:
        columns = [part.reshape(len(part), -1) for part in parts]
        found = stratified(lambda *sums: sums, statistic, columns, seed, cluster, False, scale, null)
        (line,) = interval_rows(model, measure, shaped(found.found, 1), {"group": [group]})
        numbers = {"prompts": len(template), "templates": found.groups, "p": found.p}
        rows.append({**line, **numbers, "meaning": MEASURES[measure]})

    for measure in ("moved", "kept"):
        events, places = (data[f"level_{name}"].to_numpy() for name in (measure, f"{measure}_of"))
        for number, edit in enumerate(EDITS):
            add(measure, edit, ratio, events[:, number], places[:, number])
        compared = [part[:, number] for number in (1, 0) for part in (events, places)]
        add(measure, "canvas − level", _difference, *compared, scale=DIFFERENCE, null=0.0)
    heads = data["level_moved_of"].to_numpy()[:, 0] / (GRID * (GRID - 1))
    for axis, other in (("level", "canvas"), ("canvas", "level")):
        for place, name in ((0, "first"), (-1, "last")):
            counts = (data[f"level_{one}"].isel({axis: place}).sum(other) for one in ("sinks", "in_answer"))
            sinks, inside = (one.to_numpy() for one in counts)
            add("sinks", f"{name} {axis}", ratio, sinks, heads * GRID, scale=LOG)
            add("in_answer", f"{name} {axis}", ratio, inside, sinks)
    return rows


def _difference(first: Any, first_of: Any, second: Any, second_of: Any) -> np.ndarray:
    return np.asarray(ratio(first, first_of) - ratio(second, second_of))
