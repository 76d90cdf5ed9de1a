"""The residual streams of a finished run: are two of them alike, and which of their values are large?

*Stream* l enters layer l; the last one leaves the last layer. Each step is read with a pass over its canvas, and hooks
of the run are not applied.

*Similarity.* With X and Y the streams [place, d_model] at two layers or two steps, at the same places,

    cosine   mean over places of x · y / (|x| |y|)
    cka      ‖Yᵀ X‖²_F / (‖Xᵀ X‖_F ‖Yᵀ Y‖_F), columns centered (linear CKA; Kornblith et al., 1905.00414).

Cosine asks whether the stream keeps its direction; CKA, which does not change under rotations and a common scale,
whether the places keep their geometry. 1 − cosine of streams l and l + 1 is the block influence of layer l (ShortGPT,
2403.03853): near 0 for a layer that changes little.

*Large values.* A *massive activation* is one value of a stream that is large in itself and against the rest:
|h| ≥ `at_least` and |h| ≥ `times_median` · median |h| over the stream of its step and layer (Sun et al., 2402.17762,
with 100 and 1,000). An *outlier dimension* is large at many places: |h| ≥ `times_rms` · rms of the stream at the place,
at no less than `positions` of the places and in no less than `layers` of the streams (after LLM.int8, 2208.07339, which
has 6 % and 25 %, and an absolute threshold). `Ablate(dims=)` replaces them.

Caveat: a few large dimensions dominate a stream, and most layers leave them alone, so cosines are high everywhere.
Compare layers with each other, leave such dimensions out (`without`), and check a redundant layer by skipping it
(`SkipLayers`). With fewer places than dimensions, CKA is biased towards 1. Small models may have no massive activation;
lowering the thresholds finds the largest values of any stream, so compare their ablation with that of as many random
dimensions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.step_ids import exact_step
from sinklens.runs.intervention import within
from sinklens.runs.result import require_run
from sinklens.utils.arguments import Positive, read_as

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

PlaceStates = Literal["all", "prompt", "masked", "committed"]
Measure = Literal["cosine", "cka"]
MOST = 10_000


class StepStreams(NamedTuple):
    """The streams of one step.

    Attributes:
        step: the step.
        values: at every column of the canvas, padding included.
        ids: the canvas.
        places: True at the places in question, never at padding.
    """

    step: int
    values: Float[Tensor, "stream batch pos d_model"]
    ids: Int[Tensor, "batch pos"]
    places: Bool[Tensor, "batch pos"]


def read_streams(run: "Generation", steps: Sequence[int] | None, state: PlaceStates) -> list[StepStreams]:
    """The streams of some steps; None means all.

    Raises:
        SettingError: not a run, a step that did not run, an unknown state, or see `exact_step`.
    """
    require_run(run, "run")
    read_as(PlaceStates, "state", state)
    layers, found = run.model.cfg.n_layers, []
    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(layers)), f"blocks.{layers - 1}.hook_resid_post"]
    prompt = torch.arange(run.canvas.shape[2]) < run.prompt_length
    for step in within("step", steps, run.steps_run):
        ids, real, time = exact_step(run, step)
        seen = run.model.tree.peek(ids, real, names, time)
        masked = run.undecided[:, step] & ~prompt
        masks = {"all": run.real, "prompt": prompt, "masked": masked, "committed": ~masked & ~prompt}
        places = (masks[state] & run.real).cpu()[:, : ids.shape[1]]
        found.append(StepStreams(step, torch.stack([seen[name].float().cpu() for name in names]), ids.cpu(), places))
    return found


def layer_similarity(
    run: "Generation",
    measure: Measure = "cosine",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    without: Sequence[int] = (),
) -> xr.DataArray:
    """Similarity of the streams of all layers in each step.

    Args:
        run: a run; its rows are pooled.
        measure: "cosine" or "cka".
        steps: steps of the run; negative ones count from the end. None means all.
        state: positions that are compared: "all", "prompt", "masked" or "committed".
        without: dimensions of the stream that are left out.

    Returns:
        [step, stream, other]; NaN in steps without such positions.

    Raises:
        SettingError: an unknown measure or state, or a step or dimension that does not exist.
    """
    compare, dims = MEASURES[read_as(Measure, "measure", measure)], _dims(run, without)
    read = read_streams(run, steps, state)
    found = [compare(one.values[:, one.places][..., dims]) for one in read]
    streams = list(range(run.model.cfg.n_layers + 1))
    coords = {"step": [one.step for one in read], "stream": streams, "other": streams}
    return xr.DataArray(np.stack([part.numpy() for part in found]), coords, ("step", "stream", "other"), measure)


def step_similarity(
    run: "Generation",
    measure: Measure = "cosine",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    without: Sequence[int] = (),
) -> xr.DataArray:
    """Similarity of the streams of all steps in each layer, at the same positions.

    Args:
        run, measure, steps, without: as in `layer_similarity`.
        state: positions are compared that have this state in both steps.

    Returns:
        [stream, step, other]; NaN where two steps have no position in common.

    Raises:
        SettingError: as `layer_similarity`; an autoregressive run, whose steps have different positions.
    """
    if run.causal:
        raise SettingError("steps of an autoregressive run have different positions; compare its layers instead.")
    compare, dims = MEASURES[read_as(Measure, "measure", measure)], _dims(run, without)
    read = read_streams(run, steps, state)
    found = np.full((run.model.cfg.n_layers + 1, len(read), len(read)), np.nan)
    for first, one in enumerate(read):
        for second, other in enumerate(read[first:], first):
            shared = one.places & other.places
            pairs = torch.stack([step.values[:, shared][..., dims] for step in (one, other)], dim=1)
            found[:, first, second] = found[:, second, first] = [float(compare(pair)[0, 1]) for pair in pairs]
    numbers = [one.step for one in read]
    coords = {"stream": list(range(len(found))), "step": numbers, "other": numbers}
    return xr.DataArray(found, coords, ("stream", "step", "other"), measure)


def cosine(x: Float[Tensor, "item place d_model"]) -> Float[Tensor, "item item"]:
    """Mean cosine of the places of each pair of items; NaN without places."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    return torch.einsum("apd,bpd->ab", unit, unit) / (x.shape[1] or torch.nan)


