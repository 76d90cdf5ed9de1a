"""The data of a report as arrays: strongest keys, sinks, maps of scores, and the canvas, on real positions.

Everything is computed from the recorded scores; only `Numbers.maps` rounds, for the page. A *map* is step × position,
of one head, of the mean over a layer's heads, or of the mean over all heads.

Caveat: a sink of a mean is found by applying the definition to mean scores. This differs from the number of heads in
which the position is a sink, which is reported separately.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sinks.track import SinkTrack
from sinklens.views.attention import CELLS
from sinklens.views.html import MASKED, NOT_YET, token_texts

FINE = 4_000_000  # number of scores up to which a page stores sixteen bits each


@dataclass(frozen=True)
class Material:
    """The input of a page, plain enough to be built without a model.

    Attributes:
        track: scores of one row.
        canvas: ids that entered each step, and those that the last step left, [step + 1, pos].
        prompt, answer: as text.
        patterns: returns attention patterns of a step by layer, on the positions that are real and exist at the step;
            None if none are available.
        kept: (step, layer) places whose patterns the run itself recorded.
        facts: further facts about the run, each a name and a text, e.g. what changed it.
    """

    track: SinkTrack
    canvas: Int[np.ndarray, "step pos"]
    prompt: str
    answer: str
    patterns: Callable[[int, Sequence[int]], Mapping[int, Float[Tensor, "head query key"]]] | None = None
    kept: Sequence[tuple[int, int]] = ()
    facts: Sequence[tuple[str, str]] = ()


class Maps(NamedTuple):
    """Maps of one layer, as bytes: the mean over heads first, then each head.

    Attributes:
        scores: round(levels · √(score / peak)), [1 + head, step, pos], of type `Numbers.kind`.
        sinks: one bit each, in the same order.
        peaks: the largest score of each map.
    """

    scores: bytes
    sinks: bytes
    peaks: list[float]


class Numbers:
    """The arrays of a page.

    Attributes:
        steps, positions, layers, heads: numbers of each; only real positions count.
        first: length of the padding before the first position.
        prompt_positions: number of prompt positions.
        path: strongest key, [step, 1 + layer + layer · head]: of the mean over all heads, of the mean of each layer, of
            each head; -1 where a pattern is all zero.
        strength: score of the strongest key, mean over steps, [layer, head] (Rulli et al., 2510.15731, Fig. 5).
        sink_heads: number of heads in which each position is a sink, [step, pos].
        sunk: whether a head has a sink, [step, layer · head].
        kind: dtype of the scores in the page.
    """

    def __init__(self, track: SinkTrack, canvas: Int[np.ndarray, "step pos"]) -> None:
        """Read `track`, of one row, and the `canvas` of its steps and after the last step."""
        sizes, real = track.data.sizes, track.data["is_real"].to_numpy()[0]
        self.track, self.real = track, real
        self.steps, self.layers, self.heads = sizes["step"], sizes["layer"], sizes["head"]
        self.positions, self.first = int(real.sum()), int(real.argmax())
        self.prompt_positions = int(real[: track.prompt_length].sum())
        self.canvas = canvas[:, real]
        self.committed = track.data["committed"].to_numpy()[0][:, real]
        self.kind = np.uint16 if self.steps * self.positions * self.layers * self.heads <= FINE else np.uint8
        paths, means, strength, sunk, counts = [], [], [], [], 0
        total = np.zeros((self.steps, self.positions))
        for layer in range(self.layers):
            score = self._scores(layer)
            mean = score.mean(axis=0)
            paths.append(_strongest(score).T)
            means.append(_strongest(mean))
            strength.append(np.nan_to_num(score).max(axis=-1).mean(axis=-1))
            sinks = self._sinks(layer)
            sunk.append(sinks.any(axis=-1).T)
            counts = counts + sinks.sum(axis=0)
            total += mean / self.layers
        self.mean = total
        self.path = np.concatenate([np.stack([_strongest(total), *means], axis=1), *paths], axis=1)
        self.strength = np.stack(strength)
        self.sink_heads = np.asarray(counts)
        self.sunk = np.concatenate(sunk, axis=1)

    def _scores(self, layer: int) -> Float[np.ndarray, "head step pos"]:
        score = self.track.isel(layer=layer).scores().to_numpy()[0, :, 0][..., self.real]
        return np.ascontiguousarray(score.swapaxes(0, 1))

    def _sinks(self, layer: int) -> Bool[np.ndarray, "head step pos"]:
        return self.track.isel(layer=layer).detect().to_numpy()[0, :, 0][..., self.real].swapaxes(0, 1)

    def _sinks_of_mean(self, mean: Float[np.ndarray, "step pos"]) -> Bool[np.ndarray, "step pos"]:
        """The definition applied to mean scores."""
        alike = self.track.isel(layer=0, head=0).data
        full = np.full(alike["score"].shape, np.nan, dtype=np.float32)
        full[0, :, 0, 0][:, self.real] = mean
        found = SinkTrack(alike.assign(score=(alike["score"].dims, full))).detect()
        return found.to_numpy()[0, :, 0, 0][:, self.real]

    def _motion(self, layer: int, head: int) -> tuple[int, int, float, int, int]:
        """What orders heads: how often the sink and the strongest key move, its strength, and its place."""
        place = 1 + self.layers + layer * self.heads + head
        moved, sunk = np.diff(self.path[:, place]) != 0, self.sunk[:, layer * self.heads + head]
        return (
            int((moved & sunk[1:] & sunk[:-1]).sum()),
            int(moved.sum()),
            float(self.strength[layer, head]),
            layer,
            head,
        )

    def most_moving(self, layers: Sequence[int]) -> tuple[int, int]:
        """Layer (of `layers`) and head whose sink moves most, by the rule of `figures.most_moving_head`."""
        return max(self._motion(layer, head) for layer in layers for head in range(self.heads))[3:]

    def layers_by_motion(self) -> list[int]:
        """Layers, beginning with that of the most moving head."""
        best = {layer: self._motion(*self.most_moving([layer])) for layer in range(self.layers)}
        return sorted(best, key=best.__getitem__, reverse=True)

    def maps(self, layer: int | None, steps: Sequence[int]) -> Maps:
        """Maps of a layer at `steps`; None: only the mean over all heads."""
        if layer is None:
            score, sinks = self.mean[None], self._sinks_of_mean(self.mean)[None]
        else:
            of_heads = self._scores(layer)
            mean = of_heads.mean(axis=0)
            score = np.concatenate([mean[None], of_heads])
            sinks = np.concatenate([self._sinks_of_mean(mean)[None], self._sinks(layer)])
        score = np.nan_to_num(score[:, steps])
        peaks = score.max(axis=(1, 2))
        peaks[peaks <= 0] = 1.0
        levels = np.iinfo(self.kind).max
        rounded = np.round(levels * np.sqrt(score.clip(min=0) / peaks[:, None, None])).astype(self.kind)
        return Maps(rounded.tobytes(), np.packbits(sinks[:, steps]).tobytes(), [float(peak) for peak in peaks])

    def shared_chunks(self, steps: Sequence[int]) -> dict[str, bytes]:
        """Chunks that every page holds, by name: the canvas, paths and counts at `steps`."""
        places = np.vectorize(self._vocabulary()[1].__getitem__, otypes=[np.uint32])(self.canvas)
        after = np.cumsum(self.committed, axis=0, dtype=np.int32)[steps]
        lately = np.diff(after, axis=0, prepend=0) > 0  # since the previous step shown, if steps are left out
        return {
            "entered": places[steps].tobytes(),
            "left": places[np.asarray(steps) + 1].tobytes(),
            "committed": lately.astype(np.uint8).tobytes(),
            "path": self.path[steps].astype(np.int32).tobytes(),
            "heads": self.sink_heads[steps].astype(np.uint16).tobytes(),
            "strength": self.strength.astype(np.float32).tobytes(),
        }

    def _vocabulary(self) -> tuple[list[str], dict[int, int]]:
        """Texts of the tokens on the canvas, and the index of each id among them; 0: no token yet, 1: the mask."""
        text, texts, places = token_texts(self.track), [NOT_YET, MASKED], {}
        masks = self.track.special["mask"]
        for token in np.unique(self.canvas).tolist():
            places[token] = 0 if token < 0 else 1 if token in masks else len(texts)
            if places[token] == len(texts):
                texts.append(text(token))
        return texts, places

    def info(self, steps: Sequence[int]) -> dict[str, Any]:
        """What the page needs before it reads a chunk; ``ends`` are indices of end tokens in ``vocabulary``.

        ``modes`` are what the passes of the steps were, in a model that changes its attention.
        """
        texts, places = self._vocabulary()
        modes = {"modes": [self.track.modes[step] for step in steps]} if "mode" in self.track else {}
        return modes | {
            "steps": list(steps),
            "positions": self.positions,
            "first": self.first,
            "prompt_positions": self.prompt_positions,
            "layers": self.layers,
            "heads": self.heads,
            "causal": self.track.causal,
            "levels": int(np.iinfo(self.kind).max),
            "vocabulary": texts,
            "ends": sorted(places[token] for token in self.track.special["end"] if token in places),
        }


def _strongest(score: Float[np.ndarray, "*maps pos"]) -> Int[np.ndarray, "*maps"]:
    """Position of the largest score; -1 where none exceeds 0."""
    score = np.nan_to_num(score, nan=-np.inf, neginf=-np.inf)
    return np.where(score.max(axis=-1) > 0, score.argmax(axis=-1), -1)


def run_data(numbers: Numbers) -> dict[str, Any]:
    """A run as JSON for a page that a server feeds: sizes, vocabulary and arrays of all steps, bytes in base64.

    They are the arrays that a report embeds, so the browser runs one copy of the code that draws them. Maps of scores
    are sent by layer (`layer_maps`), because those of all layers of a large model take hundreds of megabytes.
    """
    steps = range(numbers.steps)
    return {
        "info": {
            **numbers.info(steps),
            "held": list(range(numbers.layers)),
            "start": numbers.most_moving(range(numbers.layers)),
            "cells": CELLS,
        },
        "chunks": {name: base64.b64encode(content).decode() for name, content in numbers.shared_chunks(steps).items()},
    }


def layer_maps(numbers: Numbers, layer: int | None) -> dict[str, Any]:
    """Scores and sinks of a layer, the mean over its heads first; None: only the mean over all heads."""
    scores, sinks, peaks = numbers.maps(layer, range(numbers.steps))
    return {"scores": base64.b64encode(scores).decode(), "sinks": base64.b64encode(sinks).decode(), "peaks": peaks}
