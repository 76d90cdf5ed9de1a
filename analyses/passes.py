"""Single passes over a text: what a model attends to, with which keys, and what it predicts without some of them.

A `TextCanvas` is a text with some tokens masked, and a `Read` a pass over it that changes nothing. Other passes over
the same canvas hide keys (`losses`), or leave them as they were on an earlier canvas (`outdating`).

*Sinks* are the keys of a head that receive more attention than `uniform` attention would give them, by some ε:
Σ_i A[i, j] − Σ_i 1 / (keys that query i sees) > ε. In a bidirectional model this is nearly the paper's Eq. 3 (Rulli et
al., 2510.15731); in an autoregressive one, the first keys are not sinks merely because all queries see them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.model.prompts import SinglePrompt
from sinklens.sinks.values import NO_OP, written_norms

Keys = Bool[Tensor, "layer head key"]
Sums = Float[Tensor, "layer head key"]
OfHeads = Float[Tensor, "layer head"]
Hooks = list[tuple[str, Callable[..., Any]]]
POINTS = ("attn.hook_pattern", "attn.hook_attn_scores", "attn.hook_q", "attn.hook_k", "attn.hook_v", "hook_resid_pre")
TOGETHER = 512  # positions in a batch of passes


def ids_of(model: "Model", text: SinglePrompt, chat_template: bool | str, longest: int) -> Int[Tensor, " pos"]:
    """The first `longest` tokens of a text, on the CPU.

    Raises:
        SettingError: there are fewer than three.
    """
    ids = model.encode(text, chat_template).ids[0].cpu()[:longest]
    require(len(ids) > 2, f"a study of texts needs at least three tokens per text; got {text!r}.")
    return ids


class TextCanvas(NamedTuple):
    """A text as a model reads it.

    Attributes:
        ids: the text.
        masked: where the canvas has a mask; nowhere in an autoregressive model.
        start: the first position that may be masked, or that an autoregressive model's loss is about.
    """

    ids: Int[Tensor, " pos"]
    masked: Bool[Tensor, " pos"]
    start: int = 1

    def tokens(self, model: "Model") -> Int[Tensor, " pos"]:
        """What the model reads."""
        return self.ids if model.causal else self.ids.masked_fill(self.masked, int(model.mask_token_id or 0))


class Read(NamedTuple):
    """One pass over a canvas, with nothing hidden.

    Attributes:
        loss: nats per predicted token.
        pattern, score: attention of every query, and its logarithm before it is normalized; −∞ where it sees nothing.
        query, key, value: of every position, before rotation.
        stream: what enters each layer.
    """

    loss: float
    pattern: Float[Tensor, "layer head query pos"]
    score: Float[Tensor, "layer head query pos"]
    query: Float[Tensor, "layer pos head d_head"]
    key: Float[Tensor, "layer pos kv_head d_head"]
    value: Float[Tensor, "layer pos kv_head d_head"]
    stream: Float[Tensor, "layer pos d_model"]

    @property
    def sums(self) -> Sums:
        """Column sums."""
        return self.pattern.sum(dim=-2)

    @property
    def key_norms(self) -> Sums:
        """Norm of the key that each head reads."""
        return self.key.norm(dim=-1).mT.repeat_interleave(self.query.shape[2] // self.key.shape[2], dim=1)

    @property
    def query_norms(self) -> Sums:
        """Norm of the query of every position."""
        return self.query.norm(dim=-1).mT

    @property
    def cosines(self) -> Sums:
        """Mean cosine of each key with the queries that see it.

        A score is the product of both norms, the cosine and a factor that all keys share.
        """
        cosine = self.score * self.query.shape[-1] ** 0.5 / (self.query_norms[..., None] * self.key_norms[:, :, None])
        seen = torch.isfinite(self.score)
        return torch.where(seen, cosine, 0).sum(dim=-2) / seen.sum(dim=-2)

    def sinks(self, causal: bool, epsilon: float) -> Keys:
        """Keys whose column sum is more than `epsilon` above that of uniform attention."""
        return self.sums - uniform(self.pattern.shape[-1], causal) > epsilon

    @property
    def from_others(self) -> Sums:
        """Column sums without the query of the key's own position: what hiding the key takes away."""
        return self.sums - self.pattern.diagonal(dim1=-2, dim2=-1)

    def share(self, keys: Keys) -> float:
        """Share of all attention that hiding these keys takes away."""
        return float((self.from_others * keys).sum() / self.from_others.sum())


def loss(model: "Model", canvas: TextCanvas, hooks: Hooks) -> float:
    """Nats per predicted token of a pass with these hooks."""
    return _losses(model, canvas, hooks, canvas.tokens(model)[None])[0]


