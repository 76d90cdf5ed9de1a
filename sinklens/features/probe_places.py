"""What a probe reads: activations at chosen places of runs, with where they come from and what is known of each place.

A *place* is a position of a prompt at a step. `probe_data` reads finished runs: each step is one pass of the unchanged
model over the step's canvas, for all points at once, as in `sinklens.features.read_features`; hooks of the run are not
included. `ProbeData.of_store` reads what `sinklens.features.collect` wrote.

Every place has the columns

    prompt, step, pos, column   where it is; `column` counts padding, `pos` does not
    from_answer                 its distance from the first position of the answer; negative in the prompt
    noise                       share of the answer that is undecided at the step, 1 to 0
    state                       "prompt", "masked" or "committed"
    token_id                    the token on the canvas of the step
    final_token                 the token at the position after the run
    decided_step                the step that decides the position; -1 in the prompt
    steps_left                  decided_step − step
    is_sink                     whether a detector finds a sink there in any layer and head, if one was passed

and further ones through `ProbeData.with_label`. Each of them can be a label or a condition.

Limitation: all activations are in memory, places × d_model numbers per point. Restrict `steps`, `scope` and `positions`
for large models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped

from sinklens.errors import SettingError, require
from sinklens.experiments.lens import masked_share
from sinklens.experiments.step_ids import exact_step
from sinklens.features.places import Scope, in_scope, places_of_step, states_of_run, stream_point
from sinklens.features.store import COLUMNS, ActivationStore
from sinklens.runs.intervention import place_mask, within
from sinklens.runs.result import Generation
from sinklens.sinks import Detector
from sinklens.sinks.kinds import STATES
from sinklens.utils.arguments import as_tuple, checked


@dataclass(frozen=True, eq=False)
class ProbeData:
    """Activations at places, with what is known of each; see the module.

    Attributes:
        values: by point, the activations [place, d]; heads are flattened.
        columns: by name, one value for each place.
        canvases: the canvases that the places are on, [canvas, pos], as numbered by the column ``canvas``; -1 where
            there is no token. Empty if they are not known.
    """

    values: Mapping[str, np.ndarray]
    columns: Mapping[str, np.ndarray]
    canvases: Int[np.ndarray, "canvas pos"] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))

    def __post_init__(self) -> None:
        require(
            self.values and "prompt" in self.columns,
            "probe data needs activations at one point at least, and a column 'prompt': probes are tested on "
            "prompts that they were not fitted on.",
        )
        sizes = {name: len(array) for name, array in {**self.values, **self.columns}.items()}
        require(
            len(set(sizes.values())) <= 1, f"activations and columns must have one value for each place; got {sizes}."
        )

    def __len__(self) -> int:
        """Number of places."""
        return len(self.columns["prompt"])

    def __repr__(self) -> str:
        prompts = len(np.unique(self.columns["prompt"]))
        return f"ProbeData({len(self)} places of {prompts} prompts at {', '.join(self.values)})"

    @classmethod
    def of_store(cls, store: ActivationStore) -> "ProbeData":
        """The activations of all points of a store, with its columns: prompt, step, pos, state and token_id."""
        columns: dict[str, np.ndarray] = {name: store.column(name) for name in COLUMNS}
        columns["state"] = np.array(STATES)[columns["state"]]
        of_points = {name: ActivationStore(store.path, name) for name in store.points}
        return cls({name: one.read(0, len(one)).numpy() for name, one in of_points.items()}, columns)

    def column(self, name: str) -> Shaped[np.ndarray, " place"]:
        """One column.

        Raises:
            SettingError: no column has this name.
        """
        require(
            name in self.columns,
            f"the places have no column {name!r}; they have {', '.join(self.columns)}. Add one with "
            f"data.with_label({name!r}, values).",
        )
        return self.columns[name]

    def at(self, point: str) -> Shaped[np.ndarray, "place d"]:
        """The activations at a point.

        Raises:
            SettingError: they were not read there.
        """
        require(
            point in self.values, f"there are no activations at {point!r}; there are some at {', '.join(self.values)}."
        )
        return self.values[point]

    def with_label(self, name: str, values: Any) -> "ProbeData":
        """The same places with another column.

        Args:
            values: one for each place or one for each prompt; or of a single run, an array [batch, pos] or [batch,
                step, pos] over columns of its canvas, such as a track's.

        Raises:
            SettingError: the array has another shape.
        """
        array, places = np.asarray(values), self.columns
        if array.shape == (len(self),):
            found = array
        elif array.ndim == 1 and len(array) == places["prompt"].max(initial=-1) + 1:
            found = array[places["prompt"]]
        elif array.ndim in (2, 3) and "column" in places:
            axes = ("prompt", "column") if array.ndim == 2 else ("prompt", "step", "column")
            index = tuple(places[axis] for axis in axes)
            require(
                not any(int(at.max(initial=-1)) >= size for at, size in zip(index, array.shape, strict=True)),
                f"label {name!r} has shape {list(array.shape)}, and a place lies outside of [{', '.join(axes)}].",
            )
            found = array[index]
        else:
            raise SettingError(
                f"label {name!r} must have one value for each of {len(self)} places, or for each of "
                f"{places['prompt'].max(initial=-1) + 1} prompts; got an array of shape {list(array.shape)}. Add "
                f"labels of prompts before you choose places."
            )
        return replace(self, columns={**self.columns, name: found})

    def chosen(self, mask: Bool[np.ndarray, " place"]) -> "ProbeData":
        """Only the places where `mask` is True."""
        return replace(
            self,
            values={point: array[mask] for point, array in self.values.items()},
            columns={name: array[mask] for name, array in self.columns.items()},
        )

    def where(self, **conditions: Any) -> "ProbeData":
        """Only the places whose columns have the given values: ``data.where(state="masked", step=[0, 4])``.

        Raises:
            SettingError: an unknown column, or no place is left.
        """
        mask = np.ones(len(self), dtype=bool)
        for name, wanted in conditions.items():
            mask &= np.isin(self.column(name), np.atleast_1d(wanted))
        require(mask.any(), f"no place has {', '.join(f'{name}={value!r}' for name, value in conditions.items())}.")
        return self.chosen(mask)


@checked
@torch.no_grad()
def probe_data(
    run: "Generation",
    points: str | Sequence[str],
    *,
    scope: Scope = "all",
    steps: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    detector: "Detector | None" = None,
) -> ProbeData:
    """Activations of a run, at every place in scope.

    Args:
        run: a `Generation`, or a trace after its block. Rows that wait for the rest of the batch are left out, and an
            autoregressive run has each token at the step that reads it first.
        points: names of points with a vector at each position.
        scope: states of the positions that are read, as in `sinklens.features.collect`.
        steps: steps of the run; negative values count from the end. None means all.
        positions: positions, not counting padding. None means all.
        detector: defines the column ``is_sink``; the run must have recorded its sinks.

    Raises:
        SettingError: a step, point or position that does not exist, no place in scope, a detector without recorded
            sinks, or a run whose steps a separate pass does not repeat.
    """
    names, chosen = [stream_point(run.model, point) for point in as_tuple(points)], within("step", steps, run.steps_run)
    require(detector is None or run.sinks is not None, "detector= needs recorded sinks; run with record_sinks=True.")
    limit = place_mask(positions, run.real).cpu().numpy()
    inside, states = in_scope(run, scope), states_of_run(run)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    values: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for step in chosen:
        mask = limit & inside[:, step] & places_of_step(run, step)
        if not mask.any():
            continue
        ids, real, time = exact_step(run, step)
        seen = run.model.tree.peek(ids, real, names, time)
        row, column = mask.nonzero()
        for name in names:
            values[name].append(seen[name].flatten(2).float().cpu().numpy()[row, column])
        found.append((row, np.full(len(row), step), column))
    require(found, f"the run has no place in scope={scope!r}, steps={steps!r}, positions={positions!r}.")
    row, at_step, column = (np.concatenate(part) for part in zip(*found, strict=True))
    columns = _columns(run, row, at_step, column, states)
    if detector is not None and run.sinks is not None:
        sinks = run.sinks.detect(detector).any(("layer", "head")).transpose("batch", "step", "pos").to_numpy()
        columns["is_sink"] = sinks[row, at_step, column]
    known = run.real.cpu().numpy()[:, None] & ~run.undecided.cpu().numpy()
    canvases = np.where(known, run.canvas.cpu().numpy(), -1)[:, :-1].reshape(-1, run.canvas.shape[2])
    return ProbeData({name: np.concatenate(parts) for name, parts in values.items()}, columns, canvases)


def _columns(
    run: "Generation", row: np.ndarray, step: np.ndarray, column: np.ndarray, states: np.ndarray
) -> dict[str, np.ndarray]:
    """The columns of the module, except ``is_sink``."""
    pads = (~run.real).long().cumprod(dim=1).sum(dim=1).cpu().numpy()
    canvas, decided = run.canvas.cpu().numpy(), run.unmask_step.cpu().numpy()[row, column]
    return {
        "prompt": row,
        "step": step,
        "pos": column - pads[row],
        "column": column,
        "from_answer": column - run.prompt_length,
        "noise": masked_share(run)[row, step],
        "state": np.array(STATES)[states[row, step, column]],
        "token_id": canvas[row, step, column],
        "final_token": canvas[row, -1, column],
        "decided_step": decided,
        "steps_left": decided - step,
        "canvas": row * run.steps_run + step,
    }
