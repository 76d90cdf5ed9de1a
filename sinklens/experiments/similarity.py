"""Similarity of layers, and of steps: do two places of a run hold the same residual stream?

With X and Y the streams [place, d_model] at two layers or two steps, at the same places,

    cosine   mean over places of x · y / (|x| |y|)
    cka      ‖Yᵀ X‖²_F / (‖Xᵀ X‖_F ‖Yᵀ Y‖_F), columns centered (linear CKA; Kornblith et al., 1905.00414).

Cosine asks whether the stream keeps its direction; CKA, which does not change under rotations and a common scale,
whether the places keep their geometry. *Stream* l enters layer l, and the last one leaves the last layer, so
1 − cosine of streams l and l + 1 is the block influence of layer l (ShortGPT, 2403.03853): near 0 for a layer that
changes little.

Caveat: a few large dimensions dominate a stream, and most layers leave them alone, so cosines are high everywhere.
Compare layers with each other, leave such dimensions out (`without`), and check a redundant layer by skipping it
(`SkipLayers`). With fewer places than dimensions, CKA is biased towards 1.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.streams_read import PlaceStates, read_streams
from sinklens.runs.intervention import within

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

Measure = Literal["cosine", "cka"]
Pairwise = Callable[[Float[Tensor, "item place d_model"]], Float[Tensor, "item item"]]


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
    compare, dims = _measure(measure), _dims(run, without)
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
    positions: PlaceStates = "all",
    without: Sequence[int] = (),
) -> xr.DataArray:
    """Similarity of the streams of all steps in each layer, at the same positions.

    Args:
        run, measure, steps, without: as in `layer_similarity`.
        positions: positions that have this state in both steps.

    Returns:
        [stream, step, other]; NaN where two steps have no position in common.

    Raises:
        SettingError: as `layer_similarity`; an autoregressive run, whose steps have different positions.
    """
    if run.causal:
        raise SettingError("steps of an autoregressive run have different positions; compare its layers instead.")
    compare, dims = _measure(measure), _dims(run, without)
    read = read_streams(run, steps, positions)
    size, streams = len(read), run.model.cfg.n_layers + 1
    found = np.full((streams, size, size), np.nan)
    for first in range(size):
        for second in range(first, size):
            shared = read[first].places & read[second].places
            pair = torch.stack([read[number].values[:, shared][..., dims] for number in (first, second)])
            for stream in range(streams):
                value = float(compare(pair[:, stream])[0, 1])
                found[stream, first, second] = found[stream, second, first] = value
    numbers = [one.step for one in read]
    coords = {"stream": list(range(streams)), "step": numbers, "other": numbers}
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


MEASURES: dict[str, Pairwise] = {"cosine": cosine, "cka": linear_cka}


def _measure(name: str) -> Pairwise:
    if name not in MEASURES:
        raise SettingError(f"measure must be 'cosine' or 'cka'; got {name!r}.")
    return MEASURES[name]


def _dims(run: "Generation", without: Sequence[int]) -> list[int]:
    """The dimensions that are left."""
    size = run.model.cfg.d_model
    gone = set(within("dim", without, size))
    return [dim for dim in range(size) if dim not in gone]
