"""Control keys that are not sinks and receive as much attention as the masked keys, and what masks remove.

A sink receives more attention than other keys by definition, so masking sinks removes more of it than masking as many
random keys. Whether a key matters *because* it is a sink can be asked only at equal attention. `matched` draws random
keys that are not sinks, over all heads of a layer, until they receive together what the masked keys of that layer and
step receive (one head has too few: its other keys share what its sink leaves over). The draw is made once for each
prompt, so control keys last, as sinks do. ``pick="same_mass"`` of a mask draws in the same way while a run goes on, by
the scores of the step before, since those of step t are not known yet; an evaluation takes those of the unmasked run.

A mask at step t hides the keys that the scores of step t − 1 choose. *Removed* is the share of all attention that these
keys receive at step t in the run with nothing masked. In an autoregressive model that is the attention of the newest
query (`newest_rows`), from which alone keys are hidden.

Limitation: the mass is matched in the unchanged run. A masked key's attention goes to the remaining keys of its head,
and the runs differ from then on. Where sinks hold more than half of a layer's attention, no control holds as much:
compare ``removed`` of both.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.estimates.tables import interval_table
from sinklens.analyses.runs import noise_of
from sinklens.interventions import MaskKeys, MaskSinks
from sinklens.interventions.controls import Pick, of_mass
from sinklens.runs.intervention import layer_of
from sinklens.sinks import SinkTrack
from sinklens.sinks.strongest import Marked

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.analyses.study import Study
    from sinklens.hooks.points import Point
    from sinklens.model import Model
    from sinklens.model.prompts import SinglePrompt
    from sinklens.sampling.settings import Settings

SAME_MASS: Pick = "same_mass"
MEANING = "random keys that are no sinks, with as much attention"
REMOVED = "share of all attention that the masked keys receive in the unchanged run"


def acting(track: SinkTrack) -> Float[xr.DataArray, "batch step layer head pos"]:
    """What keys receive at the step that masks them: entry t − 1 holds the scores of step t; NaN at the end."""
    score = track.scores()
    return score.copy(data=score.transpose("batch", "step", ...).shift(step=-1).to_numpy())


def removed(
    keys: Bool[xr.DataArray, "batch step layer head pos"], mass: Float[xr.DataArray, "batch step layer head pos"]
) -> Float[np.ndarray, " batch"]:
    """Share of the attention of all steps, layers and heads that `keys` receive; NaN for a run of one step.

    Args:
        keys: the keys by the step whose scores choose them.
        mass: `acting` of the track with the attention that counts.
    """
    over = ("step", "layer", "head", "pos")
    total = mass.sum(over)
    return (mass.where(keys).sum(over) / total.where(total > 0)).to_numpy()


def share_of(track: SinkTrack, name: str) -> float:
    """Share of heads and steps that have a key that the track marks; the last step's keys are never masked."""
    return float(track[name].isel(step=slice(0, -1)).any("pos").mean())


def removed_by(
    names: Sequence[str | None], track: SinkTrack, mass: Float[xr.DataArray, "batch step layer head pos"]
) -> Float[np.ndarray, " name"]:
    """`removed` of the keys that the track of one prompt marks by each name; NaN for None."""
    return np.array([np.nan if name is None else removed(track[name], mass)[0] for name in names], dtype=np.float64)


def matched(
    track: SinkTrack,
    treated: Bool[xr.DataArray, "batch step layer head pos"],
    allowed: Bool[xr.DataArray, "batch step layer head pos"],
    mass: Float[xr.DataArray, "batch step layer head pos"],
    seed: int = 0,
) -> Bool[xr.DataArray, "batch step layer head pos"]:
    """Random keys of `allowed`, none of `treated`, with the mass of `treated` in every step and layer.

    The keys of a layer are taken in one random order, the same at every step, as long as taking the next brings the sum
    of their mass nearer to that of `treated`; all of them where they have less.

    Args:
        treated, allowed: keys by the step whose scores choose them.
        mass: `acting` of the track with the attention that counts.
        seed: seed of the order, which depends on it and on the prompt alone.
    """
    sizes = np.nan_to_num(mass.transpose(*treated.dims).to_numpy())
    order = np.stack([_order(track, row, sizes.shape[2:], seed) for row in range(sizes.shape[0])])[:, None]
    parts = (-np.broadcast_to(order, sizes.shape), sizes, treated.to_numpy(), (allowed & ~treated).to_numpy())
    taken = of_mass(*(torch.from_numpy(part).flatten(3) for part in parts))  # over the heads of a layer together
    return treated.copy(data=taken.view(sizes.shape).numpy())


