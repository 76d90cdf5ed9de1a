"""What hiding sinks costs the predictions of causal and of denoising passes, with the same text and information.

Token i of a block is predicted from the tokens before it: causally by the logits at i − 1, and by a denoising pass in
which position i and the rest of the block are masked. These are the *predicting queries* of a mode, as many in both.
Keys are chosen among the text before the block, whose keys and values are the same in both modes: the *sinks* of each
head by the attention of its predicting queries, and as controls as many weaker keys drawn at random, or random keys
with as much attention. The queries of the block that the pass computes do not see the chosen keys.

The sinks of one mode are also hidden from the other, since the modes may differ in what is chosen or in what it costs.

Caveat: a head whose sinks hold nearly all of its attention has no other keys with as much; ``mass`` says how much each
choice has.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.mode_text import MODES, BlockText, in_pass, mean_of, patterns, scaled, sinks
from sinklens.hooks.points import Point
from sinklens.interventions.controls import largest, rest_of, same_mass

if TYPE_CHECKING:
    from sinklens.model import Model

CHOICES = {"sink": "sinks", "random": "as many random keys", "same_mass": "random keys with as much attention"}
COSTS = {
    "nll": "log-likelihood of the text lost, nats per token",
    "kl": "KL divergence from the unchanged prediction, nats per token",
}
SETS = {"number": "keys per head", "mass": "share of a predicting query's attention to the text before the block"}

Keys = Bool[Tensor, "layer head key"]


def predicting(model: "Model", text: BlockText, mode: str, block: range) -> Float[Tensor, "layer head key"]:
    """Attention of the predicting queries of a block to each key before it, summed."""
    ids = text.ids[: block.stop][None]
    if mode == "causal":
        before = range(block.start - 1, block.stop - 1)
        return patterns(model, ids, mode, block, before)[0, ..., : block.start].sum(dim=-2)
    pattern = patterns(model, masked_from_each(model, text, block), mode, block)
    return torch.stack([pattern[at, :, :, at, : block.start] for at in range(len(block))]).sum(dim=0)


def masked_from_each(model: "Model", text: BlockText, block: range) -> Tensor:
    """For each position of a block, the text up to its end, masked from this position on."""
    rows = text.ids[: block.stop].repeat(len(block), 1)
    first = torch.tensor(block)[:, None]
    return rows.masked_fill(torch.arange(block.stop) >= first, model.mask_token_id)  # type: ignore[arg-type]


def chosen_keys(score: Float[Tensor, "layer head key"], order: Tensor, epsilon: float) -> dict[str, Keys]:
    """The keys of `CHOICES`; controls are taken in descending `order`."""
    found = sinks(scaled(score), epsilon)
    rest = rest_of(score, found, torch.ones_like(found))
    return {
        "sink": found,
        "random": largest(order, rest, found.sum(dim=-1, keepdim=True)),
        "same_mass": same_mass(order, score, found, rest),
    }


def log_probabilities(
    model: "Model", text: BlockText, mode: str, block: range, hidden: Keys | None = None
) -> Float[Tensor, "token vocab"]:
    """Log-probabilities of the tokens of a block, each from the tokens before it, with keys hidden from its queries."""
    causal = mode == "causal"
    first = block.start - 1 if causal else block.start
    ids = text.ids[: block.stop][None] if causal else masked_from_each(model, text, block)
    hooks = [] if hidden is None else _hiding(hidden, first)
    with torch.no_grad():
        logits = model.tree.run_with_hooks(ids.to(model.cfg.device), fwd_hooks=hooks, **in_pass(mode, block))
    rows = logits[0, first : block.stop - 1] if causal else logits[:, block.start :].diagonal(dim1=0, dim2=1).T
    return rows.double().cpu().log_softmax(dim=-1)


def _hiding(hidden: Keys, first: int) -> list[Any]:
    """Hooks that hide keys from the queries from `first` on."""

    def hook_of(keys: Bool[Tensor, "head key"]) -> Any:
        def hide(value: Tensor, hook: Point) -> Tensor:
            places = torch.zeros(len(keys), len(hook.forward_pass.queries), value.shape[-1], dtype=torch.bool)
            places[:, first:, : keys.shape[-1]] = keys[:, None]
            return value.masked_fill(places.to(value.device), -torch.inf)

        return hide

    return [(f"blocks.{layer}.attn.hook_attn_mask", hook_of(keys)) for layer, keys in enumerate(hidden)]


def costs(model: "Model", text: BlockText, epsilon: float, seed: int) -> dict[str, np.ndarray]:
    """`COSTS` [mode, keys, choice], `SETS` [keys, choice] and ``logprob`` [mode] of one text; means over its blocks.

    NaN without a complete block. ``keys`` is the mode whose sinks were chosen, ``mode`` that of the passes.
    """
    rng = text.random(seed)
    found: dict[tuple[Any, ...], list[float]] = {}

    def add(*place: Any, value: float) -> None:
        found.setdefault(place, []).append(value)

    for block in text.blocks:
        tokens, noise = text.ids[block.start : block.stop, None], rng.random((*_heads(model), block.start))
        plain = {mode: log_probabilities(model, text, mode, block) for mode in MODES}
        for mode, before in plain.items():
            add("logprob", mode, value=float(before.gather(1, tokens).mean()))
        for source in MODES:
            score = predicting(model, text, source, block)
            for choice, keys in chosen_keys(score, torch.from_numpy(noise).float(), epsilon).items():
                add("number", source, choice, value=float(keys.sum(dim=-1).float().mean()))
                share = (score * keys).sum(dim=-1) / score.sum(dim=-1).clamp_min(1e-12)
                add("mass", source, choice, value=float(share.mean()))
                for mode, before in plain.items():
                    after = log_probabilities(model, text, mode, block, keys)
                    add("nll", mode, source, choice, value=float((before - after).gather(1, tokens).mean()))
                    kl = (before.exp() * (before - after)).sum(dim=-1)
                    add("kl", mode, source, choice, value=float(kl.mean()))
    return _arrays(found)


def _heads(model: "Model") -> tuple[int, int]:
    return model.cfg.n_layers, model.cfg.n_heads


def _arrays(found: dict[tuple[Any, ...], list[float]]) -> dict[str, np.ndarray]:
    """The means of all entries, NaN where there are none."""
    modes, choices = list(MODES), list(CHOICES)
    shapes = {
        "logprob": (modes,), **dict.fromkeys(SETS, (modes, choices)), **dict.fromkeys(COSTS, (modes, modes, choices)),
    }  # fmt: skip
    arrays = {}
    for name, axes in shapes.items():
        array = np.full([len(axis) for axis in axes], np.nan)
        for at in np.ndindex(array.shape):
            place = (name, *(axis[number] for axis, number in zip(axes, at, strict=True)))
            array[at] = mean_of(found.get(place, []))
        arrays[name] = array
    return arrays
