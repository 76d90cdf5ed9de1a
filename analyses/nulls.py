"""The motion that a run would show if nothing moved, for the study `dynamics`.

`NULLS` lists the measures; sinklens/sinks/nulls.py explains them. The null of a prompt uses the pattern that the model
has on the finished canvas of its run, at the noise level of the last step if the network reads one. It is as long as
the run, since measures such as the share of static heads depend on the number of steps: it ends at the first end token
only if the run does, which is an autoregressive one. (A run that decides several tokens in a step is shorter than its
null, which reveals one a step.)
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import xarray as xr

from sinklens.analyses.estimates.tables import interval_table
from sinklens.model.prompts import SinglePrompt
from sinklens.sinks import Record, SinkTrack, motion
from sinklens.sinks.detectors import bounded
from sinklens.sinks.nulls import FixedQueries, causal_null

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

COMPARED = ("jump_share", "sink_jump_share", "static_share")
FIXED = ("jump_share", "static_share")
SOURCES = ("measured", "null model", "measured − null model")
NULLS = {
    "null_jump_share": "jump_share of the run's final pattern, masked causally and revealed row by row",
    "null_sink_jump_share": "sink_jump_share of that null",
    "null_static_share": "static_share of that null",
    "fixed_jump_share": "jump_share of the column sums over the prompt's queries alone (0 in a causal model)",
    "fixed_static_share": "static_share of those sums (1 in a causal model)",
}


def fixed_queries(
    model: "Model", prompts: Sequence[SinglePrompt], chat_template: bool | str, answer: int = 0
) -> Record:
    """Records the column sums over the queries of the prompt, which every step has.

    A step of a canvas model has the queries of its canvas alone, the same at every step of the canvas; they are the
    fixed ones there.

    Args:
        answer: number of positions after the prompt, for canvas models.
    """
    _, real = model.encode(list(prompts), chat_template)
    if model.tree.architecture.encoder:
        real = torch.ones(len(real), real.shape[1] + answer, dtype=torch.bool)
    return Record([FixedQueries(real)])


def against_nulls(track: SinkTrack, run: "Generation") -> xr.Dataset:
    """`NULLS`, [prompt].

    The null is NaN for a canvas model: its pattern has no queries before the canvas.

    Args:
        track: the run's active steps, with ``fixed_score``.
    """
    rows = range(len(run.canvas))
    nulls = [] if run.model.tree.architecture.encoder else [null_of(run, row) for row in rows]
    fixed = SinkTrack(track.data.assign(score=track["fixed_score"]))
    found = [rates(one) for one in nulls]
    values = {f"null_{name}": np.array([one[name][0] for one in found] or [np.nan] * len(rows)) for name in COMPARED}
    values |= {f"fixed_{name}": rates(fixed)[name] for name in FIXED}
    return xr.Dataset({name: ("prompt", values[name]) for name in NULLS})


def rates(track: SinkTrack) -> dict[str, np.ndarray]:
    """`COMPARED`, [batch] each; NaN for a row without two steps."""
    moves = motion.jumps(track, track.detect())[["changes", "pairs"]].sum(motion.HEADS)
    return {
        "jump_share": motion.jumps(track)["share"].mean(motion.HEADS).to_numpy(),
        "sink_jump_share": (moves["changes"] / moves["pairs"]).to_numpy(),
        "static_share": motion.static_share(track).to_numpy(),
    }


@torch.no_grad()
def null_of(run: "Generation", row: int) -> SinkTrack:
    """`causal_null` of the pattern on the finished canvas of one row, from a separate pass without its padding."""
    assert run.sinks is not None
    model = run.model
    real = run.real[row] & (run.tokens[row] >= 0)
    ids = run.tokens[row][real][None]
    points = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    level = run.time_at(run.steps_run - 1)
    seen = model.tree.peek(ids.to(model.cfg.device), None, points, None if level is None else level[[row]])
    pattern = np.stack([seen[name][0].float().cpu().numpy() for name in points])
    start = int(run.real[row, : run.prompt_length].sum())
    attrs = run.sinks.data.attrs
    if not run.sinks.causal:  # its run goes on after an end token
        attrs = {**attrs, "special": json.dumps({**run.sinks.special, "end": []})}
    return causal_null(pattern, ids[0].cpu().numpy(), start, attrs, bounded(run.sinks))


def null_table(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """`COMPARED` as measured, of the null, and their difference, paired by prompt; and with queries held fixed."""
    from pandas import concat

    tables = []
    for name, data in measured.items():
        fixed = xr.Dataset({one: data[f"fixed_{one}"] for one in FIXED})
        held = interval_table({name: fixed}, FIXED, seed).assign(source="queries held fixed")
        tables += [interval_table({name: beside_null(data)}, COMPARED, seed), held]
    return concat(tables, ignore_index=True)


def beside_null(data: xr.Dataset) -> xr.Dataset:
    """`COMPARED` [prompt, source]."""
    pairs = {name: (data[name], data[f"null_{name}"]) for name in COMPARED}
    return xr.Dataset(
        {name: xr.concat([one, null, one - null], dim="source") for name, (one, null) in pairs.items()},
        coords={"source": list(SOURCES)},
    )