def _order(track: SinkTrack, row: int, sizes: Sequence[int], seed: int) -> np.ndarray:
    """Random numbers for the keys of every layer and head, [layer, head, pos]; the smallest are first."""
    return noise_of(track.data["token_id"].isel(batch=row, step=0).to_numpy(), seed).random(tuple(sizes))


def attended(
    study: "Study", model: "Model", prompt: "SinglePrompt", settings: "Settings", track: SinkTrack
) -> Float[xr.DataArray, "batch step layer head pos"]:
    """`acting` of the attention that a mask removes: column sums, or the newest query's in an autoregressive model."""
    return acting(newest_rows(study, model, prompt, settings) if track.causal else track)


def with_same_mass(
    track: SinkTrack,
    treated: Mapping[str, Bool[xr.DataArray, "batch step layer head pos"]],
    sinks: Bool[xr.DataArray, "batch step layer head pos"],
    mass: Float[xr.DataArray, "batch step layer head pos"],
    seed: int = 0,
    among: Mapping[str, Bool[xr.DataArray, "batch step layer head pos"]] | None = None,
) -> SinkTrack:
    """`track` with the keys of each entry, and under ``"NAME same_mass"`` their `matched` keys that are not sinks.

    Args:
        among: sets of keys by name; ``"NAME same_mass SET"`` are `matched` keys of that set that are not sinks.
    """
    exists = track.scores().notnull() & ~sinks
    sets = {"": exists} | {name: exists & found.transpose(*exists.dims) for name, found in (among or {}).items()}
    keys = {name: found.transpose(*exists.dims) for name, found in treated.items()}
    controls = {
        same_mass_name(name, of): matched(track, found, allowed, mass, seed)
        for name, found in keys.items()
        for of, allowed in sets.items()
    }
    return SinkTrack(track.data.assign({**keys, **controls}))


def same_mass_name(name: str, among: str = "") -> str:
    """How `with_same_mass` names the control of an entry, chosen among all keys or those of a set."""
    return f"{name} {SAME_MASS} {among}".rstrip()


def masks(track: SinkTrack, name: str, seed: int = 0, **more: Any) -> dict[str, MaskKeys]:
    """Masks of the keys ``name`` of a track by `with_same_mass`, of as many weaker random keys, and of as much mass."""
    shared: dict[str, Any] = {"top_k": None, "source": track, "seed": seed, **more}
    return {
        "strongest": MaskSinks(**shared, detector=Marked(name)),
        "random": MaskSinks(**shared, detector=Marked(name), pick="random", persistent=True),
        SAME_MASS: MaskSinks(**shared, detector=Marked(f"{name} {SAME_MASS}")),
    }


def curve(
    measured: Mapping[str, xr.Dataset],
    cost: str,
    removal: str,
    seed: int = 0,
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> "DataFrame":
    """Cost against attention removed: rows of `interval_table` for `cost`, with the mean of `removal` as ``removed``.

    NaN where the attention is not known.

    Args:
        cost, removal: variables with the same axes.
    """
    table = interval_table(measured, [cost], seed, ranges)
    means = interval_table(measured, [removal], seed)
    labels = [name for name in means if name not in ("measure", "estimate", "low", "high", "prompts", "groups")]
    means = means[[*labels, "estimate"]].rename(columns={"estimate": "removed"})
    return table.merge(means, on=labels, how="left", validate="one_to_one")


def newest_rows(study: "Study", model: "Model", prompt: "SinglePrompt", settings: "Settings") -> SinkTrack:
    """The track of an autoregressive run whose scores are the newest query's attention times the number of keys."""
    seen: dict[tuple[int, int], Tensor] = {}

    def keep(pattern: Float[Tensor, "batch head query key"], hook: "Point") -> None:
        seen[int(hook.step or 0), layer_of(hook)] = pattern[:, :, -1] * pattern.shape[-1]

    hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]
    track = study.generate(model, [prompt], settings, hooks=hooks).run.sinks
    assert track is not None
    score = torch.full(tuple(track.data["score"].shape), torch.nan)
    for (step, layer), row in seen.items():
        score[:, step, layer, :, : row.shape[-1]] = row.float().cpu()
    return SinkTrack(track.data.assign(score=(track.data["score"].dims, score.numpy())))
