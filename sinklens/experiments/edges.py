"""Edge attribution: what patching every direct path between two components would do, and which components read a sink.

An edge goes from a sender (embedding, head, MLP) to a receiver (a head's queries, keys or values, an MLP, the logits).
Patching it (`PathPatch`) adds the change of the sender's output to what the receiver reads, so to first order

    m(corrupted with the edge clean) − m(corrupted) ≈ Σ_pos (o_clean − o_corrupted) · ∂m/∂x_receiver,

where o is what the sender writes to the stream and x_receiver the stream as this receiver reads it, before its norm
(edge attribution patching; Syed et al., 2310.10348). `edge_attribution` computes the right side for the complete graph
with one backward pass, `path_patching_effects` the left side with a copy of the batch for each edge, and `agreement`
compares them. Components are named as in `PathPatch`.

`read_attribution` asks what later components do with the message of one key. A head's query i takes A[i, j] v_j from
key j. Replace v_j by the mean value of the keys that the query sees, as `AblateValues` does, without changing the
attention. What the head writes then changes by

    δ_i = Σ_heads A[i, j] (mean of v − v_j) W_O,

times the layer's gate where the network has one. Only one later reader, or a group, gets this change, on the direct
path; what depends on these readers is recomputed.

Pitfall: as in attribution.py, the estimate is inaccurate where the metric is nonlinear between the two inputs. Average
the gradient along the path (``ig_steps=``), and check the strongest edges against `path_patching_effects`. Also, the
effect of a sink's message is not the effect of its attention: masking a key also frees its attention, which other keys
then receive. Compare with `MaskSinks`, and with the same effect of a control key.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.experiments.attribution import EMBED, LogitMetric, Pair, differentiable, metric_value, wide
from sinklens.experiments.step_ids import exact_step
from sinklens.hooks.modulation import Time
from sinklens.hooks.points import Point
from sinklens.interventions.paths import (
    Receiver,
    ResidualStream,
    Sender,
    centered,
    keeps,
    named,
    receivers_of,
    refuse_indirect,
    senders_of,
)
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs.intervention import HookFunction, Pairs, within
from sinklens.runs.result import Generation
from sinklens.utils.arguments import Count, as_tuple, checked

COPIES = 16  # of the batch in a pass; more are slower on a CPU, whose caches they exceed
EVERY = "all"


@checked
def edge_attribution(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    ig_steps: int = 0,
    by_position: bool = False,
) -> xr.Dataset:
    """Estimate the effect of patching each edge of the graph with its value in the clean pass.

    Args:
        clean_ids, corrupted_ids, metric, attention_mask, time, ig_steps: as in `attribution_patching`.
        by_position: whether positions are kept apart.

    Returns:
        ``effect`` over ``sender`` and ``receiver``, summed over positions and rows; NaN where there is no such path.
        With `by_position` also over ``pos``, the column at which the receiver reads. `Circuit.strongest` lists the
        largest. Attributes ``clean`` and ``corrupted`` are the metric in the two passes.

    Raises:
        SettingError: as `attribution_patching`; a model with norms after its sublayers.
    """
    return edge_effects(Pair.of(model, clean_ids, corrupted_ids, attention_mask, time), metric, ig_steps, by_position)


def edge_effects(pair: Pair, metric: LogitMetric, ig_steps: int, by_position: bool) -> xr.Dataset:
    model = pair.model
    refuse_indirect(model, "a table of edges")
    senders, receivers = senders_of(model), receivers_of(model)
    slopes: dict[str, Tensor] = {}
    with differentiable(model):
        (clean, clean_logits), (corrupted, corrupted_logits) = _sent(pair, senders)
        for mix in pair.between(clean[EMBED], ig_steps):
            for receiver, slope in zip(receivers, _slopes(pair, metric, receivers, mix), strict=True):
                slopes[receiver.name] = slopes.get(receiver.name, 0.0) + slope / max(1, ig_steps)
        rows, axes = [], (0, 2) if by_position else (0, 1, 2)
        for sender in senders:
            written = sender.written(wide(clean[sender.point]) - wide(corrupted[sender.point]), model, corrupted)
            missing = torch.full_like(written.sum(dim=axes), torch.nan)
            effects = [
                (written * slopes[one.name]).sum(dim=axes) if sender.depth < one.depth else missing for one in receivers
            ]
            rows.append(torch.stack(effects))
        values = metric_value(metric, clean_logits), metric_value(metric, corrupted_logits)
    return _table(torch.stack(rows), senders, receivers, *values)


def _sent(pair: Pair, senders: Sequence[Sender]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """What the senders write (with the gates of the corrupted pass) and the logits, of both passes."""
    outputs = dict.fromkeys(sender.point for sender in senders)
    gates = dict.fromkeys(sender.gate for sender in senders if sender.gate)
    return [pair.values(pair.clean, outputs), pair.values(pair.corrupted, [*outputs, *gates])]


@checked
@torch.no_grad()
def path_patching_effects(
    model: "Model",
    clean_ids: Prompt,
    corrupted_ids: Prompt,
    metric: LogitMetric,
    attention_mask: Tensor | None = None,
    *,
    time: Time = None,
    senders: str | Sequence[str] | None = None,
    receivers: str | Sequence[str] | None = None,
    batch_size: Count = COPIES,
) -> xr.Dataset:
    """The true effect of patching each edge with its value in the clean pass.

    Arguments, result and errors are those of `edge_attribution`; the metric needs no gradient. A pass holds several
    copies of the corrupted batch, each with another edge patched.

    Args:
        senders, receivers: labels, as in `PathPatch`; None means all.
        batch_size: number of edges per pass.

    Raises:
        SettingError: also if `batch_size` is below 1.
    """
    refuse_indirect(model, "a table of edges")
    first = senders_of(model) if senders is None else named(senders_of(model), as_tuple(senders))
    last = receivers_of(model) if receivers is None else named(receivers_of(model), as_tuple(receivers))
    pair = Pair.of(model, clean_ids, corrupted_ids, attention_mask, time)
    (clean, clean_logits), (corrupted, corrupted_logits) = _sent(pair, first)
    changes = [sender.written(clean[sender.point] - corrupted[sender.point], model, corrupted) for sender in first]
    before = metric_value(metric, corrupted_logits)
    edges = [(row, column) for column in range(len(last)) for row in range(len(first))]
    edges = [(row, column) for row, column in edges if first[row].depth < last[column].depth]
    effects = torch.full((len(first), len(last)), torch.nan)
    listed = [(changes[row], [last[column]]) for row, column in edges]
    for (row, column), logits in zip(edges, _each_patched(pair, pair.corrupted, listed, batch_size), strict=True):
        effects[row, column] = metric_value(metric, logits) - before
    return _table(effects, first, last, metric_value(metric, clean_logits), before)


Change = tuple[ResidualStream, Sequence[Receiver]]
"""A change of the stream, and the receivers that read it."""


def _each_patched(pair: Pair, ids: Tensor, changes: Sequence[Change], size: int) -> Iterator[Tensor]:
    """The logits of `ids` with each change alone, `size` copies of the batch per pass."""
    for part in (changes[start : start + size] for start in range(0, len(changes), size)):
        for copy in pair.hidden(ids, _stacked(part, pair), copies=len(part)).split(len(ids)):
            yield pair.logits(copy)


def _stacked(changes: Sequence[Change], pair: Pair) -> Pairs:
    """Hooks that add a change to what some receivers read: change n in copy n of the batch.

    Receivers come after what changed, and a copy has one change. So the change is that of the corrupted pass, and what
    is between it and the receivers stays as it is.
    """
    values: dict[str, Tensor] = {}
    by_receiver: dict[Receiver, list[int]] = {}
    for number, (_, receivers) in enumerate(changes):
        for receiver in receivers:
            by_receiver.setdefault(receiver, []).append(number)
    watched = dict.fromkeys(name for receiver in by_receiver for name in receiver.reads)
    pairs: Pairs = [(name, keeps(values)) for name in watched]
    count = torch.arange(len(pair.corrupted))
    for receiver, numbers in by_receiver.items():
        rows = torch.cat([count + number * len(count) for number in numbers])
        change = torch.cat([changes[number][0] for number in numbers])
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
) -> list[Float[Tensor, "batch pos d_model"]]:
    """∂m/∂x of every receiver in the corrupted pass under `mix`."""
    points = list(dict.fromkeys(receiver.point for receiver in receivers))
    values: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Point) -> None:
        values[str(hook.name)] = wide(value.detach())

    watched: Pairs = [(name, keep) for name in dict.fromkeys(name for one in receivers for name in one.reads)]
    slopes = pair.gradients(metric, points, [*mix, *watched])
    return [_pulled_back(one, wide(slopes[one.point]), values, pair.model) for one in receivers]


def _pulled_back(receiver: Receiver, slope: Tensor, values: Mapping[str, Tensor], model: "Model") -> ResidualStream:
    """The gradient at the receiver's point, carried back to the stream that it reads, before its norm.

    For y = x / r, r² = mean(x²) + eps: ∂m/∂x = u / r − x (x · u) / (d r³), where u = ∂m/∂y; for a norm that subtracts
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


