"""Single passes over a text for the study `texts`: its loss while keys are hidden or out of date.

A `TextCanvas` is what a model reads: the text itself if it is autoregressive, otherwise the text with some tokens
masked. The loss is that of the masked tokens, or of every next token.

A key is *hidden* if no query but that of its own position sees it. It is *stale* if its key and value are those of an
earlier canvas, on which more tokens were masked, as in a cache of a diffusion model: the tokens in between were decided
since. Both happen in all layers at once.

Pitfall: with keys that several query heads share, a stale key is stale for all of them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.mass import of_mass
from sinklens.interventions.controls import largest, rest_of

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model

CHOICES = {
    "sink": "the sinks",
    "random": "as many weaker keys of each head, drawn at random",
    "same_mass": "random keys that are no sinks, with as much attention",
}
STALE = {**CHOICES, "all": "all keys that are not masked on the earlier canvas"}
NO_OP = 0.2  # a value that writes less, in medians of its head, writes next to nothing

Keys = Bool[Tensor, "layer head key"]
Sums = Float[Tensor, "layer head key"]
Hooks = list[tuple[str, Callable[..., Any]]]


class TextCanvas(NamedTuple):
    """A text as a model reads it.

    Attributes:
        ids: the text.
        masked: where the canvas has a mask; nowhere in an autoregressive model.
    """

    ids: Int[Tensor, " pos"]
    masked: Bool[Tensor, " pos"]

    def tokens(self, model: "Model") -> Int[Tensor, " pos"]:
        """What the model reads."""
        return self.ids if model.causal else self.ids.masked_fill(self.masked, int(model.mask_token_id or 0))


class Read(NamedTuple):
    """One pass over a canvas, with nothing hidden.

    Attributes:
        loss: nats per predicted token.
        pattern: attention of every query.
        key, value: what each position offers to the queries, before rotation.
    """

    loss: float
    pattern: Float[Tensor, "layer head query pos"]
    key: Float[Tensor, "layer pos kv_head d_head"]
    value: Float[Tensor, "layer pos kv_head d_head"]

    @property
    def sums(self) -> Sums:
        """Column sums."""
        return self.pattern.sum(dim=-2)

    @property
    def from_others(self) -> Sums:
        """Column sums without the query of the key's own position: what hiding the key takes away."""
        return self.sums - self.pattern.diagonal(dim1=-2, dim2=-1)


@torch.no_grad()
def loss(model: "Model", canvas: TextCanvas, hooks: Hooks) -> float:
    """Nats per predicted token of a pass with these hooks."""
    with model.tree.hooks(fwd_hooks=hooks):
        logits = model.tree(canvas.tokens(model)[None].to(model.cfg.device))[0].double().cpu()
    at = slice(1, None) if model.causal else canvas.masked
    rows = logits[:-1] if model.causal else logits[canvas.masked]
    return float(torch.nn.functional.cross_entropy(rows, canvas.ids[at]))


def read(model: "Model", canvas: TextCanvas) -> Read:
    """A pass that changes nothing."""
    kept: dict[str, list[Tensor]] = {"pattern": [], "k": [], "v": []}

    def keep(value: Tensor, hook: "Point") -> None:
        kept[str(hook.name).rpartition("hook_")[2]].append(value[0].float().cpu())

    names = [f"blocks.{layer}.attn.hook_{point}" for layer in range(model.cfg.n_layers) for point in kept]
    found = loss(model, canvas, [(name, keep) for name in names])
    return Read(found, *(torch.stack(kept[point]) for point in ("pattern", "k", "v")))


def uniform(length: int, causal: bool) -> Float[Tensor, " key"]:
    """The column sums of uniform attention: 1 in a bidirectional model, and less for later keys in a causal one."""
    sees = torch.ones(length, length).tril() if causal else torch.ones(length, length)
    return (sees / sees.sum(dim=-1, keepdim=True)).sum(dim=0)


def key_choices(treated: Keys, sinks: Keys, read: Read, order: Sums, allowed: Bool[Tensor, " key"]) -> dict[str, Keys]:
    """The keys of `CHOICES` for some of the sinks.

    Args:
        treated: the sinks in question.
        sinks: keys that no control may contain.
        read: the pass whose attention the controls match.
        order: the order in which they are drawn.
        allowed: keys that can be chosen.
    """
    rest = rest_of(read.sums, treated, allowed.expand_as(treated)) & ~sinks
    mass = read.from_others.flatten(1)
    taken = of_mass(
        mass.double().numpy(), (~sinks & allowed).flatten(1).numpy(),
        (mass * treated.flatten(1)).sum(dim=1, keepdim=True).double().numpy(), order.flatten(1).argsort(dim=-1).numpy(),
    )  # fmt: skip
    return {
        "sink": treated,
        "random": largest(order, rest, treated.sum(dim=-1, keepdim=True)),
        "same_mass": torch.from_numpy(taken).reshape(treated.shape),
    }


