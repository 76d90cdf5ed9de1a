"""How the sinks of one run differ from those of another, step by step.

After two free runs diverge, the tokens at a position differ, too; a comparison under replay holds them fixed.

Pitfall: a step under a cache policy sums only over the queries that it computes. Compared with sums over all queries,
keys that only the others attend to count as lost, although no attention changed. Compare runs with the same queries
(`Record.queries`), as `effect` does.
"""

import numpy as np
import xarray as xr

from sinklens.errors import SettingError
from sinklens.runs.result import Generation, require_run
from sinklens.sinks.detectors import Detector
from sinklens.sinks.track import SinkTrack


def sinks_compared(base: Generation, changed: Generation, detector: Detector | None = None) -> xr.Dataset:
    """Sinks of `base` that `changed` lacks, and the reverse, in the steps that both ran.

    Per [batch, step], summed over layers and heads: ``sinks``, the number of base's sinks; ``sinks_lost``, of these
    those that `changed` lacks; ``sinks_added``, sinks of `changed` that base lacks; ``sinks_moved``, the number of
    heads whose strongest key is another one. Scores are scaled to a mean of 1 over the keys of a head, because a step
    under a cache policy has fewer queries.

    Args:
        detector: what a sink is, by its scores; default `EpsilonOverMean()`.

    Raises:
        SettingError: a run did not record its sinks, or the runs have different positions.
    """
    require_run(base, "base")
    require_run(changed, "changed")
    if base.sinks is None or changed.sinks is None:
        raise SettingError("sinks_compared needs the sinks of both runs; run them with record_sinks=True.")
    if base.canvas.shape[::2] != changed.canvas.shape[::2]:
        raise SettingError(
            f"compared runs must have the same prompts and lengths; got {list(base.canvas.shape[::2])} and "
            f"{list(changed.canvas.shape[::2])} (rows, positions)."
        )
    steps = range(min(base.steps_run, changed.steps_run))
    tracks = [_scaled(track, steps) for track in (base.sinks, changed.sinks)]
    before, after = (track.detect(detector) for track in tracks)
    top = [track.data["score"].fillna(-np.inf).argmax("pos") for track in tracks]
    places = ("layer", "head", "pos")
    return xr.Dataset(
        {
            "sinks": before.sum(places),
            "sinks_lost": (before & ~after).sum(places),
            "sinks_added": (after & ~before).sum(places),
            "sinks_moved": (top[0] != top[1]).sum(("layer", "head")),
        }
    ).drop_vars(["batch"], errors="ignore")


def _scaled(track: SinkTrack, steps: range) -> SinkTrack:
    """The track in these steps, with scores whose mean over a head's keys is 1."""
    data = track.data.isel(step=list(steps))
    score = data["score"].where(data["is_real"])
    return SinkTrack(data.assign(score=score / score.mean("pos")))