def _table(
    effects: Float[Tensor, "sender receiver *pos"],
    senders: Sequence[Sender],
    receivers: Sequence[Receiver],
    clean: Tensor,
    corrupted: Tensor,
) -> xr.Dataset:
    """The effects with their labels, and the layers of both ends."""
    axes = ("sender", "receiver", "pos")[: effects.ndim]
    coords = {
        "sender": [sender.name for sender in senders],
        "receiver": [receiver.name for receiver in receivers],
        "sender_layer": ("sender", [sender.layer for sender in senders]),
        "receiver_layer": ("receiver", [receiver.layer for receiver in receivers]),
    }
    about = {"clean": clean.item(), "corrupted": corrupted.item()}
    return xr.Dataset({"effect": (axes, effects.detach().cpu().numpy())}, coords, about)


@checked
@torch.no_grad()
def read_attribution(
    run: "Generation",
    step: int,
    layer: int,
    head: int | None = None,
    key: int | None = None,
    *,
    row: int = 0,
) -> xr.Dataset:
    """The effect of a key's message on the predictions of a step, by the component that reads it.

        table = read_attribution(run, step=8, layer=1, head=0, key=18)
        print(table["kl"].to_series().nlargest(5))

    Passes of the run's model over the step's canvas, with a copy for each reader. Hooks of the run are not applied
    again.

    Args:
        step, layer, row: indices; negative ones count from the end.
        head: the head whose message is removed; None for all heads of the layer.
        key: canvas position of the key, including padding; None for the key with the largest column sum in the head or
            heads.

    Returns:
        ``kl`` over ``reader``: the KL divergence of the step's predictions from those of the unchanged pass, in nats,
        averaged over the undecided positions (in an autoregressive run, at the newest token). The last reader,
        ``"all"``, stands for every later component together: the effect of the message on the step. Attributes:
        ``step``, ``layer``, ``head`` (-1 for all) and ``key``.

    Raises:
        SettingError: an index or position that does not exist, or a model with norms after its sublayers
            (DiffusionGemma).
    """
    model = run.model
    refuse_indirect(model, "readers")
    layer, step = within("layer", [layer], model.cfg.n_layers)[0], within("step", [step], run.steps_run)[0]
    heads = within("head", None if head is None else [head], model.cfg.n_heads)
    row = within("row", [row], len(run.canvas))[0]
    given = exact_step(run, step)
    here, columns = given.row(row), given.columns(row)
    pair = Pair(model, here.ids, here.ids, here.attention_mask, here.time)
    place, change = _message(pair, layer, heads, None if key is None else given.place(row, key))
    later = [receiver for receiver in receivers_of(model) if receiver.depth > 2 * layer]
    groups = {receiver.name: [receiver] for receiver in later} | {EVERY: later}
    places = torch.arange(len(columns))[-1:] if model.causal else run.undecided[row, step, columns].nonzero()[:, 0]
    places = places.to(here.ids.device)
    before = pair.values(pair.clean, [])[1][0, places].double().log_softmax(-1)
    values, listed = [], [(change, group) for group in groups.values()]
    for logits in _each_patched(pair, pair.clean, listed, COPIES):
        after = logits[0, places].double().log_softmax(-1)
        values.append(float((before.exp() * (before - after)).sum(dim=-1).mean()))
    about = {"step": step, "layer": layer, "head": -1 if head is None else heads[0], "key": columns[place]}
    return xr.Dataset({"kl": ("reader", values)}, {"reader": list(groups)}, about)


