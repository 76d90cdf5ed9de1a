"""Selects what fits into a page of limited size.

Scores come first, with at most `SCORES_SHARE` of the room: every page holds the canvas, the paths and the mean over all
heads; maps of complete layers are added while they fit. If not even one layer fits, steps are left out. Attention
patterns get the rest: the required ones, pooled until they fit, and then further layers at the same steps.

Limitation: how far a pattern compresses is known only by trying. A very small budget is rejected only after the
patterns have been computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import UInt8

from sinklens.errors import SettingError, TrackError
from sinklens.sinks.record import StepLayer
from sinklens.views.attention import pooled
from sinklens.views.html import chunk
from sinklens.views.report_data import Material, Numbers

DEFAULT_STEPS = 4  # steps whose attention a page holds
SCORES_SHARE = 0.35  # of the room, if attention patterns are wanted too
FEWEST = 24  # blocks along an edge; a pattern pooled further shows nothing useful
AT_ONCE = 1 << 30  # bytes of patterns computed in one pass


@dataclass(frozen=True)
class Wanted:
    """Which attention patterns a page should hold.

    Attributes:
        places: (step, layer) pairs that the page must hold.
        more: layers to add at the same steps while there is room.
        named: whether the caller named steps or layers, so that missing patterns are an error.
    """

    places: list[StepLayer]
    more: list[int] = field(default_factory=list)
    named: bool = False

    def steps(self) -> list[int]:
        """Each step once, in order."""
        return sorted({step for step, _ in self.places})

    def layers(self) -> list[int]:
        """Each layer once, in the order wanted."""
        return list(dict.fromkeys(layer for _, layer in self.places))


def wanted_of(
    material: Material, numbers: Numbers, steps: Sequence[int] | None, layers: Sequence[int] | None
) -> Wanted:
    """The caller's steps and layers; otherwise those the run recorded; otherwise some steps and the most moving layer.

    Raises:
        TrackError: no such step or layer.
    """
    track, sizes = material.track, material.track.data.sizes
    for step in steps or ():
        track.require(step=step)
    for layer in layers or ():
        track.require(layer=layer)
    named = steps is not None or layers is not None
    if not named and material.kept:
        return Wanted(list(material.kept))
    total = sizes["step"]
    spread = np.linspace(0, total - 1, min(DEFAULT_STEPS, total)).round().astype(int).tolist()
    chosen = spread if steps is None else sorted({step % total for step in steps})
    order = numbers.layers_by_motion()
    first = order[:1] if layers is None else list(dict.fromkeys(layer % sizes["layer"] for layer in layers))
    more = order[1:] if layers is None else []
    return Wanted([(step, layer) for layer in first for step in chosen], more, named)


@dataclass
class PageScores:
    """Scores in the page.

    Attributes:
        steps: steps included.
        layers: layers included.
        peaks: per layer (and "all"), the largest score of each map, by which its values are scaled.
        blocks: HTML blocks of the page, by name.
    """

    steps: list[int]
    layers: list[int] = field(default_factory=list)
    peaks: dict[str, list[float]] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)

    def weight(self) -> int:
        """Bytes in the page."""
        return sum(map(len, self.blocks.values()))

    def add(self, numbers: Numbers, layer: int | None, room: int) -> bool:
        """Add the maps of `layer` (None: the mean over all) if they fit; returns whether they did."""
        name = "all" if layer is None else str(layer)
        values, sinks, peaks = numbers.maps(layer, self.steps)
        blocks = {kind: chunk(f"{kind}-{name}", part) for kind, part in (("scores", values), ("sinks", sinks))}
        if self.weight() + sum(map(len, blocks.values())) > room:
            return False
        self.blocks |= {f"{kind}-{name}": text for kind, text in blocks.items()}
        self.peaks[name] = peaks
        if layer is not None:
            self.layers.append(layer)
        return True


def fit_scores(numbers: Numbers, wanted: Wanted, room: int) -> PageScores:
    """Scores of as many layers as fit; if not even one fits, of fewer steps.

    Raises:
        SettingError: not even one layer at the smallest number of steps fits.
    """
    room = int(room * (SCORES_SHARE if wanted.places else 1))
    first, *others = dict.fromkeys([*wanted.layers(), *numbers.layers_by_motion()])
    for every in range(1, numbers.steps + 1):
        kept = sorted({*range(0, numbers.steps, every), numbers.steps - 1, *wanted.steps()})
        scores = PageScores(kept)
        scores.blocks = {name: chunk(name, content) for name, content in numbers.shared_chunks(kept).items()}
        if scores.add(numbers, None, room) and scores.add(numbers, first, room):
            for layer in others:
                if not scores.add(numbers, layer, room):
                    break
            scores.layers.sort()
            return scores
    raise SettingError(
        f"budget_mb is too small: {max(0, room) / 1e6:.2f} MB are left for the scores of one layer, which need more "
        f"even at {len(kept)} of {numbers.steps} steps. Give a larger budget."
    )


@dataclass
class Patterns:
    """Attention patterns in the page.

    Attributes:
        block: number of neighboring positions merged; 1 means no merging.
        sides: number of positions or blocks along an edge, by place.
        blocks: HTML blocks of the page, by place.
        left_out: number of wanted layers that did not fit.
        why: why there are no patterns, or no more.
    """

    block: int = 1
    sides: dict[StepLayer, int] = field(default_factory=dict)
    blocks: dict[StepLayer, str] = field(default_factory=dict)
    left_out: int = 0
    why: str = ""

    def weight(self) -> int:
        """Bytes in the page."""
        return sum(map(len, self.blocks.values()))

    def add(self, patterns: Mapping[StepLayer, UInt8[np.ndarray, "head query key"]], room: int) -> bool:
        """Add all `patterns` if they fit; returns whether they did."""
        blocks, sides, weight = {}, {}, self.weight()
        for (step, layer), pattern in patterns.items():
            small = pooled(pattern, self.block)
            blocks[step, layer] = chunk(f"pattern-{step}-{layer}", np.ascontiguousarray(small).tobytes())
            sides[step, layer] = small.shape[1]
            weight += len(blocks[step, layer])
            if weight > room:
                return False
        self.blocks |= blocks
        self.sides |= sides
        return True


def fit_patterns(material: Material, wanted: Wanted, room: int) -> Patterns:
    """Patterns of the wanted places, pooled until they fit, and then of more layers.

    Raises:
        SettingError: the required patterns do not fit, however pooled.
        TrackError: patterns that the caller named are unavailable.
    """
    if not wanted.places or material.patterns is None:
        return Patterns(why="No attention patterns were requested, or none are available.")
    try:
        first = _quantised(material, wanted.places)
    except TrackError as error:
        if wanted.named:
            raise
        return Patterns(why=f"This page has no attention patterns: {error}")
    longest = max(pattern.shape[1] for pattern in first.values())
    patterns = Patterns()
    while not patterns.add(first, room):
        patterns.block += 1
        if -(-longest // patterns.block) < min(FEWEST, longest):
            raise SettingError(
                f"budget_mb is too small: {max(0, room) / 1e6:.2f} MB are left for the attention patterns of "
                f"{len(first)} steps and layers, which need more even with {patterns.block - 1} × {patterns.block - 1} "
                f"positions in one cell. Name fewer steps or layers, or give a larger budget."
            )
    each = patterns.weight() / len(wanted.layers())
    likely = wanted.more[: int(1.25 * (room - patterns.weight()) / each)]  # some may take less room than the first
    try:
        more = _quantised(material, [(step, layer) for layer in likely for step in wanted.steps()]) if likely else {}
    except TrackError as error:
        return replace(patterns, why=f"This page does not hold the attention of other layers: {error}")
    for layer in likely:
        if not patterns.add({place: pattern for place, pattern in more.items() if place[1] == layer}, room):
            break
    patterns.left_out = len(wanted.more) + len(wanted.layers()) - len({layer for _, layer in patterns.sides})
    return patterns


def _quantised(material: Material, places: Sequence[StepLayer]) -> dict[StepLayer, UInt8[np.ndarray, "head query key"]]:
    """Attention a as round(255 √a): eight bits that distinguish 1/512 from 2/512, with an error of at most √a / 255."""
    assert material.patterns is not None
    sizes = material.track.data.sizes
    together = max(1, AT_ONCE // (4 * sizes["head"] * sizes["pos"] ** 2))
    found = {}
    for step in sorted({step for step, _ in places}):
        layers = [layer for at, layer in places if at == step]
        for start in range(0, len(layers), together):
            for layer, pattern in material.patterns(step, layers[start : start + together]).items():
                root = pattern.float().clamp(0, 1).sqrt().mul(255).round()
                found[step, layer] = root.nan_to_num().byte().numpy()
    return found
