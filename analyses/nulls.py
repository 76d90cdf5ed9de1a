"""The motion that a run would show if nothing moved, for the study `dynamics`.

The column sums of an autoregressive model can hardly move: its rows never change, and a step adds one row to a sum of
many. So a low rate of jumps does not show that its sinks are still. Two comparisons separate stillness from
bookkeeping:

- `causal_null`: one pattern that does not change over the steps, of any model, masked causally and revealed row by
  row. It shows the motion that an autoregressive model with this pattern would show. For an autoregressive model it
  reproduces the run.
- `FixedQueries`: column sums over one set of queries at every step. Rows that a step adds cannot move them, so in an
  autoregressive run they never move; in a diffusion run they move as far as the attention of these queries changes.

`NULLS` lists the measures. The null of a prompt uses the pattern that the model has on the finished canvas of its run,
at the noise level of the last step if the network reads one. It is as long as the run, since measures such as the share
of static heads depend on the number of steps: it ends at the first end token only if the run does, which is an
autoregressive one. (A run that decides several tokens in a step is shorter than its null, which reveals one a step.)

Caveat: the null has the pattern of one canvas. A model that was trained with causal attention would have another.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor

from sinklens.analyses.estimates.tables import interval_table
from sinklens.model import Model
from sinklens.model.prompts import SinglePrompt
from sinklens.runs.result import Generation
from sinklens.sinks import Record, SinkTrack, motion
from sinklens.sinks.quantities import Summed, Variables
from sinklens.sinks.track import build_track

ROUNDING = 1e-4  # by how much the rows of a softmax may miss 1
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


class FixedQueries(Summed):
    """Column sums over fixed queries F: ``fixed_score`` [head, pos], Σ_{i∈F} A[i, j].

    ``Record([FixedQueries(members)])`` records them; ``SinkTrack(track.data.assign(score=track["fixed_score"]))`` is a
    track that `motion` measures. Reads the pattern, so attention is computed explicitly.

    Args:
        members: True at the queries to sum, [batch, pos]; queries after its last position are left out.
    """

    name = "fixed queries"
    point = "attn.hook_pattern"
    of_keys = True
    variables: ClassVar[Variables] = {"fixed_score": ("head", "pos")}

    def __init__(self, members: Bool[Tensor, "batch pos"]) -> None:
        self._members = members

    def keep(self, value: Float[Tensor, "batch head query key"]) -> Tensor:
        """The sums. A cached pass computes only the last queries."""
        queries, keys = value.shape[-2:]
        members = torch.nn.functional.pad(self._members, (0, max(0, keys - self._members.shape[1])))
        chosen = members[:, keys - queries : keys].to(value.device)
        return torch.einsum("bhqk,bq->bhk", value.detach().float(), chosen.float())

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """The sums, unchanged."""
        return {"fixed_score": kept}


def causal_null(
    pattern: Float[np.ndarray, "layer head query key"],
    ids: Int[np.ndarray, " pos"],
    start: int,
    attrs: Mapping[str, Any],
    softmax: bool = True,
) -> SinkTrack:
    """The track of an autoregressive run with one unchanging pattern: at step t, the queries 0 … start + t − 1.

    Each row keeps its keys j ≤ i and is divided by 1 − Σ_{j>i} A[i, j], which is what masking before the softmax gives.
    Step t has the column sums over the first start + t rows; there are S − start steps. The last row is not used, as
    the last token of an autoregressive run is never read.

    Args:
        pattern: attention over S positions without padding.
        ids: their token ids, [S]; as in a run, the row ends after its first end token.
        start: length of the prompt, at least 1.
        attrs: attributes of the track; ``prompt_length`` and ``causal`` are replaced.
        softmax: False for attention whose keys do not compete (sigmoid): rows are not divided.
    """
    allowed = np.tril(pattern.astype(np.float64))
    if softmax:
        rest = 1 - pattern.sum(
            axis=-1, keepdims=True, dtype=np.float64
        )  # above 0 in attention to nothing (softmax + 1)
        total = allowed.sum(axis=-1, keepdims=True) + np.where(rest > ROUNDING, rest, 0)
        allowed = np.divide(allowed, total, out=np.zeros_like(allowed), where=total > 0)
    sums = np.moveaxis(allowed.cumsum(axis=-2)[..., start - 1 : -1, :], -2, 0)  # [step, layer, head, key]
    there = np.arange(len(ids)) < start + np.arange(len(sums))[:, None]
    nowhere = np.zeros((1, *there.shape), dtype=bool)
    return build_track(
        np.where(there[:, None, None], sums, np.nan)[None].astype(np.float32),
        np.where(there, ids, -1)[None],
        ~there[None],
        nowhere,
        np.ones((1, len(ids)), dtype=bool),
        np.full((1, len(ids)), -1),
        {**attrs, "prompt_length": start, "causal": 1},
    )


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
    softmax = attrs.get("attention", "softmax") != "sigmoid"
    return causal_null(pattern, ids[0].cpu().numpy(), start, attrs, softmax)


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
