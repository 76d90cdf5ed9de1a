"""Recorded runs as plans of the keys that a likelihood masks: ``source=run, same_step=True`` or ``where=run.sinks``.

A run has many steps and a likelihood's pass has one, so each row of a pass gets the sinks of one step of the run with
its prompt: the first step that begins with as many masked tokens, among as many answer tokens, as the row has (or else
with the nearest number). The masked tokens themselves differ.

Pitfall: a run that decides several tokens per step skips some numbers of masked tokens; the nearest step then stands
in.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.places import AtPositions
from sinklens.interventions.rules import Where, as_rule
from sinklens.sinks.track import SinkTrack, build_track


def planned(
    entry: Any,
    prompts: Int[Tensor, "row prompt"],
    real: Bool[Tensor, "row prompt"],
    masked: Bool[Tensor, "row pos"],
) -> Any:
    """`entry` with a recorded run replaced by its steps for the rows of one pass; other entries unchanged.

    Raises:
        SettingError: the run lacks a prompt, or its answers are shorter than those of the pass.
    """

    def of_steps(where: Where) -> Where:
        if where.track is None:
            return where
        rows = (part.cpu().numpy() for part in (prompts, real, masked))
        return replace(where, source=steps_for_rows(where.track, *rows))

    if not isinstance(entry, AtPositions) or entry.where is None:
        return entry
    return replace(entry, where=as_rule(entry.where).mapped(of_steps))


def steps_for_rows(
    track: SinkTrack,
    prompts: Int[np.ndarray, "row prompt"],
    real: Bool[np.ndarray, "row prompt"],
    masked: Bool[np.ndarray, "row pos"],
) -> SinkTrack:
    """One step of `track` for each row, laid out as the rows are."""
    data, width, length = track.data, prompts.shape[1], masked.shape[1]
    if track.causal or data.sizes["pos"] - track.prompt_length < length:
        raise SettingError(
            f"source must be a diffusion run with at least {length} answer positions, as the answer has tokens; it has "
            f"{data.sizes['pos'] - track.prompt_length}. Record it with gen_length={length}."
        )
    rows = {tuple(ids): row for row, ids in enumerate(_prompts(track))}
    undecided = data["masked"].to_numpy()[:, :, track.prompt_length : track.prompt_length + length].sum(axis=2)
    places = []
    for row, (ids, kept, hidden) in enumerate(zip(prompts, real, masked, strict=True)):
        found = rows.get(tuple(ids[kept].tolist()))
        if found is None:
            raise SettingError(
                f"source has no run of the prompt of row {row}; record one with the prompts of these likelihoods."
            )
        places.append((found, int(np.abs(undecided[found] - hidden.sum()).argmin())))
    batch, step = np.array(places).T
    columns = np.arange(width + length) + track.prompt_length - width
    there = np.concatenate([real, np.ones_like(masked)], axis=1)

    def laid(name: str) -> np.ndarray:
        return data[name].to_numpy()[batch, step][..., np.maximum(columns, 0)]

    scores = np.where(there[:, None, None], laid("score"), np.nan)
    ids, undecided_at, committed = (laid(name)[:, None] for name in ("token_id", "masked", "committed"))
    unmask = data["unmask_step"].to_numpy()[batch][:, np.maximum(columns, 0)]
    attrs = {**data.attrs, "prompt_length": width}
    return build_track(scores[:, None], ids, undecided_at, committed, there, unmask, attrs)


def _prompts(track: SinkTrack) -> list[list[int]]:
    """Token ids of each row's prompt."""
    ids = track.data["token_id"].isel(step=0).to_numpy()[:, : track.prompt_length]
    real = track.data["is_real"].to_numpy()[:, : track.prompt_length]
    return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
