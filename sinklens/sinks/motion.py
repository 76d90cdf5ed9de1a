"""How sinks move over the denoising steps: measures of a sink track, the same for every kind of run.

The *strongest key* of a head at a step is the position with the largest column sum. The *sinks* are what a detector
finds, any number of them: a strongest key is a sink only if a detector says so. A
position *exists* at a step where it has a score: padding never does, a token of an autoregressive run does once the
step's text holds it, and after a row has ended nothing does, also where its batch goes on. What does not exist counts
nowhere; a head whose pattern is all zero has no strongest key at that step. Positions are canvas positions, left
padding included.

One way this fails: every head has a strongest key, also one whose attention is flat, and there the strongest key jumps
with the noise. `jumps`, `drift` and `static_share` then tell of motion where there is no sink; `lifetimes`, `overlap`
and `centroid` ask a detector first, and are empty or NaN there, and so does `jumps` if it is given what one found.
"""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from sinklens.errors import TrackError
from sinklens.sinks.active import running
from sinklens.sinks.track import SinkTrack, Unit

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.sinks.detectors import Detector

PLACES = ("batch", "step", "layer", "head", "pos")
HEADS = ("layer", "head")


def existing(track: SinkTrack) -> Bool[xr.DataArray, "batch step layer head pos"]:
    """True where a position exists: it has a score, is no padding, and its row has not ended."""
    return _scores(track).notnull()


def strongest_key(track: SinkTrack) -> Float[xr.DataArray, "batch step layer head"]:
    """Position of the strongest key, argmax_j Ā[j]; the first of equals; NaN where the pattern is all zero.

    The same as ``track.top(1)``, without sorting, until the row ends (Rulli et al., 2510.15731, Fig. 7).
    """
    score = _scores(track).fillna(0)
    strongest = score.argmax("pos")
    position = strongest.copy(data=score["pos"].to_numpy()[strongest.to_numpy()])
    return position.where(score.max("pos") > 0)


main_sink = strongest_key  # its name in sinklens 0.1


def jumps(track: SinkTrack, found: Bool[xr.DataArray, "batch step layer head pos"] | None = None) -> xr.Dataset:
    """How often and how far the strongest key p_t changes from one step to the next.

    Only pairs of neighbouring recorded steps that both have one count (Rulli et al., 2510.15731, Figs. 4, 7).

    Args:
        found: what a detector found (`track.detect`); then only pairs of steps at which the head has a sink count, so
            that what moves is a sink, not merely the largest of many like scores.

    Returns:
        Per [batch, layer, head]: ``changes``, |{t: p_t ≠ p_{t−1}}|; ``pairs``, how many pairs there are; ``share``,
        changes / pairs, NaN without a pair; ``distance``, the mean of |p_t − p_{t−1}| over the changes, in positions,
        NaN without a change.

    Raises:
        TrackError: `found` does not belong to `track`, or holds something else than truth values.
    """
    main = strongest_key(track)
    if found is not None:
        main = main.where(_sinks(found, existing(track)).any("pos"))
    moved = main.diff("step")
    change = moved.where(moved != 0)
    changes, pairs = change.count("step"), moved.count("step")
    return xr.Dataset(
        {"changes": changes, "pairs": pairs, "share": changes / pairs, "distance": abs(change).mean("step")}
    )


def drift(track: SinkTrack) -> xr.Dataset:
    """Least-squares line through the strongest key's position p_t over the steps t, and how well it fits.

    slope = Σ_t (t − t̄)(p_t − p̄) / Σ_t (t − t̄)², in positions per step: above 0 to the right, as LLaDA's sinks go with
    its blocks, below 0 to the left, as Dream's do (Rulli et al., 2510.15731, Fig. 7).

    Returns:
        Per [batch, layer, head]: ``slope``, NaN with fewer than two steps; ``correlation`` of position and step in
        [−1, 1] and ``r_squared``, its square: the share of the position's variance that the line explains, NaN where
        the position never changes, 1 where there are but two steps; ``steps``, how many had a strongest key.
    """
    main = strongest_key(track)
    step = main["step"].where(main.notnull())
    away, across = step - step.mean("step"), main - main.mean("step")
    spread, rise = (away**2).sum("step"), (away * across).sum("step")
    correlation = (rise / np.sqrt(spread * (across**2).sum("step"))).clip(-1, 1)
    return xr.Dataset(
        {
            "slope": rise / spread,
            "correlation": correlation,
            "r_squared": correlation**2,
            "steps": main.count("step"),
        }
    )


