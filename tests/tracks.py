"""Hand-made sink tracks for tests, with every variable of the built-in quantities, and disks that fail."""

import resource
import sys
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import planting

from sinklens.sinks import SinkTrack, build_track

BATCH, STEPS, LAYERS, HEADS, LENGTH, PROMPT, PADDED = 2, 3, 2, 3, 9, 5, 2


def planted(score, real=None, causal=0, **recorded):
    """A track of one row, layer and head from scores [step, pos], and recorded variables [step, ...]."""
    recorded = {name: np.asarray(value, dtype=np.float32)[None, :, None] for name, value in recorded.items()}
    recorded |= {name: recorded[name][:, :, :, None] for name in {"value_norm", "output_rank"} & recorded.keys()}
    real = None if real is None else [real]
    score = np.asarray(score)[None, :, None, None]
    return planting.planted(score, real=real, prompt_length=2, causal=causal, **recorded)


class Made(NamedTuple):
    """A random track, and the patterns that its scores are the column sums of.

    Attributes:
        pattern: [batch, step, layer, head, query, key], zero where there is nothing.
        there: [batch, step, pos], True where a position exists and is no padding.
    """

    track: SinkTrack
    pattern: np.ndarray
    there: np.ndarray


def made(causal, seed=0, unlike=()):
    """Two rows, the first with padding; an autoregressive one starts with its prompt and grows by a token per step.

    The last head of the last layer attends to nothing. Variables named in `unlike` are left out.
    """
    noise = np.random.default_rng(seed)
    real = np.ones((BATCH, LENGTH), dtype=bool)
    real[0, :PADDED] = False
    there = np.repeat(real[:, None], STEPS, axis=1)
    exists = (np.arange(LENGTH) < PROMPT + np.arange(STEPS)[:, None]) | (not causal)
    there &= exists
    seen = there[:, :, None, None, :, None] & there[:, :, None, None, None, :]
    if causal:
        seen = seen & np.tril(np.ones((LENGTH, LENGTH), dtype=bool))
    weights = np.exp(2 * noise.normal(size=(BATCH, STEPS, LAYERS, HEADS, 1, LENGTH)))
    weights = (weights + noise.exponential(size=(BATCH, STEPS, LAYERS, HEADS, LENGTH, LENGTH))) * seen
    pattern = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    pattern[:, :, -1, -1] = 0
    hole = ~exists[None, :, None, None]
    heads, stream = (BATCH, STEPS, LAYERS, HEADS, LENGTH), (BATCH, STEPS, LAYERS, LENGTH)
    recorded = {
        "value_norm": np.where(hole, np.nan, noise.exponential(size=heads)),
        "stream_peak": np.where(hole[:, :, 0], np.nan, 10 ** noise.uniform(0, 4, stream)),
        "stream_channel": np.where(hole[:, :, 0], -1, noise.integers(0, 64, stream)).astype(np.int32),
        "stream_median": noise.uniform(0.1, 1, stream[:3]),
        "stream_channel_median": np.where(hole[:, :, 0], np.nan, 10 ** noise.uniform(-1, 2, stream)),
        "output_rank": noise.uniform(1, 2, heads[:4]),
    }
    token_id = np.where(exists, noise.integers(1, 50, (BATCH, STEPS, LENGTH)), -1)
    track = build_track(
        np.where(hole, np.nan, pattern.sum(-2)).astype(np.float32),
        token_id.astype(np.int32),
        ~exists[None] & real[:, None],
        np.zeros_like(there),
        real,
        np.where(np.arange(LENGTH) < PROMPT, -1, np.arange(LENGTH) - PROMPT) * real - ~real,
        {
            "model": "made",
            "prompt_length": PROMPT,
            "causal": int(causal),
            "settings": "{}",
            "seed": seed,
            "vocabulary": "{}",
        },
        **{
            name: value.astype(np.float32) if value.dtype == np.float64 else value
            for name, value in recorded.items()
            if name not in unlike
        },
    )
    return Made(track, pattern, there)


def assert_equal(track, expected, steps=None):
    """`track` is the first `steps` steps of `expected`, or all.

    Compares variables, coordinates and attributes, except those that describe the file, and for a part except
    ``unmask_step`` and ``final_id``.
    """
    assert set(track.data.variables) == set(expected.data.variables)
    for name, values in expected.data.variables.items():
        if name in ("unmask_step", "final_id") and steps is not None:
            continue
        values = values.isel(step=slice(0, steps)) if "step" in values.dims else values
        found = track.data[name]
        assert found.dims == values.dims
        assert found.dtype == values.dtype, name
        np.testing.assert_array_equal(found, values, err_msg=str(name))
    kept, wanted = (
        {name: value for name, value in one.data.attrs.items() if name not in ("format", "finished", "vocabulary")}
        for one in (track, expected)
    )
    assert kept == wanted
    assert steps is not None or track.vocabulary == expected.vocabulary


@contextmanager
def disk_full_beyond(size):
    """A real limit of the operating system: no file of this process may grow beyond `size` bytes.

    Python ignores the signal, so writing fails as on a full disk. It writes no bytecode meanwhile: it would keep the
    truncated files and fail on them later.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = written


class Killed(BaseException):
    """Raised by `killed_at_write`; nothing catches it."""


@contextmanager
def killed_at_write(number, monkeypatch):
    """The `number`-th write to a Zarr store (from 1) does not happen, and whoever writes ends there.

    Gives a list of the keys that were written.
    """
    from zarr.storage import LocalStore

    written, write = [], LocalStore.set

    async def count(self, key, value):
        if len(written) + 1 >= number:
            raise Killed
        written.append(key)
        await write(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "set", count)
        yield written
