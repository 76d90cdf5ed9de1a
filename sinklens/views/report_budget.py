"""Selects what fits into a page of limited size.

Scores come first, with at most `SCORES_SHARE` of the size: every page holds the canvas, the paths and the mean over all
heads; maps of complete layers are added while they fit. If not even one layer fits, steps are left out. Attention
patterns get the rest: by default those of as many layers as are sure to fit, at least one; they are pooled until they
fit.

Limitation: how far a pattern compresses is known only by trying. A very small budget is rejected only after the
patterns have been computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from sinklens.errors import SettingError, TrackError
from sinklens.sinks.record import StepLayer
from sinklens.views.attention import pooled
from sinklens.views.html import chunk
from sinklens.views.report_data import Material, Numbers

DEFAULT_STEPS = 4  # steps whose attention a page holds
SCORES_SHARE = 0.35  # of the room; attention patterns have the rest
FEWEST = 24  # blocks along an edge; a pattern pooled further shows nothing useful
AT_ONCE = 1 << 30  # bytes of patterns computed in one pass


class Wanted(NamedTuple):
    """Which attention patterns a page should hold.

    Attributes:
        steps, layers: of the (step, layer) places, in the order wanted.
        places: the pairs.
        left_out: number of layers that would not fit.
    """

    steps: list[int]
    layers: list[int]
    places: list[StepLayer]
    left_out: int = 0


def wanted_of(material: Material, numbers: Numbers, room: int) -> Wanted:
    """The patterns that the run recorded; otherwise those of some steps and of the layers that fit."""
    if material.kept:
        kept = list(material.kept)
        return Wanted(sorted({step for step, _ in kept}), list(dict.fromkeys(layer for _, layer in kept)), kept)
    steps = np.linspace(0, numbers.steps - 1, min(DEFAULT_STEPS, numbers.steps)).round().astype(int).tolist()
    each = len(steps) * numbers.heads * numbers.positions**2 * 4 / 3  # bytes of a layer that does not compress
    order, fitting = numbers.layers_by_motion(), max(1, int(room * (1 - SCORES_SHARE) / each))
    layers = order[:fitting]
    return Wanted(steps, layers, [(step, layer) for layer in layers for step in steps], len(order) - len(layers))


class PageScores(NamedTuple):
    """Scores in the page.

    Attributes:
        steps: steps included.
        layers: layers included.
        peaks: per layer (and "all"), the largest score of each map, by which its values are scaled.
        blocks: HTML blocks of the page.
    """

    steps: list[int]
    layers: list[int]
    peaks: dict[str, list[float]]
    blocks: list[str]


def fit_scores(numbers: Numbers, wanted: Wanted, room: int) -> PageScores:
    """Scores of as many layers as fit; if not even one fits, of fewer steps.

    Raises:
        SettingError: not even one layer at the smallest number of steps fits.
    """
    room = int(room * SCORES_SHARE)
    order = dict.fromkeys([*wanted.layers, *numbers.layers_by_motion()])
    for every in range(1, numbers.steps + 1):
        steps = sorted({*range(0, numbers.steps, every), numbers.steps - 1, *wanted.steps})
        blocks = [chunk(name, content) for name, content in numbers.shared_chunks(steps).items()]
        peaks: dict[str, list[float]] = {}
        for layer in (None, *order):
            name, maps = "all" if layer is None else str(layer), numbers.maps(layer, steps)
            more = [chunk(f"scores-{name}", maps.scores), chunk(f"sinks-{name}", maps.sinks)]
            if sum(map(len, blocks + more)) > room:
                break
            blocks += more
            peaks[name] = maps.peaks
        if len(peaks) > 1:
            return PageScores(steps, sorted(int(name) for name in peaks if name != "all"), peaks, blocks)
    raise SettingError(
        f"budget_mb is too small: {max(0, room) / 1e6:.2f} MB are left for the scores of one layer, which need more "
        f"even at {len(steps)} of {numbers.steps} steps. Give a larger budget."
    )


@dataclass
class Patterns:
    """Attention patterns in the page.

    Attributes:
        block: number of neighboring positions merged; 1 means no merging.
        sides: by place, the number of positions or blocks along an edge of the pattern.
        blocks: HTML blocks of the page.
        why: why there are no patterns.
    """

    block: int = 1
    sides: dict[StepLayer, int] = field(default_factory=dict)
    blocks: list[str] = field(default_factory=list)
    why: str = ""


def fit_patterns(material: Material, wanted: Wanted, room: int) -> Patterns:
    """Patterns of the wanted places, pooled until they fit.

    Raises:
        SettingError: they do not fit, however pooled.
    """
    if material.patterns is None:
        return Patterns(why="This page has no attention patterns: none are available.")
    try:
        exact = _quantised(material.patterns, material.track.data.sizes, wanted.places)
    except TrackError as error:
        return Patterns(why=f"This page has no attention patterns: {error}")
    longest = max(pattern.shape[1] for pattern in exact.values())
    for block in count(1):
        if block > 1 and -(-longest // block) < min(FEWEST, longest):
            break
        small = {place: np.ascontiguousarray(pooled(exact[place], block)) for place in sorted(exact)}
        blocks = [chunk(f"pattern-{step}-{layer}", small[step, layer].tobytes()) for step, layer in small]
        if sum(map(len, blocks)) <= room:
            return Patterns(block, {place: values.shape[1] for place, values in small.items()}, blocks)
    raise SettingError(
        f"budget_mb is too small: {max(0, room) / 1e6:.2f} MB are left for the attention patterns of {len(exact)} "
        f"steps and layers, which need more even with {block - 1} × {block - 1} positions in one cell. Record fewer "
        f"patterns, or give a larger budget."
    )


def _quantised(
    patterns: Callable[[int, Sequence[int]], Mapping[int, Tensor]],
    sizes: Mapping[Any, int],
    places: Sequence[StepLayer],
) -> dict[StepLayer, UInt8[np.ndarray, "head query key"]]:
    """Attention a as round(255 √a): eight bits that distinguish 1/512 from 2/512, with an error of at most √a / 255."""
    together = max(1, AT_ONCE // (4 * sizes["head"] * sizes["pos"] ** 2))
    found = {}
    for step in sorted({step for step, _ in places}):
        layers = [layer for at, layer in places if at == step]
        for start in range(0, len(layers), together):
            for layer, pattern in patterns(step, layers[start : start + together]).items():
                found[step, layer] = pattern.float().clamp(0, 1).sqrt().mul(255).round().nan_to_num().byte().numpy()
    return found
