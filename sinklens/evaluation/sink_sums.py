"""Three numbers about the sinks of each row of a run, summed up while the run goes on.

A run of an 8B model with 256 steps of 1,200 positions has 1.26 GB of sink scores a row. A ledger keeps three numbers of
them, so `SinkSums` takes the steps as they come and keeps sums (`Record.reduce`).
"""

import numpy as np

from sinklens.sinks.motion import HEADS, strongest_key
from sinklens.sinks.track import SinkTrack


class SinkSums:
    """Sums over the steps of a run, of every row; call it with consecutive parts of its track."""

    def __init__(self) -> None:
        self._sinks = self._heads = self._largest = np.zeros(0)
        self._lowest = self._highest = np.zeros(0)

    def __call__(self, track: SinkTrack) -> None:
        """Add some steps."""
        seen = _to_all_queries(track)
        score = seen.scores()
        if seen.causal:  # until each row's end
            score = score.where(seen.running)
        found, exists, largest = seen.detect() & score.notnull(), score.notnull().any("pos"), score.max("pos")
        position = strongest_key(seen)
        apart = ("step", *HEADS)
        if not self._sinks.size:
            self._sinks = self._heads = self._largest = np.zeros(seen.data.sizes["batch"])
            self._lowest = self._highest = np.full(position.isel(step=0).shape, np.nan)
        self._sinks = self._sinks + found.sum((*apart, "pos")).to_numpy()
        self._heads = self._heads + exists.sum(apart).to_numpy()
        self._largest = self._largest + largest.sum(apart, dtype=np.float64).to_numpy()
        self._lowest = np.fmin(self._lowest, position.min("step").to_numpy())
        self._highest = np.fmax(self._highest, position.max("step").to_numpy())

    def summary(self) -> dict[str, np.ndarray]:
        """The numbers, each [batch].

        Returns:
            "per_head": sinks per head and step by the paper's definition (Eq. 3, ε = 3, unit "sum"); "main_score": mean
            over heads and steps of the largest score; "static_share": share of heads whose strongest key never moves,
            in [0, 1]. Under a cache policy, scores are means over the queries that the step computed, times the number
            of positions, so that uniform attention is 1 as in an exact run. In an autoregressive run only steps up to a
            row's end count.
        """
        exists = ~np.isnan(self._lowest)
        with np.errstate(invalid="ignore"):
            static = (self._lowest == self._highest).sum((1, 2)) / exists.sum((1, 2))
            return {
                "per_head": self._sinks / self._heads,
                "main_score": self._largest / self._heads,
                "static_share": static,
            }


def _to_all_queries(track: SinkTrack) -> SinkTrack:
    """The track with scores as if every position were a query, which under a cache policy are sums over fewer."""
    if "fresh" not in track:
        return track
    fraction = track.scores("fraction")
    return SinkTrack(track.data.assign(score=fraction * fraction.notnull().sum("pos")))
