"""The column sums of all layers of a pass, a few layers at a time.

In a small network, or a short text, calling an operation costs more than its arithmetic. A run that records sink scores
therefore keeps the queries, keys and log-sum-exps of several layers and computes their sums together, when their scores
fill a core's cache (`TOGETHER`), or when the pass is over. A layer of a long text fills a block alone, and is
computed at once.

`Watch.sums` is set while a run records. Where a hook or a trace block reads ``hook_sink_scores``, the value that it
gets is also the one recorded.

Pitfall: until the sums are taken, the kept tensors must not be written to. Attention hands over the ones that it made.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.hooks.attention.column_sums import column_sums, log_sum_exp
from sinklens.hooks.forward_pass import ForwardPass

TOGETHER = 1 << 19  # scores that are computed together on a CPU: 2 MiB, to fit a core's cache
KEPT = 1 << 26  # bytes of queries and keys that wait on a GPU


class Waiting(NamedTuple):
    """What the sums of one layer are computed from; see `column_sums`.

    Attributes:
        lse: None where attention did not return it.
    """

    query: Float[Tensor, "batch head query d_head"]
    key: Float[Tensor, "batch head key d_head"]
    lse: Float[Tensor, "batch head query"] | None
    scale: float
    mask: Float[Tensor, "#batch #head #query key"] | None
    real: Bool[Tensor, "batch query"] | None
    causal: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layers that can be computed together."""
        query, key, lse, scale, mask, real, causal = self
        masked, counted = None if mask is None else mask.shape, None if real is None else real.shape
        return query.shape, key.shape, query.dtype, query.device, lse is None, scale, masked, counted, causal

    @property
    def together(self) -> int:
        """How many such layers are computed together."""
        batch, heads, queries, _ = self.query.shape
        if self.query.device.type == "cpu":
            return max(1, TOGETHER // (batch * heads * queries * self.key.shape[2]))
        return max(1, KEPT // (self.query.nbytes + self.key.nbytes))


class LayerScores(NamedTuple):
    """The column sums of one layer, and the pass that gave them."""

    scores: Float[Tensor, "batch head key"]
    forward_pass: ForwardPass


class LayerSums:
    """Collects what the column sums of a pass are computed from.

    Attributes:
        rows: the rows to record; a pass under guidance has more.
        layers: the layers that are recorded.
        latest: the scores of the step that ended last, by point.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.layers: set[int] = set()
        self.latest: dict[Any, LayerScores] = {}
        self._passes: dict[Any, ForwardPass] = {}
        self._scores: dict[Any, Tensor] = {}
        self._waiting: dict[Any, Waiting] = {}

    def put(self, point: Any, scores: Float[Tensor, "batch head key"]) -> None:
        """Record the scores of the layer of `point`."""
        self._passes[point], self._scores[point] = point.forward_pass, scores[: self.rows]

    def add(self, point: Any, layer: Waiting) -> None:
        """Record the scores of the layer of `point`, which may be computed later."""
        if layer.kind != next(iter(self._waiting.values()), layer).kind:
            self._compute()
        self._waiting[point], self._passes[point] = layer, point.watch.forward_pass
        if len(self._waiting) >= layer.together:
            self._compute()

    def _compute(self) -> None:
        waiting = list(self._waiting.values())
        first = waiting[0]
        with torch.no_grad():
            query, key, lse, mask, real = (
                _joined([getattr(one, name) for one in waiting]) for name in ("query", "key", "lse", "mask", "real")
            )
        if lse is None:
            lse = log_sum_exp(query, key, first.scale, mask, first.causal)
        scores = column_sums(query, key, lse, first.scale, mask, real, first.causal)
        self._scores |= zip(self._waiting, scores.unflatten(0, (len(waiting), -1))[:, : self.rows], strict=True)
        self._waiting.clear()

    def end_step(self) -> None:
        """Compute the scores that are still waiting; those of the step are then the `latest`."""
        if self._waiting:
            self._compute()
        self.latest = {point: LayerScores(scores, self._passes[point]) for point, scores in self._scores.items()}
        self._scores.clear()


def _joined(parts: list[Any]) -> Any:
    """Tensors of several layers along the batch axis; None if the layers have none."""
    present = [part for part in parts if part is not None]
    return None if not present else present[0] if len(present) == 1 else torch.cat(present)
