"""Measures sinks in the course of a continuation, on windows of held-out text that are the same for all runs.

A masked model reads each window with several shares of its tokens masked; the first token is never masked, as in
training. A causal model reads it without masks. The masks of a smaller share are among those of a larger one.

- ``loss``: nats per masked token; in a causal model, per token.
- ``first``: share of the attention that the first position receives, also by layer and head (``first_by_head``).
- ``first_strongest``: share of heads whose strongest key is the first position.
- ``sink_heads``: share of heads with a sink: a key whose column sum exceeds the mean of the others by 3, as in
  `sinklens.sinks.EpsilonOverMean`.
- ``sink_mass``: share of the attention that sinks receive.
- ``revealed``: share of heads whose strongest key changes if one mask is replaced by its token.
- ``replaced``: the same if a visible token becomes another, over the queries after it, which alone can change in a
  causal model.

Caveat: one mask is revealed and one token replaced in each window, so these two are noisy for a single window.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from training.low_rank import LowRankLlama

SHARES = (0.05, 0.15, 0.3, 0.5, 0.7, 0.9)
EPSILON = 3.0
DIGITS = 5


@dataclass(frozen=True)
class Windows:
    """Windows of held-out text, and what is masked and replaced in them.

    Attributes:
        ids: the tokens.
        order: the order in which tokens are masked; the first token and the one to be replaced come last.
        replaced: the place of a token in the middle half.
        other: the token that replaces it.
    """

    ids: Int[Tensor, "window pos"]
    order: Int[Tensor, "window pos"]
    replaced: Int[Tensor, " window"]
    other: Int[Tensor, " window"]

    @classmethod
    def drawn(cls, stream: Int[Tensor, " token"], count: int, length: int, device: str = "cpu") -> "Windows":
        """`count` windows of `length` tokens, always the same ones.

        Raises:
            SettingError: windows shorter than 8 tokens, or longer than the text.
        """
        require(
            count > 0 and 8 <= length < len(stream) - 1,
            f"the held-out text has {len(stream)} tokens; got {count} windows of {length}. Windows have at least 8.",
            SettingError,
        )
        generator = torch.Generator().manual_seed(7)
        starts = torch.randint(len(stream) - length, (count, 1), generator=generator)
        ids = stream[starts + torch.arange(length)]
        replaced = torch.randint(length // 4, length - length // 4, (count,), generator=generator)
        other = stream[torch.randint(len(stream), (count,), generator=generator)]
        same = other == ids[torch.arange(count), replaced]
        rank = torch.rand(count, length, generator=generator)
        rank[:, 0] = rank[torch.arange(count), replaced] = 2.0
        found = (ids, rank.argsort(dim=1, stable=True).argsort(dim=1), replaced, torch.where(same, other ^ 1, other))
        return cls(*(one.to(device) for one in found))


@torch.no_grad()
def measure(net: LowRankLlama, windows: Windows) -> list[dict[str, Any]]:
    """The measures of the module by window, a record for each share of masked tokens (0 in a causal model)."""
    length = windows.ids.shape[1]
    positions = torch.arange(length, device=windows.ids.device)
    later = positions > windows.replaced[:, None]
    queries = torch.stack([torch.ones_like(later), later], dim=1).float()
    records: list[dict[str, Any]] = []
    for share in SHARES if net.mask_id is not None else (0.0,):
        count = min(max(1, round(share * (length - 1))), length - 2) if share else 0
        hidden = windows.order < count
        tokens = windows.ids if net.mask_id is None else windows.ids.masked_fill(hidden, net.mask_id)
        edited = torch.where(positions == windows.replaced[:, None], windows.other[:, None], tokens)
        stream, sums = net(tokens, queries)
        predicted = hidden if share else positions.expand_as(hidden) > 0
        found = _sinks(sums[:, :, 0])
        found["loss"] = _loss(net, stream, windows.ids, predicted)
        found["replaced"] = _moved(sums[:, :, 1], net(edited, queries)[1][:, :, 1])
        if share:
            revealed = torch.where(windows.order == 0, windows.ids, tokens)
            found["revealed"] = _moved(sums[:, :, 0], net(revealed, queries)[1][:, :, 0])
        by_head = sums[:, :, 0, :, 0].mean(dim=1) / length
        records.append({"share": share} | {name: _plain(value) for name, value in found.items()})
        records[-1]["first_by_head"] = [_plain(layer) for layer in by_head]
    return records


def _plain(values: Float[Tensor, " value"]) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]


def _sinks(sums: Float[Tensor, "layer window head pos"]) -> dict[str, Float[Tensor, " window"]]:
    length = sums.shape[-1]
    others = (sums.sum(dim=-1, keepdim=True) - sums) / (length - 1)
    sinks = sums > others + EPSILON
    by_head = {
        "first": sums[..., 0] / length,
        "first_strongest": (sums.argmax(dim=-1) == 0).float(),
        "sink_heads": sinks.any(dim=-1).float(),
        "sink_mass": (sums * sinks).sum(dim=-1) / length,
    }
    return {name: value.mean(dim=(0, 2)) for name, value in by_head.items()}


def _moved(
    before: Float[Tensor, "layer window head pos"], after: Float[Tensor, "layer window head pos"]
) -> Float[Tensor, " window"]:
    return (before.argmax(dim=-1) != after.argmax(dim=-1)).float().mean(dim=(0, 2))


def _loss(net: LowRankLlama, stream: Tensor, ids: Tensor, predicted: Tensor) -> Float[Tensor, " window"]:
    """The mean cross-entropy of the predicted tokens, each from the position before it."""
    shifted = predicted[:, 1:]
    loss = torch.zeros(shifted.shape, device=ids.device)
    loss[shifted] = F.cross_entropy(net.logits(stream[:, :-1][shifted]), ids[:, 1:][shifted], reduction="none")
    return loss.sum(dim=1) / shifted.sum(dim=1)
