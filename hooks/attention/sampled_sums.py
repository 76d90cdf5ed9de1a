"""Sink scores from a random share of the queries, with their standard errors.

The score of key j sums A[i, j] over N queries. Of n queries drawn without replacement, with a_i = A[i, j],

    estimate = N · ā,    standard error = N · √((1 − n/N) · s² / n),    s² = Σ (a_i − ā)² / (n − 1),

which is the estimate of a total in a simple random sample (Cochran, Sampling Techniques, 1977, ch. 2). The product of
queries and keys that exact scores need is formed for the drawn queries only, and attention itself is unchanged.

Pitfall: a key that few queries attend to strongly is missed whenever none of these is drawn; its score and its standard
error are then both too small.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinklens.hooks.attention.column_sums import sums_of_powers

SHARE = 0.25
FEWEST = 64  # queries; a pass with as few is summed completely


class QuerySample:
    """Draws the queries of each row, layer and pass; equal runs draw the same, and a row draws the same in any batch.

    Args:
        seeds: one number per row; rows after these, as under guidance, continue the draws of the same rows.
        share: share of a row's queries that is drawn, `FEWEST` of them at least.

    Attributes:
        error: standard errors of the sums computed last, [batch, head, key].
    """

    def __init__(self, seeds: Sequence[int], share: float = SHARE) -> None:
        self.share, self.error = share, torch.zeros(())
        self._generators = [torch.Generator().manual_seed(seed >> 1) for seed in seeds]

    @torch.no_grad()
    def column_sums(
        self,
        query: Float[Tensor, "batch head query d_head"],
        key: Float[Tensor, "batch head key d_head"],
        lse: Float[Tensor, "batch head query"],
        scale: float,
        mask: Float[Tensor, "#batch #head #query key"] | None = None,
        real: Bool[Tensor, "#batch query"] | None = None,
    ) -> Float[Tensor, "batch head key"]:
        """The estimates, with the arguments of `sinklens.hooks.attention.column_sums.column_sums`; sets `error`."""
        batch, heads, queries, width = query.shape
        counted = torch.ones(batch, queries, dtype=torch.bool) if real is None else real.expand(batch, -1).cpu()
        rows = [self._drawn(row, places) for row, places in enumerate(counted)]
        number = torch.tensor([len(row) for row in rows], device=query.device)[:, None, None]
        every = counted.sum(dim=1).to(query.device)[:, None, None]
        drawn = pad_sequence(rows, batch_first=True).to(query.device)[:, None]
        spare = torch.arange(drawn.shape[2], device=query.device) >= number  # rows that draw fewer
        if mask is not None and mask.shape[2] > 1:
            places = drawn[..., None].expand(-1, mask.shape[1], -1, mask.shape[3])
            mask = mask.expand(batch, -1, -1, -1).gather(2, places)
        sums, squares = sums_of_powers(
            query.gather(2, drawn[..., None].expand(-1, heads, -1, width)), key,
            lse.gather(2, drawn.expand(-1, heads, -1)).masked_fill(spare, -torch.inf), scale, mask,
        )  # fmt: skip
        drawn_of = number.clamp(min=1)
        variance = (squares - sums.square() / drawn_of).clamp(min=0) / (number - 1).clamp(min=1)
        self.error = every * ((1 - drawn_of / every.clamp(min=1)).clamp(min=0) * variance / drawn_of).sqrt()
        return sums * (every / drawn_of)

    def _drawn(self, row: int, counted: Bool[Tensor, " query"]) -> Int[Tensor, " drawn"]:
        """Queries of a row, of those that count; padding does not change which."""
        places = counted.nonzero()[:, 0]
        number = min(len(places), max(FEWEST, math.ceil(self.share * len(places))))
        order = torch.rand(len(places), generator=self._generators[row % len(self._generators)])
        return places[order.topk(number).indices]
