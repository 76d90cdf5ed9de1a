"""Tracks made by hand."""

import json

import numpy as np

from sinklens.sinks import SinkTrack, build_track

SPECIAL = {"mask": [1], "start": [2], "end": [0], "markup": []}


def planted(
    score, *, real=None, masked=None, committed=None, token_id=None, prompt_length=1, causal=False, words=None,
    special=SPECIAL, **recorded,
) -> SinkTrack:  # fmt: skip
    """A track from scores [batch, step, layer, head, pos]; all positions real and committed by default.

    Args:
        words: token id -> text.
        special: the ids of the special tokens.
        recorded: variables of other quantities.
    """
    score = np.asarray(score, dtype=np.float32)
    batch, steps, _, _, length = score.shape
    places = np.zeros((batch, steps, length), dtype=bool)
    return build_track(
        score,
        np.zeros((batch, steps, length), dtype=np.int64) + 5 if token_id is None else np.asarray(token_id),
        places if masked is None else np.asarray(masked),
        places if committed is None else np.asarray(committed),
        np.ones((batch, length), dtype=bool) if real is None else np.asarray(real),
        np.full((batch, length), -1),
        {
            "model": "planted",
            "prompt_length": prompt_length,
            "causal": int(causal),
            "vocabulary": json.dumps(words or {}),
            "special": json.dumps(special),
        },
        **recorded,
    )


def with_sinks(places, length=10, strength=6.0, low=0.25):
    """Scores [1, step, layer, head, pos], `low` but for `strength` at `places` [step][layer][head]; None is no sink."""
    shape = np.shape(np.asarray(places, dtype=object))
    score = np.full((1, *shape, length), low)
    for place in np.ndindex(shape):
        position = np.asarray(places, dtype=object)[place]
        if position is not None:
            score[(0, *place, position)] = strength
    return score