def losses(
    model: "Model", canvas: TextCanvas, plain: Read, hidden: Bool[Tensor, "variant layer head key"]
) -> list[float]:
    """Nats per predicted token if no query but that of their own position reads the keys that a variant hides.

    Variants run together, from the first layer on that one of them changes.

    Args:
        plain: the pass that hides nothing.
    """
    found = list[float]()
    for some in hidden.split(max(1, TOGETHER // hidden.shape[-1])):
        start = int(some.any(dim=0).flatten(1).any(dim=1).int().argmax())
        stream = plain.stream[start].to(model.cfg.dtype).expand(len(some), -1, -1)
        found += _losses(model, canvas, hiding(some), stream, start)
    return found


@torch.no_grad()
def _losses(model: "Model", canvas: TextCanvas, hooks: Hooks, given: Tensor, start: int | None = None) -> list[float]:
    """Nats per predicted token of each row of a pass over tokens, or over the stream that enters layer `start`."""
    with model.tree.hooks(fwd_hooks=hooks):
        logits = model.tree(given.to(model.cfg.device), start_at_layer=start).cpu()
    at = slice(canvas.start, None) if model.causal else canvas.masked
    late = model.causal or model.family_record.shift  # logits at a position predict the next
    rows = [(row.roll(1, dims=0) if late else row)[at].double() for row in logits]
    return [float(torch.nn.functional.cross_entropy(row, canvas.ids[at])) for row in rows]


def read(model: "Model", canvas: TextCanvas) -> Read:
    """A pass that changes nothing."""
    kept: dict[str, list[Tensor]] = {point: [] for point in POINTS}

    def keep(value: Tensor, hook: "Point") -> None:
        kept[str(hook.name).split(".", 2)[2]].append(value[0].float().cpu())

    found = loss(model, canvas, [(f"blocks.{n}.{point}", keep) for n in range(model.cfg.n_layers) for point in kept])
    return Read(found, *(torch.stack(kept[point]) for point in kept))


def uniform(length: int, causal: bool) -> Float[Tensor, " key"]:
    """The column sums of uniform attention: 1 in a bidirectional model, and less for later keys in a causal one."""
    sees = torch.ones(length, length).tril() if causal else torch.ones(length, length)
    return (sees / sees.sum(dim=-1, keepdim=True)).sum(dim=0)


def hiding(hidden: Bool[Tensor, "variant layer head key"]) -> Hooks:
    """Hooks that hide keys from every query but that of their own position, in every row those of one variant."""
    places = (hidden[..., None, :] & ~torch.eye(hidden.shape[-1], dtype=torch.bool)).unbind(dim=1)

    def hook_of(of_layer: Bool[Tensor, "variant head query key"]) -> Callable[..., Tensor]:
        return lambda value, hook: value.masked_fill(of_layer.to(value.device), -torch.inf)

    return [(f"blocks.{layer}.attn.hook_attn_mask", hook_of(keys)) for layer, keys in enumerate(places) if keys.any()]


def outdating(stale: Keys, earlier: Read) -> Hooks:
    """Hooks that replace keys and values by those of an earlier canvas; a key that several query heads share is stale
    for all of them.
    """
    layers, _, heads, _ = earlier.key.shape
    of_kv_head = stale.reshape(layers, heads, -1, stale.shape[-1]).any(dim=2)  # [layer, kv head, key]

    def hook_of(keys: Bool[Tensor, "kv_head key"], old: Tensor) -> Callable[..., Tensor]:
        return lambda value, hook: torch.where(keys.T[None, :, :, None].to(value.device), old.to(value), value)

    return [
        (f"blocks.{layer}.attn.hook_{point}", hook_of(keys, old[layer]))
        for layer, keys in enumerate(of_kv_head)
        for point, old in (("k", earlier.key), ("v", earlier.value))
    ]


def earlier_canvas(canvas: TextCanvas, age: int, noise: np.random.Generator) -> TextCanvas | None:
    """The canvas with `age` more masks, none of them before its start; None if too few tokens are left to mask."""
    visible = canvas.start + np.flatnonzero(~canvas.masked.numpy()[canvas.start :])
    if len(visible) <= age:
        return None
    masked = canvas.masked.clone()
    masked[torch.from_numpy(noise.choice(visible, age, replace=False))] = True
    return canvas._replace(masked=masked)


def written(model: "Model", read: Read) -> Sums:
    """Norm of every value after the output matrix of every head that reads it, in medians of the head."""
    weights = [block.attn.W_O for block in model.blocks]
    sizes = torch.stack([written_norms(value, weight) for value, weight in zip(read.value, weights, strict=True)])
    return sizes / sizes.median(dim=-1, keepdim=True).values


def at_and_off(values: Sums, keys: Keys) -> tuple[OfHeads, OfHeads]:
    """The mean at `keys` and at the other keys, of each head; NaN for a head that has none."""
    at, off = ((values * part).sum(dim=-1) / part.sum(dim=-1) for part in (keys, ~keys))
    return at, off


def mean_at(values: Sums, keys: Keys) -> OfHeads:
    """The mean at `keys` of each head; NaN for a head that has none."""
    return at_and_off(values, keys)[0]


def log_ratio(values: Sums, keys: Keys) -> OfHeads:
    """log2 of the mean of `values` at `keys` over that at other keys; NaN for a head that lacks either."""
    at, off = at_and_off(values, keys)
    return (at / off).log2()


def difference(values: Sums, keys: Keys) -> OfHeads:
    """The mean of `values` at `keys` minus that at other keys; NaN for a head that lacks either."""
    at, off = at_and_off(values, keys)
    return at - off


def no_ops(written: Sums, sinks: Keys) -> float:
    """Share of the sinks whose value writes less than `NO_OP` medians; NaN without sinks."""
    return float((written[sinks] < NO_OP).double().mean()) if sinks.any() else float("nan")
