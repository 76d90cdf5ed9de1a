"""Edge attribution: what patching every direct path between two components would do, estimated from gradients.

An edge goes from a sender (embedding, head, MLP) to a receiver (a head's queries, keys or values, an MLP, the logits).
Patching it (`PathPatch`) adds the change of the sender's output to what the receiver reads, so to first order

    m(corrupted with the edge clean) − m(corrupted) ≈ Σ_pos (o_clean − o_corrupted) · ∂m/∂x_receiver,

where o is what the sender writes to the stream and x_receiver the stream as this receiver reads it, before its norm
(edge attribution patching; Syed et al., 2310.10348). `edge_attribution` computes the right side for the complete graph
with one backward pass, `path_patching_effects` the left side with a copy of the batch for each edge, and `agreement`
compares them. Components are named as in `PathPatch`.

Pitfall: as in attribution.py, the estimate is inaccurate where the metric is nonlinear between the two inputs. Average
the gradient along the path (``path=``), and check the strongest edges against `path_patching_effects`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.attribution import EMBED, LogitMetric, Pair, differentiable, metric_value, wide
from sinklens.experiments.sweeps import activation_bytes, rows_within
from sinklens.hooks.modulation import Time
from sinklens.hooks.points import Point
from sinklens.interventions.circuits import receivers_of, senders_of
from sinklens.interventions.paths import Receiver, ResidualStream, Sender, centered, keeps, refuse_indirect
from sinklens.model.prompts import Prompt
from sinklens.runs.intervention import HookFunction, Pairs

if TYPE_CHECKING:
    from sinklens.model import Model

ON_CPU = 16  # more copies of the batch per pass are slower on a CPU, whose caches they exceed


def edge_attribution(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    path: int = 0,
    by_position: bool = False,
) -> xr.Dataset:
    """Estimate the effect of patching each edge of the graph with its value in the clean pass.

    Args:
        clean_ids, corrupted_ids, metric, attention_mask, time, path: as in `attribution_patching`.
        by_position: whether positions are kept apart.

    Returns:
        ``effect`` over ``sender`` and ``receiver``, summed over positions and rows; NaN where there is no such path.
        With `by_position` also over ``pos``, the column at which the receiver reads.
        Attributes ``clean`` and ``corrupted`` are the metric in the two passes.

    Raises:
        SettingError: as `attribution_patching`; a model with norms after its sublayers.
    """
    refuse_indirect(model, "a table of edges")
    senders, receivers = senders_of(model), receivers_of(model)
    pair = Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    slopes: dict[str, Tensor] = {}
    with differentiable(model):
        outputs = dict.fromkeys(sender.point for sender in senders)
        gates = [sender.gate for sender in senders if sender.gate]
        clean, clean_logits = pair.values(pair.clean, outputs)
        corrupted, corrupted_logits = pair.values(pair.corrupted, [*outputs, *dict.fromkeys(gates)])
        shares = [(number + 0.5) / path for number in range(path)] or [0.0]
        for share in shares:
            mix: Pairs = [(EMBED, lambda value, hook, share=share: torch.lerp(value, clean[EMBED], share))]
            for name, slope in _slopes(pair, metric, receivers, mix if path else []):
                slopes[name] = slopes.get(name, 0.0) + slope / len(shares)
        changes = {point: wide(clean[point]) - wide(corrupted[point]) for point in outputs}
        written = [sender.written(changes[sender.point], model, corrupted) for sender in senders]
        rows = [
            _effects(sender, one, receivers, slopes, by_position) for sender, one in zip(senders, written, strict=True)
        ]
        values = metric_value(metric, clean_logits), metric_value(metric, corrupted_logits)
    return _table(torch.stack(rows), senders, receivers, *values)


@torch.no_grad()
def path_patching_effects(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    senders: Sequence[str] | None = None,
    receivers: Sequence[str] | None = None,
    memory_gb: float | int = 2.0,
    edges_per_pass: int | None = None,
) -> xr.Dataset:
    """The true effect of patching each edge with its value in the clean pass.

    Arguments, result and errors are those of `edge_attribution`; the metric needs no gradient. A pass holds several
    copies of the corrupted batch, each with another edge patched.

    Args:
        senders, receivers: labels, as in `PathPatch`; None means all.
        memory_gb: budget for everything a pass holds besides the weights, in 10⁹ bytes; see `activation_bytes`.
        edges_per_pass: number of edges per pass, instead of a budget.

    Raises:
        SettingError: also a budget below one edge, or fewer edges per pass than 1.
    """
    refuse_indirect(model, "a table of edges")
    first = senders_of(model) if senders is None else [Sender.named(name, model) for name in senders]
    last = receivers_of(model) if receivers is None else [Receiver.named(name, model) for name in receivers]
    pair = Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    outputs = dict.fromkeys(sender.point for sender in first)
    gates = dict.fromkeys(sender.gate for sender in first if sender.gate)
    clean, clean_logits = pair.values(pair.clean, outputs)
    corrupted, corrupted_logits = pair.values(pair.corrupted, [*outputs, *gates])
    changes = [sender.written(clean[sender.point] - corrupted[sender.point], model, corrupted) for sender in first]
    before = metric_value(metric, corrupted_logits)
    edges = [(row, column) for column in range(len(last)) for row in range(len(first))]
    edges = [(row, column) for row, column in edges if first[row].depth < last[column].depth]
    size = copies_within(pair, memory_gb) if edges_per_pass is None else edges_per_pass
    if size < 1:
        raise SettingError(f"edges_per_pass must be at least 1; got {edges_per_pass}.")
    effects = torch.full((len(first), len(last)), torch.nan)
    for part in (edges[start : start + size] for start in range(0, len(edges), size)):
        patches = stacked_patches([(changes[row], [last[column]]) for row, column in part], pair)
        hidden = pair.hidden(pair.corrupted, patches, copies=len(part))
        for (row, column), copy in zip(part, hidden.split(len(pair.corrupted)), strict=True):
            effects[row, column] = metric_value(metric, pair.logits(copy)) - before
    return _table(effects, first, last, metric_value(metric, clean_logits), before)


def copies_within(pair: Pair, memory_gb: float | int) -> int:
    """Number of copies of the batch in a pass that the budget allows, each with another change of what is read."""
    cfg, (rows, length) = pair.model.cfg, pair.corrupted.shape
    logits = rows * length * cfg.d_vocab * (cfg.dtype.itemsize + 8)  # of one copy at a time
    each = rows * (activation_bytes(pair.model, length) + 8 * length * cfg.d_model * cfg.dtype.itemsize)
    rows_within(memory_gb, logits + each)  # refuses a budget below one edge
    allowed = int((memory_gb * 1e9 - logits) // each)
    return min(ON_CPU, allowed) if cfg.device.type == "cpu" else allowed


def stacked_patches(edges: Sequence[tuple[ResidualStream, Sequence[Receiver]]], pair: Pair) -> Pairs:
    """Hooks that add a change to what some receivers read: the change number n in copy n of the batch.

    Receivers come after what changed, and a copy has one change. So the change is that of the corrupted pass, and what
    is between it and the receivers stays as it is.
    """
    values: dict[str, Tensor] = {}
    by_receiver: dict[Receiver, list[int]] = {}
    for number, (_, receivers) in enumerate(edges):
        for receiver in receivers:
            by_receiver.setdefault(receiver, []).append(number)
    watched = dict.fromkeys(name for receiver in by_receiver for name in receiver.reads)
    pairs: Pairs = [(name, keeps(values)) for name in watched]
    count = torch.arange(len(pair.corrupted))
    for receiver, numbers in by_receiver.items():
        rows = torch.cat([count + number * len(count) for number in numbers])
        change = torch.cat([edges[number][0] for number in numbers])
        pairs.append((receiver.point, _changed_rows(receiver, rows, change, values, pair.model)))
    return pairs


def _changed_rows(
    receiver: Receiver,
    rows: Int[Tensor, " row"],
    change: ResidualStream,
    values: Mapping[str, Tensor],
    model: "Model",
) -> HookFunction:
    """A hook that changes what `receiver` reads in some rows."""

    def receive(value: Tensor, hook: Point) -> Tensor:
        found = value.clone()
        read = {name: values[name][rows] for name in receiver.reads}
        found[rows] = receiver.changed(value[rows], change, read, model)
        return found

    return receive


def _slopes(
    pair: Pair, metric: LogitMetric, receivers: Sequence[Receiver], mix: Pairs
) -> Iterator[tuple[str, Float[Tensor, "batch pos d_model"]]]:
    """∂m/∂x of every receiver in the corrupted pass under `mix`, by label."""
    points = list(dict.fromkeys(receiver.point for receiver in receivers))
    values: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Point) -> None:
        values[str(hook.name)] = wide(value.detach())

    watched: Pairs = [(name, keep) for name in dict.fromkeys(name for one in receivers for name in one.reads)]
    slopes = pair.gradients(metric, points, [*mix, *watched])
    for receiver in receivers:
        yield receiver.name, _pulled_back(receiver, wide(slopes[receiver.point]), values, pair.model)


def _pulled_back(receiver: Receiver, slope: Tensor, values: Mapping[str, Tensor], model: "Model") -> ResidualStream:
    """The gradient at the receiver's point as one of the stream that it reads, before its norm.

    Of y = x / r, r² = mean(x²) + eps: ∂m/∂x = u / r − x (x · u) / (d r³), where u = ∂m/∂y; of a norm that subtracts
    the mean, the same with x and the result minus their means.
    """
    if receiver.name == "logits":
        return slope
    if receiver.letter:
        block = model.blocks[receiver.layer]
        weight = getattr(block.attn, f"W_{receiver.letter.upper()}")[receiver.head]
        slope = slope[:, :, receiver.head] @ wide(weight).T * wide(block.ln1.w)
        slope = slope * (1 + values[receiver.scale][:, None]) if receiver.scale else slope
    stream = centered(values[receiver.stream], model)
    scale = (stream.pow(2).mean(dim=-1, keepdim=True) + model.cfg.eps).sqrt()
    along = (stream * slope).sum(dim=-1, keepdim=True)
    return centered(slope / scale - stream * along / (stream.shape[-1] * scale**3), model)


def _effects(
    sender: Sender, written: ResidualStream, receivers: Sequence[Receiver], slopes: dict[str, Tensor], by_position: bool
) -> Float[Tensor, "receiver *pos"]:
    """Σ (change of what the sender writes) · (slope of the receiver), for every receiver after it."""
    axes = (0, 2) if by_position else (0, 1, 2)
    shape = (len(receivers), written.shape[1]) if by_position else (len(receivers),)
    found = torch.full(shape, torch.nan, dtype=written.dtype, device=written.device)
    for place, receiver in enumerate(receivers):
        if sender.depth < receiver.depth:
            found[place] = (written * slopes[receiver.name]).sum(dim=axes)
    return found


def _table(
    effects: Float[Tensor, "sender receiver *pos"],
    senders: Sequence[Sender],
    receivers: Sequence[Receiver],
    clean: Tensor,
    corrupted: Tensor,
) -> xr.Dataset:
    """The effects with their labels, and the layers of both ends."""
    axes = ("sender", "receiver", "pos")[: effects.ndim]
    return xr.Dataset(
        {"effect": (axes, effects.detach().cpu().numpy())},
        {
            "sender": [sender.name for sender in senders],
            "receiver": [receiver.name for receiver in receivers],
            "sender_layer": ("sender", [sender.layer for sender in senders]),
            "receiver_layer": ("receiver", [receiver.layer for receiver in receivers]),
        },
        {"clean": clean.item(), "corrupted": corrupted.item()},
    )


class Edge(NamedTuple):
    """A direct path from one component to another, with its effect.

    Attributes:
        sender, receiver: labels.
        effect: its effect on the metric.
    """

    sender: str
    receiver: str
    effect: float


def strongest_edges(effects: xr.Dataset, count: int = 10) -> list[Edge]:
    """The edges with the largest effects of either sign, largest first.

    Args:
        effects: from `edge_attribution` or `path_patching_effects`.
    """
    values = effects["effect"].transpose("sender", "receiver").to_numpy()
    order = np.argsort(-np.abs(values), axis=None)[: min(count, int((~np.isnan(values)).sum()))]  # NaN comes last
    places = zip(*np.unravel_index(order, values.shape), strict=True)
    return [
        Edge(str(effects["sender"].values[row]), str(effects["receiver"].values[column]), float(values[row, column]))
        for row, column in places
    ]
