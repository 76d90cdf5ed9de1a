"""How sinks move over the denoising steps: measures of a sink track, the same for every kind of run.

The *strongest key* of a head at a step is the position with the largest column sum. The *sinks* are the positions that
a detector finds, any number of them: a strongest key is a sink only if a detector says so. A position *exists* at a
step where it has a score: padding never exists, a token of an autoregressive run exists once it is decoded, and no
position exists after its row has ended, even if the batch continues. Positions that do not exist are never counted; a
head with an all-zero pattern has no strongest key at that step. Positions are canvas positions, including left padding.

Pitfall: every head has a strongest key, even one with flat attention, and there the strongest key jumps with the noise.
`jumps`, `drift` and `static_share` then report motion where there is no sink. `lifetimes`, `overlap` and `centroid` use
a detector and are empty or NaN there; so is `jumps` when it is given the sinks that a detector found.
"""

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.errors import TrackError, require
from sinklens.sinks.data import AXES
from sinklens.sinks.detectors import Detector, MeanPlusStd
from sinklens.sinks.track import SinkTrack

HEADS = ("layer", "head")


def existing(track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
    """True where a position exists: it has a score, is not padding, and its row has not ended."""
    return _scores(track).notnull()


def strongest_key(track: SinkTrack) -> Float[xr.DataArray, "batch step layer head"]:
    """Position of the strongest key, argmax_j Ā[j]; the first of ties; NaN where the pattern is all zero.

    Until the row ends, equals ``track.top(1)``, but without sorting (Rulli et al., 2510.15731, Fig. 7).
    """
    score = _scores(track).fillna(0)
    strongest = score.argmax("pos")
    return strongest.copy(data=score["pos"].to_numpy()[strongest.to_numpy()]).where(score.max("pos") > 0)


def jumps(track: SinkTrack, found: Bool[xr.DataArray, "batch step layer head pos"] | None = None) -> xr.Dataset:
    """How often and how far the strongest key p_t changes from one step to the next.

    Only pairs of consecutive recorded steps that both have a strongest key count (Rulli et al., 2510.15731, Figs. 4,
    7).

    Args:
        found: sinks found by a detector (`track.detect`). Only pairs of steps at which the head has a sink then count,
            so that the measure describes moving sinks, not merely the largest of many similar scores.

    Returns:
        Per [batch, layer, head]: ``changes``, |{t: p_t ≠ p_{t−1}}|; ``pairs``, the number of pairs; ``share``,
        changes / pairs, NaN without a pair; ``distance``, the mean of |p_t − p_{t−1}| over the changes, in positions,
        NaN without a change.

    Raises:
        TrackError: `found` does not belong to `track`, or is not boolean.
    """
    strongest = strongest_key(track)
    if found is not None:
        strongest = strongest.where(_sinks(found, existing(track)).any("pos"))
    moved = strongest.diff("step")
    change = moved.where(moved != 0)
    changes, pairs = change.count("step"), moved.count("step")
    return xr.Dataset(
        {"changes": changes, "pairs": pairs, "share": changes / pairs, "distance": abs(change).mean("step")}
    )


def drift(track: SinkTrack) -> xr.Dataset:
    """Least-squares line through the strongest key's position p_t over the steps t, and how well it fits.

    slope = Σ_t (t − t̄)(p_t − p̄) / Σ_t (t − t̄)², in positions per step: positive to the right, as LLaDA's sinks move
    with its blocks, negative to the left, as Dream's do (Rulli et al., 2510.15731, Fig. 7).

    Returns:
        Per [batch, layer, head]: ``slope``, NaN with fewer than two steps; ``correlation`` of position and step in
        [−1, 1]; ``r_squared``, its square: the share of the position's variance that the line explains, NaN where
        the position never changes, 1 where there are only two steps; ``steps``, the number with a strongest key.
    """
    strongest = strongest_key(track)
    step = strongest["step"].where(strongest.notnull())
    step_offset, offset = step - step.mean("step"), strongest - strongest.mean("step")
    spread, rise = (step_offset**2).sum("step"), (step_offset * offset).sum("step")
    correlation = (rise / np.sqrt(spread * (offset**2).sum("step"))).clip(-1, 1)
    return xr.Dataset(
        {
            "slope": rise / spread,
            "correlation": correlation,
            "r_squared": correlation**2,
            "steps": strongest.count("step"),
        }
    )


def static_share(track: SinkTrack) -> Float[xr.DataArray, " batch"]:
    """Share of (layer, head) whose strongest key is the same position at every step that has one.

    Heads without a strongest key at any step are excluded; NaN if no head is left. A run of one step is static.
    """
    strongest = strongest_key(track)
    return (strongest.min("step") == strongest.max("step")).sum(HEADS) / strongest.notnull().any("step").sum(HEADS)


def static_sinks(found: xr.DataArray, exists: xr.DataArray) -> Float[xr.DataArray, " batch"]:
    """Of the (layer, head, position) that are ever a sink, the share that are one at every step where they exist.

    Args:
        found: the sinks, as returned by ``track.detect``, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape.

    NaN where no sink was found.

    Raises:
        TrackError: `found` and `exists` belong to different tracks.
    """
    found = _sinks(found, exists)
    ever = found.any("step")
    return (ever & (found | ~exists).all("step")).sum((*HEADS, "pos")) / ever.sum((*HEADS, "pos"))


def lifetimes(found: xr.DataArray, exists: xr.DataArray) -> "DataFrame":
    """Every life of a sink: the maximal runs of consecutive steps at which a position is a sink.

    Rulli et al. (2510.15731, Fig. 6b) show a life of a single step.

    Args:
        found: the sinks, as returned by ``track.detect``, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape; shows when a row ended.

    Returns:
        One row per life, ordered by its columns ``batch, layer, head, pos, start``, with ``length`` in recorded steps,
        and ``censored``, True where it lasts until the row's last step, so that its true length is unknown.

    Raises:
        TrackError: `found` and `exists` belong to different tracks.
    """
    found = _sinks(found, exists)
    sinks = found.to_numpy()
    starts, ends = sinks.copy(), sinks.copy()
    starts[:, 1:] &= ~sinks[:, :-1]
    ends[:, :-1] &= ~sinks[:, 1:]
    batch, start, layer, head, pos = _by_place(starts)  # the n-th start of a place pairs with its n-th end
    end = _by_place(ends)[1]
    alive = exists.any("pos").to_numpy()
    final = alive.shape[1] - 1 - alive[:, ::-1].argmax(axis=1)
    where = {"batch": batch, "layer": layer, "head": head, "pos": pos, "start": start}
    named = {name: found["step" if name == "start" else name].to_numpy()[at] for name, at in where.items()}
    return DataFrame({**named, "length": end - start + 1, "censored": end == final[batch, layer, head]})


def overlap(found: xr.DataArray, exists: xr.DataArray, along: str = "step") -> Float[xr.DataArray, "batch ..."]:
    """Jaccard overlap J(A, B) = |A ∩ B| / |A ∪ B| of sink sets, in [0, 1]; two empty sets give NaN.

    Across layers as in Focus-dLLM (2602.02159), which reuses the sinks of one layer in the next.

    Args:
        found: the sinks, as returned by ``track.detect``, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape; sets of a row that has ended give NaN.
        along: "step": a head's set against its set one step earlier, [batch, step, layer, head], without the first
            step; "layer": a layer's set (the union over its heads, since heads of two layers do not correspond) against
            that of the previous layer, [batch, step, layer], without the first layer; "head": mean over all pairs of
            heads of a layer except those with two empty sets, [batch, step, layer].

    Raises:
        TrackError: an unknown `along`; or `found` and `exists` belong to different tracks.
    """
    require(along in ("step", "layer", "head"), f"along must be step, layer or head; got {along!r}.", TrackError)
    found, alive = _sinks(found, exists), exists.any("pos")
    if along == "head":
        sets = found.to_numpy().astype(np.float32)  # counts are exact: far fewer than 2^24 positions
        both = sets @ sets.swapaxes(-1, -2)
        size = sets.sum(axis=-1)
        either = size[..., :, None] + size[..., None, :] - both
        one, other = np.triu_indices(size.shape[-1], k=1)
        both, either = both[..., one, other].astype(float), either[..., one, other]
        share = np.divide(both, either, out=np.full_like(both, np.nan), where=either > 0)
        dropped = found.any("pos").isel(head=0, drop=True)
        return dropped.expand_dims(pair=len(one), axis=-1).astype(float).copy(data=share).mean("pair")
    if along == "layer":
        found, alive = found.any("head"), alive.any("head")
    earlier = found.shift({along: 1}, fill_value=False)
    share = (found & earlier).sum("pos") / (found | earlier).sum("pos")
    return share.where(alive & alive.shift({along: 1}, fill_value=False)).isel({along: slice(1, None)})


def spatial_variance(track: SinkTrack, pooled: bool = True) -> Float[xr.DataArray, "batch ..."]:
    """How unevenly the positions attract attention over the run: Var_j(mean_t m_t(j)).

    m_t(j) is the attention mass of key j at step t. The mean is over the steps at which j exists; the
    population variance is over the positions that ever exist (Sink-Aware Pruning, 2602.17664; expected high for
    autoregressive models, lower for DLMs).

    Args:
        pooled: average the mass over layers and heads, [batch]; the source sums it, the average keeps uniform
            attention at 1. False: each head separately, [batch, layer, head].
    """
    mass = _scores(_pool(track) if pooled else track).mean("step").astype(np.float64)
    return _without_heads(mass.var("pos"), pooled)


def centroid(
    track: SinkTrack, detector: Detector | None = None, pooled: bool = True
) -> Float[xr.DataArray, "batch step ..."]:
    """Where the sinks are at each step: c_t = Σ_{j∈S_t} m_t(j)·j / Σ_{j∈S_t} m_t(j), a position.

    S_t is the set of sinks at step t, m_t(j) their attention mass (Sink-Aware Pruning, 2602.17664). NaN where S_t is
    empty.

    Args:
        detector: definition of a sink. By default, if pooled, the source's: m_t(j) > mean + 2 population standard
            deviations over the existing positions; otherwise as in ``track.detect``.
        pooled: average the mass over layers and heads and find sinks in that average, [batch, step], as in the source.
            False: each head separately, [batch, step, layer, head].
    """
    measured = _pool(track) if pooled else track
    found = measured.detect(MeanPlusStd() if pooled and detector is None else detector)
    mass = _scores(measured).where(found).fillna(0)
    moment = np.einsum("...j,j->...", mass.to_numpy(), mass["pos"].to_numpy(), dtype=np.float64)
    total = mass.sum("pos", dtype=np.float64)
    return _without_heads(total.copy(data=moment) / total, pooled)


def temporal_variance(
    track: SinkTrack, detector: Detector | None = None, pooled: bool = True
) -> Float[xr.DataArray, "batch ..."]:
    """How far the sinks wander: Var_t(c_t) of the `centroid`, in positions squared.

    The population variance over the steps that have a sink; NaN where fewer than two do, since a single step shows no
    motion (Sink-Aware Pruning, 2602.17664; expected near zero for autoregressive models, high for DLMs).

    Args:
        detector, pooled: as in `centroid`; [batch], or [batch, layer, head] when not pooled.
    """
    path = centroid(track, detector, pooled)
    return path.var("step").where(path.count("step") >= 2)


def motion_table(track: SinkTrack, detector: Detector | None = None) -> "DataFrame":
    """One row per row of the batch and one column per measure, for comparing models and bootstrapping over rows.

    Every number is a mean over the layers and heads (and steps or pairs) where it is defined, NaN where it is undefined
    everywhere.

    Args:
        detector: definition of a sink; by default as in ``track.detect``. The columns of the strongest key and the
            pooled columns do not use it.

    Returns:
        Indexed by ``batch``. ``steps``: until the row ended. Strongest key: ``jumps``, changes; ``jump_share``, of
        pairs of steps; ``jump_distance``, positions; ``drift``, positions per step; ``drift_r_squared``;
        ``static_share``, of heads. Sinks: ``sinks``, per head and step; ``lifetime``, steps, and ``censored``, share
        cut off by the end, both over all lives of the row; ``static_sinks``, share; ``overlap_step``,
        ``overlap_layer``, ``overlap_head``; ``spatial_variance``, ``temporal_variance`` per head, and ``pooled_…`` as
        defined in their source.
    """
    found, exists = track.detect(detector), existing(track)
    alive, moves, line = exists.any("pos"), jumps(track), drift(track)
    lives = lifetimes(found, exists).groupby("batch")[["length", "censored"]].mean()
    lives = lives.reindex(found["batch"].to_numpy())  # NaN for a row without lives
    measures = {
        "steps": alive.any(HEADS).sum("step"),
        "jumps": moves["changes"].where(moves["pairs"] > 0),
        "jump_share": moves["share"],
        "jump_distance": moves["distance"],
        "drift": line["slope"],
        "drift_r_squared": line["r_squared"],
        "static_share": static_share(track),
        "sinks": found.sum("pos").where(alive),
        "lifetime": xr.DataArray(lives["length"].to_numpy(), dims="batch"),
        "censored": xr.DataArray(lives["censored"].to_numpy(), dims="batch"),
        "static_sinks": static_sinks(found, exists),
        "overlap_step": overlap(found, exists, "step"),
        "overlap_layer": overlap(found, exists, "layer"),
        "overlap_head": overlap(found, exists, "head"),
        "spatial_variance": spatial_variance(track, pooled=False),
        "temporal_variance": temporal_variance(track, detector, pooled=False),
        "pooled_spatial_variance": spatial_variance(track),
        "pooled_temporal_variance": temporal_variance(track),
    }
    means = {name: value.mean([dim for dim in value.dims if dim != "batch"]) for name, value in measures.items()}
    return xr.Dataset(means).assign_coords(batch=exists["batch"]).to_dataframe()


def _scores(track: SinkTrack) -> xr.DataArray:
    """The scores while a row is running; NaN after its end, while it waits for the rest of its batch."""
    return track.scores().where(track.running)


def _sinks(found: xr.DataArray, exists: xr.DataArray) -> xr.DataArray:
    """`found` where positions exist, after checking that both belong to one track."""
    for name, value in (("found", found), ("exists", exists)):
        require(
            isinstance(value, xr.DataArray) and value.dims == AXES and (value.dtype == bool),
            f"{name} must hold bool over {', '.join(AXES)}: track.detect(...) for found, existing(track) for "
            f"exists. To select one head, keep its axis: found.isel(head=[3]).",
            TrackError,
        )
    try:
        xr.align(found, exists, join="exact")
    except ValueError as error:
        raise TrackError(
            f"found {dict(found.sizes)} and exists {dict(exists.sizes)} do not belong to the same track, or to the "
            f"same part of it; take the same rows, steps, layers and heads of both."
        ) from error
    return found & exists


def _by_place(marks: Bool[np.ndarray, "batch step layer head pos"]) -> Int[np.ndarray, "axis mark"]:
    """Batch, step, layer, head and position of every True, ordered by place, then by step."""
    batch, step, layer, head, pos = np.nonzero(marks)
    return np.stack([batch, step, layer, head, pos])[:, np.lexsort((step, pos, head, layer, batch))]


def _pool(track: SinkTrack) -> SinkTrack:
    """A track of one layer and one head whose scores are the mean over all."""
    return SinkTrack(
        track.with_computed.drop_dims(HEADS).assign(score=track.scores().mean(HEADS).expand_dims(HEADS, axis=(2, 3)))
    )


def _without_heads(value: xr.DataArray, pooled: bool) -> xr.DataArray:
    return value.isel(layer=0, head=0, drop=True) if pooled else value
