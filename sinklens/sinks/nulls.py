"""What measures of motion show where nothing moves.

The column sums of an autoregressive model can hardly move: its rows never change, and a step adds one row to a sum of
many. So a low rate of jumps does not show that its sinks are still. Two comparisons separate stillness from
bookkeeping:

- `causal_null`: one pattern that does not change over the steps, of any model, masked causally and revealed row by
  row. It shows the motion that an autoregressive model with this pattern would show. For an autoregressive model it
  reproduces the run.
- `FixedQueries`: column sums over one set of queries at every step. Rows that a step adds cannot move them, so in an
  autoregressive run they never move; in a diffusion run they move as far as the attention of these queries changes.

Caveat: the null has the pattern of one canvas. A model that was trained with causal attention would have another.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sinks.quantities import Summed, Variables
from sinklens.sinks.track import SinkTrack, build_track

ROUNDING = 1e-4  # by how much the rows of a softmax may miss 1


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
