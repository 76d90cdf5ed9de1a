"""Sink scores from a random share of the queries, with their standard errors.

The score of key j sums A[i, j] over N queries. Of n queries drawn without replacement, with a_i = A[i, j],

    estimate = N · ā,    standard error = N · √((1 − n/N) · s² / n),    s² = Σ (a_i − ā)² / (n − 1),

which is the estimate of a total in a simple random sample (Cochran, Sampling Techniques, 1977, ch. 2). The product of
queries and keys that exact scores need is formed for the drawn queries only, and attention itself is unchanged.

Pitfall: a key that few queries attend to strongly is missed whenever none of these is drawn; its score and its standard
error are then both too small.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.hooks.column_sums import sums_of_powers

SHARE = 0.25
FEWEST = 64  # queries; a pass with as few is summed completely


class QuerySample:
    """Draws the queries of each layer and pass; equal runs draw the same.

    Attributes:
        error: standard errors of the sums computed last, [batch, head, key].
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share, self.error = share, torch.zeros(())
        self._generator = torch.Generator().manual_seed(0)

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
        """The estimates, with the arguments of `sinklens.hooks.column_sums.column_sums`; sets `error`."""
        batch, heads, queries, width = query.shape
        counted = torch.ones(batch, queries, dtype=torch.bool) if real is None else real.expand(batch, -1).cpu()
        total = counted.sum(dim=1)
        drawn = self._drawn(counted, int(total.min())).to(query.device)
        if mask is not None and mask.shape[2] > 1:
            rows = drawn[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
            mask = mask.expand(batch, -1, -1, -1).gather(2, rows)
        sums, squares = sums_of_powers(
            query.gather(2, drawn[:, None, :, None].expand(-1, heads, -1, width)), key,
            lse.gather(2, drawn[:, None].expand(-1, heads, -1)), scale, mask,
        )  # fmt: skip
        number, every = drawn.shape[1], total.to(query.device)[:, None, None]
        variance = (squares - sums.square() / number).clamp(min=0) / max(1, number - 1)
        self.error = every * ((1 - number / every) * variance / number).sqrt()
        return sums * (every / number)

    def _drawn(self, counted: Bool[Tensor, "batch query"], fewest: int) -> Int[Tensor, "batch drawn"]:
        """Queries of each row that count, as many in every row; `fewest` is the smallest number of a row."""
        number = min(fewest, max(FEWEST, math.ceil(self.share * counted.shape[1])))
        order = torch.rand(counted.shape, generator=self._generator).masked_fill(~counted, -1.0)
        return order.topk(number, dim=1).indices
