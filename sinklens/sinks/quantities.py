"""Quantities that a run can record in addition to its sink scores, one small class each.

A `Quantity` names a hook point inside a block and defines what to keep of its value in a pass, how to join that with
earlier passes when a key/value cache limits a pass to new positions, and which variables of the track result. Values
are measured after all hooks and trace blocks have edited them.

Limitation: a median over positions needs all of them, so `Stream` and `Outputs` hold the values of every layer until
the step ends, as much memory as one activation per layer.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Variables = dict[str, tuple[str, ...]]


class Quantity(ABC):
    """A value that a run records at every layer and step, beside the sink scores.

    Attributes:
        name: its name in `Record`.
        point: hook point inside a block, in any accepted spelling.
        variables: track variables that it fills, with their axes after batch, step and layer.
    """

    name: ClassVar[str]
    point: ClassVar[str]
    variables: ClassVar[Variables]
    of_keys: ClassVar[bool] = False
    """Whether the axis "pos" of its variables counts the keys of a point with queries and keys."""

    def keep(self, value: Tensor) -> Tensor:
        """The part of the point's value to hold until the step ends; by default all of it."""
        return value.detach()

    def join(self, before: Tensor, now: Tensor) -> Tensor:
        """Join positions of earlier passes and new ones; by default concatenated along the position axis."""
        return torch.cat([before, now], dim=1)

    @abstractmethod
    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """Compute the step's variables.

        Args:
            kept: kept values of all positions that exist.
            real: False on padding, and on positions that a cache policy leaves out; for the positions that exist.
            heads: number of query heads of the layer.

        Returns:
            Each of `variables`, [batch, ...]; an axis "pos" covers the positions that exist. Floating-point numbers
            are recorded in float32.
        """


class Summed(Quantity):
    """Base class of sums over queries, whose last axis is the keys."""

    def join(self, before: Float[Tensor, "... earlier"], now: Float[Tensor, "... key"]) -> Tensor:
        """Rows of a causal pattern never change, so the sums of new rows are added to the earlier ones."""
        return now + torch.nn.functional.pad(before, (0, now.shape[-1] - before.shape[-1]))


class Scores(Summed):
    """The sink scores Σ_i A[i, j]: ``score`` [head, pos]. Always recorded.

    They are the values of ``hook_sink_scores``: a trace block that reads this point before it edits the pattern of the
    same layer gets its value early, and the recorded scores are then those before the edit.
    """

    name = "scores"
    point = "attn.hook_sink_scores"
    variables: ClassVar[Variables] = {"score": ("head", "pos")}

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """The scores, unchanged."""
        return {"score": kept.float()}


class Values(Quantity):
    """Norms of the values, |v_j|: ``value_norm`` [head, pos]; grouped heads share a value head and its norm.

    Source: the norms studied in One Token Is Enough (2601.19657) and Active-Dormant Heads (2410.13835).
    """

    name = "values"
    point = "attn.hook_v"
    variables: ClassVar[Variables] = {"value_norm": ("head", "pos")}

    def keep(self, value: Float[Tensor, "batch pos kv_head d_head"]) -> Tensor:
        """The norms."""
        return value.detach().float().norm(dim=-1)

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """One norm per query head."""
        return {"value_norm": kept.transpose(1, 2).repeat_interleave(heads // kept.shape[2], dim=1)}


class Stream(Quantity):
    """Peaks |h| of the residual stream that the layer's attention reads (``hook_resid_pre``).

    ``stream_peak`` [pos]: max_c |h[j, c]|; ``stream_channel`` [pos]: that channel c; ``stream_median``: median of |h|
    over all real positions and channels; ``stream_channel_median`` [pos]: median of |h[:, c]| over real positions, for
    the channel c of the peak. Of an even number of values the median is the lower middle one. Under a cache policy,
    only positions that the step computes count. Source: Massive Activations (2402.17762); per channel after Layer
    Collapse (2605.06366).
    """

    name = "stream"
    point = "hook_resid_pre"
    variables: ClassVar[Variables] = {
        "stream_peak": ("pos",),
        "stream_channel": ("pos",),
        "stream_median": (),
        "stream_channel_median": ("pos",),
    }

    def keep(self, value: Float[Tensor, "batch pos d_model"]) -> Tensor:
        """Magnitudes."""
        return value.detach().abs()

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """Peaks and medians; padding is excluded from the medians."""
        peak, channel = kept.float().max(dim=-1)
        none = kept.new_full(kept.shape[2:], torch.nan)  # of a row that a cache policy leaves out
        medians = [
            (row[keep].median(), row[keep].median(dim=0).values) if bool(keep.any()) else (none[0], none)
            for row, keep in zip(kept, real, strict=True)
        ]
        per_channel = torch.stack([channels for _, channels in medians]).float()
        return {
            "stream_peak": peak,
            "stream_channel": channel.to(torch.int32),
            "stream_median": torch.stack([median for median, _ in medians]).float(),
            "stream_channel_median": per_channel.gather(1, channel),
        }


class Outputs(Quantity):
    """Stable rank of each head's output O = A·V (``hook_z``): ``output_rank`` [head], |O|_F² / σ₁², at least 1.

    σ₁ is the largest singular value of O [pos, d_head] over real positions, under a cache policy over those that the
    step computes. Source: Unifying View (2606.08105).
    NaN for a head whose output is zero, or not finite.
    """

    name = "outputs"
    point = "attn.hook_z"
    variables: ClassVar[Variables] = {"output_rank": ("head",)}

    def finish(self, kept: Tensor, real: Bool[Tensor, "batch pos"], heads: int) -> dict[str, Tensor]:
        """From the eigenvalues of OᵀO."""
        z = kept.float().masked_fill(~real[:, :, None, None], 0.0)
        gram = torch.einsum("bphd,bphe->bhde", z, z)
        finite = gram.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
        gram = gram.where(finite, torch.zeros_like(gram))  # LAPACK refuses NaN
        largest = torch.linalg.eigvalsh(gram)[..., -1]
        return {"output_rank": (gram.diagonal(dim1=-2, dim2=-1).sum(-1) / largest).clamp(min=1.0)}


BY_NAME: dict[str, type[Quantity]] = {kind.name: kind for kind in (Values, Stream, Outputs)}


def quantity_of(variable: str) -> str | None:
    """Name of the built-in quantity that fills `variable` of a track, or None."""
    return next((name for name, kind in BY_NAME.items() if variable in kind.variables), None)
