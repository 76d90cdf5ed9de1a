"""Runs in which every row keeps its own steps alone.

In a batch, a row that is through with its block or its answer waits for the others: it is passed through the model
again, and nothing of it changes. Alone it would not have these steps. A study measures prompts, and what it measures of
one must not depend on what else is in its batch, so waiting steps are taken out: `own_run` tells which steps are a
row's own, and `own_steps` moves those to the front of a track.

One way this fails: copies of one prompt in a batch are drawn different random numbers, in two batches the same ones; at
a temperature above 0 give each prompt once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Bool

import sinklens
from sinklens.sinks import Record, SinkTrack

if TYPE_CHECKING:
    from torch import Tensor

    from sinklens.generation import Generation
    from sinklens.model import Model


@dataclass(frozen=True)
class OwnRun:
    """A run, and which of its steps are whose.

    Attributes:
        run: as it was.
        own: [batch, step], False where a row waited for others.
    """

    run: "Generation"
    own: Bool[np.ndarray, "batch step"]

    @property
    def track(self) -> SinkTrack:
        """The sink track of own steps."""
        assert self.run.sinks is not None, "the run recorded no sinks"
        return own_steps(self.run.sinks, self.own)


def own_run(
    model: "Model",
    prompts: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    chat_template: bool | str = False,
    record_sinks: bool | Record = True,
    hooks: Sequence[Any] = (),
    replay: "Generation | None" = None,
) -> OwnRun:
    """`sinklens.generate`, keeping account of which rows work at which step.

    A row of a diffusion model works where a position of it is up for decision (its confidence is above −∞), one of an
    autoregressive model until its end token is there.
    """
    working: list[np.ndarray] = []

    def note(confidence: "Tensor", hook: Any) -> None:
        working.append((confidence > -np.inf).any(dim=1).cpu().numpy())

    run = sinklens.generate(
        model, list(prompts), seed=seed, chat_template=chat_template, record_sinks=record_sinks, progress=False,
        hooks=[*hooks, ("denoise.hook_confidence", note)], replay=replay, **settings,
    )  # fmt: skip
    own = np.stack(working, axis=1)
    return OwnRun(run, own & ~_ended(run) if model.config.is_causal else own)


def _ended(run: "Generation") -> Bool[np.ndarray, "batch step"]:
    """Whether a row of an autoregressive run had its end token before the step."""
    ids = run.canvas[:, :-1, run.prompt_length :].numpy()
    return np.asarray(np.isin(ids, run.model.eos_token_ids).any(axis=-1))


def own_steps(track: SinkTrack, own: Bool[np.ndarray, "batch step"]) -> SinkTrack:
    """`track` with each row's own steps at the front; behind them nothing exists.

    ``unmask_step`` counts the batch's steps and is left out.
    """
    data = track.data.drop_vars("unmask_step", errors="ignore")
    order = np.argsort(~own, axis=1, kind="stable")[:, : own.sum(axis=1).max()]
    rows, steps = xr.DataArray(np.arange(len(own)), dims="batch"), xr.DataArray(order, dims=("batch", "step"))
    kept = xr.DataArray(np.take_along_axis(own, order, axis=1), dims=("batch", "step"))
    moved = {}
    for name, value in data.data_vars.items():
        if "step" in value.dims:
            chosen = value.drop_vars("step", errors="ignore").isel(batch=rows, step=steps)
            moved[name] = chosen.where(kept, _nothing(value.dtype))
    return SinkTrack(data.drop_dims("step").assign(moved))


def _nothing(dtype: np.dtype) -> Any:
    if np.issubdtype(dtype, np.bool_):
        return False
    return -1 if np.issubdtype(dtype, np.integer) else np.nan
