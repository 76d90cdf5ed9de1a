"""The number of sinks of each row of a run, summed up while the run goes on.

A run of an 8B model with 256 steps of 1,200 positions has 1.26 GB of sink scores a row. A ledger keeps one number
per row, so `SinkSums` takes the steps as they come and keeps sums (`Record.reduce`).
"""

import numpy as np

from sinklens.sinks.motion import HEADS
from sinklens.sinks.track import SinkTrack


class SinkSums:
    """Sums over the steps of a run, of every row; call it with consecutive parts of its track."""

    def __init__(self) -> None:
        self._sinks = self._heads = np.zeros(())

    def __call__(self, track: SinkTrack) -> None:
        """Add some steps."""
        seen = _to_all_queries(track)
        score = seen.scores().where(seen.running)
        self._sinks = self._sinks + (seen.detect() & score.notnull()).sum(("step", *HEADS, "pos")).to_numpy()
        self._heads = self._heads + score.notnull().any("pos").sum(("step", *HEADS)).to_numpy()

    def per_head(self) -> np.ndarray:
        """Sinks per head and step by the paper's definition (Eq. 3, ε = 3, unit "sum"), [batch].

        Under a cache policy, scores are means over the queries that the step computed, times the number of positions,
        so that uniform attention is 1 as in an exact run. Steps after a row's end are ignored.
        """
        with np.errstate(invalid="ignore"):
            return np.asarray(self._sinks / self._heads)


def _to_all_queries(track: SinkTrack) -> SinkTrack:
    """The track with scores as if every position were a query, which under a cache policy are sums over fewer."""
    if "fresh" not in track:
        return track
    fraction = track.scores("fraction")
    return SinkTrack(track.data.assign(score=fraction * fraction.notnull().sum("pos")))