def linear_cka(x: Float[Tensor, "item place d_model"]) -> Float[Tensor, "item item"]:
    """Linear CKA of each pair of items; NaN with fewer than two places, or of an item that is the same everywhere."""
    if x.shape[1] < 2:
        return torch.full((len(x), len(x)), torch.nan, dtype=torch.float64)
    centered = x.double() - x.double().mean(dim=1, keepdim=True)
    gram = torch.einsum("apd,aqd->apq", centered, centered).flatten(1)  # ‖Yᵀ X‖² = ⟨X Xᵀ, Y Yᵀ⟩
    norms = gram.norm(dim=1)
    return gram @ gram.T / (norms[:, None] * norms)


MEASURES = {"cosine": cosine, "cka": linear_cka}


def _dims(run: "Generation", without: Sequence[int]) -> list[int]:
    """The dimensions that are left."""
    size = run.model.cfg.d_model
    return sorted(set(range(size)) - set(within("dim", without, size)))


def massive_activations(
    run: "Generation",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    at_least: float | int = 100.0,
    times_median: float | int = 1000.0,
) -> xr.Dataset:
    """The massive activations of a run, largest first.

    Args:
        run: a run.
        steps: steps of the run; negative ones count from the end. None means all.
        state: positions that are searched: "all", "prompt", "masked" or "committed".
        at_least: smallest magnitude.
        times_median: smallest magnitude, in medians.

    Returns:
        Along ``activation``: ``step``, ``stream``, ``row``, ``column`` (of the canvas, padding included; ``positions=``
        of an intervention count without the row's padding), ``dim`` of the stream, ``value``, ``times_median`` (its
        magnitude, in medians of the stream of its step and layer) and ``token``, the id on the canvas.

    Raises:
        SettingError: a threshold that is no positive number, one so low that more than 10,000 values pass it, or a
            step or state that does not exist.
    """
    for name, value in {"at_least": at_least, "times_median": times_median}.items():
        read_as(Positive, name, value)
    names = ("step", "stream", "row", "column", "dim", "value", "times_median", "token")
    parts, count = [np.zeros((len(names), 0))], 0
    for read in read_streams(run, steps, state):
        values = read.values.where(read.places[..., None], 0.0).abs()
        inside = values[:, read.places].flatten(1)
        median = inside.median(dim=1).values if inside.numel() else torch.ones(len(values))
        large = values >= (times_median * median).clamp(min=at_least)[:, None, None, None]
        count += int(large.sum())
        if count > MOST:
            raise SettingError(
                f"more than {MOST:,} values pass at_least={at_least} and times_median={times_median}, so they are "
                f"not exceptional; raise one of the thresholds."
            )
        stream, row, column, dim = large.nonzero(as_tuple=True)
        times = values[large] / median[stream]
        where = (torch.full_like(row, read.step), stream, row, column, dim)
        parts.append(np.stack([part.double() for part in (*where, read.values[large], times, read.ids[row, column])]))
    found = np.concatenate(parts, axis=1)
    found = found[:, np.argsort(-np.abs(found[names.index("value")]), kind="stable")]
    kinds = {name: float if name in ("value", "times_median") else int for name in names}
    return xr.Dataset({name: ("activation", one.astype(kinds[name])) for name, one in zip(names, found, strict=True)})


def outlier_dimensions(
    run: "Generation",
    *,
    steps: Sequence[int] | None = None,
    state: PlaceStates = "all",
    times_rms: float | int = 6.0,
    positions: float | int = 0.06,
    streams: float | int = 0.25,
) -> xr.Dataset:
    """The outlier dimensions of a run; those that are large at most places come first.

    Args:
        run, steps, state: as in `massive_activations`.
        times_rms: smallest magnitude, in root mean squares of the stream at its place.
        positions: smallest share of the places of a stream.
        streams: smallest share of the streams.

    Returns:
        Over ``dim``: ``streams``, the share of the streams in which it is large at enough places; ``positions``, the
        share of the places at which it is large, over all streams.

    Raises:
        SettingError: a threshold that is no positive number, or a step or state that does not exist.
    """
    for name, value in {"times_rms": times_rms, "positions": positions, "streams": streams}.items():
        read_as(Positive, name, value)
    read = [one.values[:, one.places] for one in read_streams(run, steps, state)]  # of each step [stream, place, dim]
    large = torch.cat([one.abs() >= times_rms * one.pow(2).mean(dim=-1, keepdim=True).sqrt() for one in read], dim=1)
    shares = large.double().mean(dim=1)  # NaN without places
    often, mean = (shares >= positions).double().mean(dim=0), shares.mean(dim=0)
    dims = [dim for dim in mean.argsort(descending=True, stable=True).tolist() if often[dim] >= streams]
    return xr.Dataset(
        {"streams": ("dim", often[dims].numpy()), "positions": ("dim", mean[dims].numpy())}, {"dim": dims}
    )