def static_share(track: SinkTrack) -> Float[xr.DataArray, " batch"]:
    """Share of (layer, head) whose strongest key is one position at every step that has one.

    Heads without a strongest key at any step are left out; NaN where that is all of them. A run of one step is static.
    """
    main = strongest_key(track)
    still = main.min("step") == main.max("step")
    return still.sum(HEADS) / main.notnull().any("step").sum(HEADS)


def static_sinks(found: xr.DataArray, exists: xr.DataArray) -> Float[xr.DataArray, " batch"]:
    """Share of the (layer, head, position) that are ever a sink that are one at every step at which they exist.

    Args:
        found: the sinks, as ``track.detect`` gives them, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape.

    NaN where no sink was found.

    Raises:
        TrackError: `found` and `exists` do not belong together.
    """
    found = _sinks(found, exists)
    ever = found.any("step")
    always = ever & (found | ~exists).all("step")
    return always.sum((*HEADS, "pos")) / ever.sum((*HEADS, "pos"))


def lifetimes(found: xr.DataArray, exists: xr.DataArray) -> "DataFrame":
    """Every life of a sink: the maximal runs of neighbouring steps at which one position is a sink.

    Rulli et al. (2510.15731, Fig. 6b) show one of a single step.

    Args:
        found: the sinks, as ``track.detect`` gives them, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape; tells when a row ended.

    Returns:
        One line per life, ordered by ``batch, layer, head, pos, start``: those, ``length`` in recorded steps, and
        ``censored``, True where it lasts until the row's last step, so that its true length is unknown.

    Raises:
        TrackError: `found` and `exists` do not belong together.
    """
    from pandas import DataFrame

    found = _sinks(found, exists)
    sinks = found.to_numpy()
    starts, ends = sinks.copy(), sinks.copy()
    starts[:, 1:] &= ~sinks[:, :-1]
    ends[:, :-1] &= ~sinks[:, 1:]
    batch, start, layer, head, pos = _by_place(starts)  # the n-th start of a place and its n-th end are one life
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
        found: the sinks, as ``track.detect`` gives them, bool [batch, step, layer, head, pos].
        exists: `existing(track)`, of the same shape; sets of a row that has ended give NaN.
        along: "step": a head's set against its own one step earlier, [batch, step, layer, head], without the first
            step; "layer": a layer's set (of all its heads together: heads of two layers do not correspond) against that
            of the layer before, [batch, step, layer], without the first layer; "head": mean over all pairs of heads of
            a layer that do not both have an empty set, [batch, step, layer].

    Raises:
        TrackError: another `along`; or `found` and `exists` do not belong together.
    """
    if along not in ("step", "layer", "head"):
        raise TrackError(f"along is step, layer or head; got {along!r}.")
    found, alive = _sinks(found, exists), exists.any("pos")
    if along == "head":
        return _overlap_of_heads(found)
    if along == "layer":
        found, alive = found.any("head"), alive.any("head")
    earlier = found.shift({along: 1}, fill_value=False)
    share = (found & earlier).sum("pos") / (found | earlier).sum("pos")
    return share.where(alive & alive.shift({along: 1}, fill_value=False)).isel({along: slice(1, None)})


def spatial_variance(track: SinkTrack, unit: Unit = "sum", pooled: bool = True) -> Float[xr.DataArray, "batch ..."]:
    """How unevenly the positions attract attention over the whole run: Var_j(mean_t m_t(j)), in `unit` squared.

    m_t(j) is the attention mass of key j at step t. The mean is over the steps at which j exists, the variance the
    population's, over the positions that ever exist (Sink-Aware Pruning, 2602.17664; expected high for autoregressive
    models, lower for DLMs).

    Args:
        unit: of the mass, as in ``track.scores``.
        pooled: mass averaged over layers and heads, [batch]: there it is summed, here uniform attention stays 1. False
            for each head by itself, [batch, layer, head].
    """
    mass = _scores(_pool(track) if pooled else track, unit).mean("step").astype(np.float64)
    return _without_heads(mass.var("pos"), pooled)


def centroid(
    track: SinkTrack, detector: "Detector | None" = None, unit: Unit = "sum", pooled: bool = True
) -> Float[xr.DataArray, "batch step ..."]:
    """Where the sinks are at each step: c_t = Σ_{j∈S_t} m_t(j)·j / Σ_{j∈S_t} m_t(j), a position.

    S_t are the sinks of step t, m_t(j) their attention mass (Sink-Aware Pruning, 2602.17664). NaN where S_t is empty.

    Args:
        detector: what a sink is. By default, where pooled, the source's: m_t(j) > mean + 2 standard deviations over the
            existing positions (the population's); else as in ``track.detect``.
        unit: of the mass. It cancels, but for "visible", which weighs late keys of a causal model more.
        pooled: mass averaged over layers and heads, and sinks found in that average, [batch, step], as there. False for
            each head by itself, [batch, step, layer, head].
    """
    asked = _pool(track) if pooled else track
    found = _massive(asked) if pooled and detector is None else asked.detect(detector)
    return _without_heads(_centre(_scores(asked, unit), found), pooled)


def temporal_variance(
    track: SinkTrack, detector: "Detector | None" = None, unit: Unit = "sum", pooled: bool = True
) -> Float[xr.DataArray, "batch ..."]:
    """How far the sinks wander: Var_t(c_t) of the `centroid`, in positions squared.

    The population's variance over the steps that have a sink; NaN where fewer than two do, since one step tells of no
    motion (Sink-Aware Pruning, 2602.17664; expected near zero for autoregressive models, high for DLMs).

    Args:
        detector, unit, pooled: as in `centroid`; [batch], or [batch, layer, head] when not pooled.
    """
    return _wandering(centroid(track, detector, unit, pooled))


def motion_table(track: SinkTrack, detector: "Detector | None" = None) -> "DataFrame":
    """One line per row of the batch, one column per measure, to be compared between models and bootstrapped over rows.

    Every number is a mean over the layers and heads (and steps or pairs) where it is defined, NaN where it nowhere is.

    Args:
        detector: what a sink is; by default as in ``track.detect``. The columns of the strongest key and the pooled
            ones do not ask it.

    Returns:
        Indexed by ``batch``. ``steps``: until the row ended. Strongest key: ``jumps``, changes; ``jump_share``, of
        pairs of steps; ``jump_distance``, positions; ``drift``, positions per step; ``drift_r_squared``;
        ``static_share``, of heads. Sinks: ``sinks``, per head and step; ``lifetime``, steps, and ``censored``, share
        cut off by the end, both over all lives of the row; ``static_sinks``, share; ``overlap_step``,
        ``overlap_layer``, ``overlap_head``; ``spatial_variance``, ``temporal_variance`` per head, and ``pooled_…`` as
        their source has them.
    """
    found, exists = track.detect(detector), existing(track)
    alive = exists.any("pos")
    measures = {
        "steps": alive.any(HEADS).sum("step"),
        **_of_strongest_key(track),
        "sinks": found.sum("pos").where(alive),
        **_of_lives(found, exists),
        "static_sinks": static_sinks(found, exists),
        "overlap_step": overlap(found, exists, "step"),
        "overlap_layer": overlap(found, exists, "layer"),
        "overlap_head": overlap(found, exists, "head"),
        "spatial_variance": spatial_variance(track, pooled=False),
        "temporal_variance": _wandering(_centre(_scores(track), found)),
        "pooled_spatial_variance": spatial_variance(track),
        "pooled_temporal_variance": temporal_variance(track),
    }
    means = {name: value.mean([dim for dim in value.dims if dim != "batch"]) for name, value in measures.items()}
    return xr.Dataset(means).assign_coords(batch=exists["batch"]).to_dataframe()


def _scores(track: SinkTrack, unit: Unit = "sum") -> xr.DataArray:
    """The scores while a row runs; NaN where it waits for others of its batch behind its end."""
    score = track.scores(unit)
    return score.where(running(track)) if track.causal else score


def _of_strongest_key(track: SinkTrack) -> dict[str, xr.DataArray]:
    """The columns of `motion_table` that ask no detector."""
    moves, line = jumps(track), drift(track)
    return {
        "jumps": moves["changes"].where(moves["pairs"] > 0),
        "jump_share": moves["share"],
        "jump_distance": moves["distance"],
        "drift": line["slope"],
        "drift_r_squared": line["r_squared"],
        "static_share": static_share(track),
    }


def _of_lives(found: xr.DataArray, exists: xr.DataArray) -> dict[str, xr.DataArray]:
    """The columns of `motion_table` that are means over lives, [batch]; NaN for a row without any."""
    lives = lifetimes(found, exists).groupby("batch")[["length", "censored"]].mean()
    lives = lives.reindex(found["batch"].to_numpy())
    return {
        "lifetime": xr.DataArray(lives["length"].to_numpy(), dims="batch"),
        "censored": xr.DataArray(lives["censored"].to_numpy(), dims="batch"),
    }


def _sinks(found: xr.DataArray, exists: xr.DataArray) -> xr.DataArray:
    """`found` where it exists, once both are seen to be of one track."""
    for name, value in (("found", found), ("exists", exists)):
        if not isinstance(value, xr.DataArray):
            raise TrackError(f"{name} is a DataArray, as track.detect(...) gives it; got {type(value).__name__}.")
        if value.dims != PLACES or value.dtype != bool:
            raise TrackError(
                f"{name} holds {value.dtype} over {', '.join(map(str, value.dims)) or 'nothing'}; it must hold bool "
                f"over {', '.join(PLACES)}: track.detect(...) for found, existing(track) for exists. "
                f"To ask about one head, keep its axis: found.isel(head=[3])."
            )
    try:
        xr.align(found, exists, join="exact")
    except ValueError as error:
        raise TrackError(
            f"found {dict(found.sizes)} and exists {dict(exists.sizes)} are not of the same track, or not of the same "
            f"part of it; take the same rows, steps, layers and heads of both."
        ) from error
    return found & exists


def _by_place(marks: Bool[np.ndarray, "batch step layer head pos"]) -> Int[np.ndarray, "axis mark"]:
    """Batch, step, layer, head and position of every True, ordered by place and there by step."""
    batch, step, layer, head, pos = np.nonzero(marks)
    return np.stack([batch, step, layer, head, pos])[:, np.lexsort((step, pos, head, layer, batch))]


def _overlap_of_heads(found: xr.DataArray) -> xr.DataArray:
    """Mean Jaccard overlap of all pairs of heads, by one product per layer: [batch, step, layer]."""
    sets = found.to_numpy().astype(np.float32)  # counts are exact: far fewer than 2^24 positions
    both = sets @ sets.swapaxes(-1, -2)
    size = sets.sum(axis=-1)
    either = size[..., :, None] + size[..., None, :] - both
    one, other = np.triu_indices(size.shape[-1], k=1)
    both, either = both[..., one, other].astype(float), either[..., one, other]
    share = np.divide(both, either, out=np.full_like(both, np.nan), where=either > 0)
    dropped = found.any("pos").isel(head=0, drop=True)
    return dropped.expand_dims(pair=len(one), axis=-1).astype(float).copy(data=share).mean("pair")


def _pool(track: SinkTrack) -> SinkTrack:
    """The track of one layer of one head whose scores are the mean over all."""
    score = track.scores().mean(HEADS).expand_dims(HEADS, axis=(2, 3))
    return SinkTrack(track.data.drop_dims(HEADS).assign(score=score))


def _centre(mass: xr.DataArray, found: xr.DataArray) -> xr.DataArray:
    """Mean position of the sinks `found`, weighed by their mass; NaN where there is none."""
    mass = mass.where(found).fillna(0)
    moment = np.einsum("...j,j->...", mass.to_numpy(), mass["pos"].to_numpy(), dtype=np.float64)
    total = mass.sum("pos", dtype=np.float64)
    return total.copy(data=moment) / total


def _wandering(centre: xr.DataArray) -> xr.DataArray:
    """Variance over the steps; NaN where fewer than two have a value."""
    return centre.var("step").where(centre.count("step") >= 2)


def _massive(track: SinkTrack) -> xr.DataArray:
    """True where the score exceeds mean + 2 standard deviations of the existing positions."""
    mass = track.scores()
    return mass > mass.mean("pos") + 2 * mass.std("pos")


def _without_heads(value: xr.DataArray, pooled: bool) -> xr.DataArray:
    return value.isel(layer=0, head=0, drop=True) if pooled else value
