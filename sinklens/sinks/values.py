"""Value norms at sinks: whether the sinks of a model are no-ops.

A head that attends to a sink with a near-zero value adds nothing to the stream: the sink is a *no-op*, which absorbs
attention that has nowhere to go. A sink with an ordinary value passes a message on. Conclusions about no-op sinks need
a model that has them, so report the ratio beside every count of sinks. Needs the quantity "values".

The norm of a value is not the norm of what the head writes: the head's output matrix can still shrink or enlarge it.
`written_norms` computes the latter from ``hook_v`` and ``W_O``.

Caveat: the recorded quantity "values", and so every detector and `values_at`, is the norm before that matrix.
"""

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

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


def written_norms(
    value: Float[Tensor, "*batch pos kv_head d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "*batch head pos"]:
    """‖v_j W_O^h‖: what head h would write at a query that attended to key j alone, without the bias.

    Attention weights times these vectors v_j W_O^h sum to the head's part of ``hook_result`` (TransformerLens). A value
    of ordinary norm can still be a no-op if the output matrix maps it to nearly nothing. In models that scale or
    normalize the sum of the heads before it joins the stream, the norm is that before the scale. Computed in float32.

    Args:
        value: ``blocks.L.attn.hook_v``; each value head serves as many query heads as are grouped with it.
        W_O: ``model.W_O[L]``.
    """
    heads, value = W_O.shape[0], value.detach().float()
    each = value.repeat_interleave(heads // value.shape[-2], dim=-2)
    return torch.einsum("...phd,hdm->...hpm", each, W_O.detach().float().to(each.device)).norm(dim=-1)
