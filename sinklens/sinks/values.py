"""Value norms at sinks: whether the sinks of a model are no-ops.

A head that attends to a sink with a near-zero value adds nothing to the stream: the sink is a *no-op*, which absorbs
attention that has nowhere to go. A sink with an ordinary value passes a message on. Conclusions about no-op sinks need
a model that has them, so report the ratio beside every count of sinks. Needs the quantity "values".

Caveat: the norm of a value is not the norm of what the head writes; the output matrix can still shrink or enlarge it.
"""

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float

from sinklens.sinks.data import TrackData

NO_OP = 0.2  # Unifying View, 2606.08105


def value_over_median(track: TrackData) -> Float[xr.DataArray, "batch step layer head pos"]:
    """|v_j| / median_k |v_k|, k over the positions that exist at the step.

    The median, unlike the mean in `NoOp`, does not fall when a few positions have small values.

    Raises:
        TrackError: the track holds no "values".
    """
    norm = track.need("value_norm")["value_norm"]
    return norm / norm.median("pos")


def values_at(track: TrackData, found: Bool[xr.DataArray, "batch step layer head pos"]) -> xr.Dataset:
    """Value norms at the sinks `found`, over all steps, layers and heads.

    Variables, [batch] each. ``sinks``: their number; ``value_ratio``: mean of `value_over_median` over them, about 1 if
    their values are ordinary; ``no_op``: share of them whose ratio is below 0.2. NaN for a row without sinks.

    Args:
        found: as returned by ``track.detect``.

    Raises:
        TrackError: the track holds no "values".
    """
    axes = ("step", "layer", "head", "pos")
    value = value_over_median(track).where(found)
    count = value.count(axes)
    drained = ((value < NO_OP).sum(axes) / count).where(count > 0)
    return xr.Dataset({"sinks": count, "value_ratio": value.mean(axes, dtype=np.float64), "no_op": drained})
