"""Runs whose rows keep only their active steps.

In a batch, a row that has finished its block or its answer waits for the others: it passes through the model again
without any change. Run alone, it would not have these steps. The measurements of a prompt must not depend on the rest
of its batch, so waiting steps are removed: `own_run` records which steps of each row are active, and `active_steps`
moves those to the front of a track.

Pitfall: copies of a prompt get different random numbers in one batch, but the same ones in separate batches; at a
temperature above 0, give each prompt once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.model import Model
from sinklens.model.prompts import SinglePrompt
from sinklens.runs import generate
from sinklens.runs.request import Hooks
from sinklens.runs.result import Generation
from sinklens.sampling import Policy
from sinklens.sampling.settings import Settings
from sinklens.sinks import Record, SinkTrack
from sinklens.sinks.store import nothing

__all__ = ["OwnRun", "active_steps", "own_run"]


@dataclass(frozen=True)
class OwnRun:
    """A run, and the active steps of each row.

    Attributes:
        run: the unchanged run.
        own: [batch, step], the active steps: False where a row waited for others.
    """

    run: "Generation"
    own: Bool[np.ndarray, "batch step"]

    @property
    def track(self) -> SinkTrack:
        """The sink track of active steps."""
        assert self.run.sinks is not None, "the run recorded no sinks"
        return active_steps(self.run.sinks, self.own)


def own_run(
    model: "Model",
    prompts: Sequence[SinglePrompt],
    settings: Settings,
    *,
    seed: int = 0,
    chat_template: bool | str = False,
    record_sinks: bool | Record = True,
    hooks: Hooks = (),
    replay: "Generation | Tensor | None" = None,
    cache: Policy | None = None,
) -> OwnRun:
    """`sinklens.generate`, and which rows were active at which step."""
    run = generate(
        model, list(prompts), seed=seed, chat_template=chat_template, record_sinks=record_sinks, progress=False,
        hooks=hooks, replay=replay, cache=cache, **settings,
    )  # fmt: skip
    return OwnRun(run, run.active.numpy())


def noise_of(ids: Any, *seeds: int) -> np.random.Generator:
    """Random numbers that depend on the seeds and the ids of a text alone."""
    digest = hashlib.sha256(repr(ids.tolist()).encode()).digest()
    return np.random.default_rng([*seeds, int.from_bytes(digest[:8], "little")])


def active_steps(track: SinkTrack, active: Bool[np.ndarray, "batch step"]) -> SinkTrack:
    """`track` with each row's active steps first; the remaining steps are empty.

    ``unmask_step`` counts the batch's steps, so it is dropped.
    """
    data = track.data.drop_vars("unmask_step", errors="ignore")
    order = np.argsort(~active, axis=1, kind="stable")[:, : active.sum(axis=1).max()]
    rows, steps = xr.DataArray(np.arange(len(active)), dims="batch"), xr.DataArray(order, dims=("batch", "step"))
    kept = xr.DataArray(np.take_along_axis(active, order, axis=1), dims=("batch", "step"))
    moved = {}
    for name, value in data.data_vars.items():
        if "step" in value.dims:
            chosen = value.drop_vars("step", errors="ignore").isel(batch=rows, step=steps)
            moved[name] = chosen.where(kept, nothing(value.dtype))
    return SinkTrack(data.drop_dims("step").assign(moved))