def hiding(hidden: Keys) -> Hooks:
    """Hooks that hide keys from every query but that of their own position."""
    own = torch.eye(hidden.shape[-1], dtype=torch.bool)

    def hook_of(keys: Bool[Tensor, "head key"]) -> Callable[..., Tensor]:
        def hide(value: Tensor, hook: "Point") -> Tensor:
            return value.masked_fill((keys[:, None] & ~own).to(value.device), -torch.inf)

        return hide

    return [(f"blocks.{layer}.attn.hook_attn_mask", hook_of(keys)) for layer, keys in enumerate(hidden)]


def outdating(stale: Keys, earlier: Read) -> Hooks:
    """Hooks that replace keys and values by those of an earlier canvas."""
    layers, _, heads, _ = earlier.key.shape
    of_kv_head = stale.reshape(layers, heads, -1, stale.shape[-1]).any(dim=2)  # [layer, kv head, key]

    def hook_of(keys: Bool[Tensor, "kv_head key"], old: Tensor) -> Callable[..., Tensor]:
        def replace(value: Tensor, hook: "Point") -> Tensor:
            return torch.where(keys.T[None, :, :, None].to(value.device), old.to(value), value)

        return replace

    return [
        (f"blocks.{layer}.attn.hook_{point}", hook_of(keys, old[layer]))
        for layer, keys in enumerate(of_kv_head)
        for point, old in (("k", earlier.key), ("v", earlier.value))
    ]


def earlier_canvas(canvas: TextCanvas, age: int, noise: np.random.Generator) -> TextCanvas | None:
    """The canvas with `age` more masks, none of them at the first position; None if too few tokens are left to mask."""
    visible = np.flatnonzero(~canvas.masked.numpy())[1:]
    if len(visible) <= age:
        return None
    masked = canvas.masked.clone()
    masked[torch.from_numpy(noise.choice(visible, age, replace=False))] = True
    return canvas._replace(masked=masked)


def stale_costs(
    model: "Model", canvas: TextCanvas, now: Read, earlier: TextCanvas, epsilon: float, order: Sums
) -> Mapping[str, tuple[float, float]]:
    """Loss added when the keys of `STALE` are stale, and their share of the attention; NaN without sinks.

    The sinks are those of the earlier canvas, as a cache would find them, among the tokens visible there. The controls
    are sinks of neither canvas, and hold as much attention of the present one.
    """
    before = read(model, earlier)
    least = uniform(len(canvas.ids), causal=False) + epsilon
    candidates = ~earlier.masked
    sinks = (before.sums > least) & candidates
    chosen = key_choices(sinks, sinks | (now.sums > least), now, order, candidates)
    chosen["all"] = candidates.expand_as(sinks)
    mass, found = now.from_others, dict[str, tuple[float, float]]()
    for name, keys in chosen.items():
        added = loss(model, canvas, outdating(keys, before)) - now.loss if sinks.any() else float("nan")
        found[name] = added, float((mass * keys).sum() / mass.sum())
    return found


def written(model: "Model", read: Read) -> Sums:
    """Norm of every value after the output matrix of every head that reads it, in medians of the head."""
    norms = []
    for layer, value in enumerate(read.value):
        weight = model.blocks[layer].attn.W_O.detach().float().cpu()
        of_head = value.transpose(0, 1).repeat_interleave(len(weight) // value.shape[1], dim=0)
        norms.append(torch.einsum("hpd,hdm->hpm", of_head, weight).norm(dim=-1))
    sizes = torch.stack(norms)
    return sizes / sizes.median(dim=-1, keepdim=True).values


def write_ratio(written: Sums, sinks: Keys) -> float:
    """log2 of the mean of `written` at sinks over that at other keys, mean over the heads that have both."""
    some = sinks.any(dim=-1) & (~sinks).any(dim=-1)
    if not some.any():
        return float("nan")
    at, off = ((written * keys).sum(dim=-1) / keys.sum(dim=-1).clamp_min(1) for keys in (sinks, ~sinks))
    return float((at[some] / off[some]).log2().mean())


def no_ops(written: Sums, sinks: Keys) -> float:
    """Share of the sinks whose value writes less than `NO_OP` medians; NaN without sinks."""
    return float((written[sinks] < NO_OP).double().mean()) if sinks.any() else float("nan")