def _message(pair: Pair, layer: int, heads: list[int], key: int | None) -> tuple[int, ResidualStream]:
    """The key, and the change of the stream if its value is replaced by the mean of those that a query sees."""
    attn, gate = f"blocks.{layer}.attn", f"blocks.{layer}.adaln.hook_attn_gate"
    gates = [gate] if pair.model.tree.architecture.modulation else []
    points = [*gates, f"{attn}.hook_pattern", f"{attn}.hook_v", f"{attn}.hook_attn_scores"]
    kept, _ = pair.values(pair.clean, points)
    cfg = pair.model.cfg
    own = wide(kept[f"{attn}.hook_v"][0])[:, [head * cfg.n_key_value_heads // cfg.n_heads for head in heads]]
    pattern, scores = (kept[f"{attn}.{name}"][0, heads].to(own) for name in ("hook_pattern", "hook_attn_scores"))
    place = int(pattern.sum(dim=(0, 1)).argmax()) if key is None else key
    seen = (scores > -torch.inf).to(own)
    mean = torch.einsum("hqk,khd->hqd", seen, own) / seen.sum(dim=-1, keepdim=True).clamp(min=1)
    message = pattern[:, :, place, None] * (mean - own[place, :, None])
    change = torch.einsum("hqd,hdm->qm", message, wide(pair.model.blocks[layer].attn.W_O[heads]))
    return place, change[None] * wide(kept[gate])[:, None] if gates else change[None]
