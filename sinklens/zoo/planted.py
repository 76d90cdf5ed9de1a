"""A checkpoint whose sinks are known: every weight is set by hand, none is trained.

`planted_checkpoint` writes it, in the public LLaDA layout; `planted_sinks` and `planted_scores` say where its sinks are
and what every head's column sums are, from the tokens alone. Whatever finds, masks or draws sinks can be held to that.

*Channels* of the residual stream (64, of which 24 stay 0). An embedding holds

    START    2^10 for the start token, else 0: a massive activation, which the norm turns into 8 and all else into 0
    PRESENT  1 for every other token
    MASK, NEWLINE, WORD   1 for the mask token, the newline, or any other token but these two and the start token
    CODE     32 channels of ±1/4, the binary digits of the token's number

so that all tokens but the start token have the RMS 1/4 and enter layer 0 as 4 times their embedding. Layer 0 adds

    PREV, NEXT   1 where the token before, or after, is the mask token, else −1 (the first token is its own predecessor,
                 the last its own successor)
    AWAY         2^−10 of the share of *fading*'s attention that is not on the start token: grows with the distance from
                 it, and is 2^−10 without one

so that they enter layer 1 with the RMS √6/8, all of them again (AWAY changes it by less than 1e-7).

*Heads.* Every query is the same constant but for its rotation, PRESENT + START / 2 = 4; scores are q · k / √16. Rotary
pair i turns by ω_i = 4^−i per position: pair 7 stands nearly still and asks what a key is, pairs 0 to 4 ask where.

    place     name      score of key k for query q                                 the sink, and its column sum
    layer 0
      head 0  start     32 · [k is the start token]                                the start token: S
      head 1  previous  64 · Σ_{i<5} cos(ω_i (q − 1 − k))                          none: at most 2
      head 2  next      64 · Σ_{i<5} cos(ω_i (q + 1 − k))                          none: at most 2
      head 3  fading    16 · (cos(ω_4 δ) / 2 − 7/8 sin(ω_4 δ)), δ = q − k, if k    the start token: falls with q
                        is the start token, else 0
    layer 1
      head 0  frontier  16 · (2 MASK − PREV − ONE)                                 first mask token of a stretch: S
      head 1  edge      16 · (NEXT + ONE − 2 MASK)                                 last token before a stretch: S
      head 2  newline   32 · NEWLINE                                               the newline: S
      head 3  uniform   0                                                          none: 1 everywhere

ONE is PRESENT + 2^−10 START: 1 for every token, before the norm. S is the number of real tokens. Where n keys fit, each
gets S / n (but for what pair 7 turns: a key 255 positions away scores 0.004 less); where none does, attention is
uniform. The second best key of *previous* and *next* is 31 behind, that of the others 32 (of *fading*, as its formula
tells): all other keys together get less than 1e-10 of the attention, up to 256 positions.

*Values.* In *start*, the start token's is 0: a no-op sink. In *fading* it is 1/√2 of the others'; in all other heads
the norms are equal. *previous*, *next* and *fading* write PREV, NEXT and AWAY; the others write nothing, so that
removing them changes no logit. The MLPs are zero.

*Order.* The logit of `ANSWER` is PRESENT − 2^10 AWAY + 2 MASK − PREV, over the RMS; all others are 0. So the most
confident position is the frontier, then the one behind it, and so on: decoding goes from left to right, and with one
token per step the sinks of *frontier* and *edge* move by one position each step.

One way this fails: the start token drowns what it is told, so it is no edge where masks follow it at once, and *edge*
is then nearly uniform; nor may the first token be masked. AWAY differs little between neighbours, in bfloat16 often not
at all, so there decode one token per step. And interventions on layer 0 change what layer 1 sees.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.checkpoints.files import find_checkpoint
from sinklens.zoo.export import write_checkpoint
from sinklens.zoo.recipes import Recipe
from sinklens.zoo.tokenizer import MASK as MASK_TOKEN
from sinklens.zoo.tokenizer import START as START_TOKEN
from sinklens.zoo.training import build_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE = Recipe("planted", "masked", d_model=64, n_layers=2, n_heads=4, d_mlp=16, context=256)
ANSWER, NEWLINE_TOKEN = "Ġ1", "Ċ"  # " 1" and "\n" as byte-level BPE spells them
D_HEAD = 16
TURNS = tuple(4.0**-pair for pair in range(D_HEAD // 2))  # radians per position, of each rotary pair
ROPE_THETA = 4.0 ** (D_HEAD // 2)  # which gives these turns
PLACING, FADING, STILL = range(5), 4, 7  # rotary pairs that ask where a key is, how far the start token, what a key is

START, PRESENT, MASK, NEWLINE, WORD, PREV, NEXT, AWAY = range(8)
CODE = range(32, 64)
MASSIVE = 2.0**10
PRESENCE = {PRESENT: 1.0, START: 0.5}  # 4 for every token that enters layer 0
ONE = {PRESENT: 1.0, START: 1 / MASSIVE}  # 1 for every token, over its RMS

Reads = dict[int, float]  # channel of the stream -> weight


class Head(NamedTuple):
    """A head's weights.

    Attributes:
        query, key, value: dimension of the head -> what it reads of the stream.
        writes: channel -> what it gets of the head's output, by dimension.
    """

    query: Mapping[int, Reads] = {}
    key: Mapping[int, Reads] = {}
    value: Mapping[int, Reads] = {0: PRESENCE}
    writes: Mapping[int, Reads] = {}


def _times(reads: Reads, factor: float | int) -> Reads:
    return {channel: weight * factor for channel, weight in reads.items()}


def _drawn(what: Reads) -> Head:
    """Attends to the keys for which `what` is large."""
    return Head(query={STILL: _times(PRESENCE, 2)}, key={STILL: what})


def _beside(distance: int, writes: int) -> Head:
    """Attends to the key at `distance` and tells whether that is the mask token: (4 · 4) · (4 · 4) / √16 = 64."""
    ahead = {pair: distance * TURNS[pair] for pair in PLACING}
    first = {pair: _times(PRESENCE, 4 * math.cos(angle)) for pair, angle in ahead.items()}
    second = {pair + D_HEAD // 2: _times(PRESENCE, 4 * math.sin(angle)) for pair, angle in ahead.items()}
    return Head(
        query=first | second,
        key={pair: _times(PRESENCE, 4) for pair in PLACING},
        value={0: PRESENCE, 1: _times(PRESENCE, -1) | {MASK: 2.0}},
        writes={writes: {1: 0.25}},
    )


_FADING = Head(
    query={FADING: _times(PRESENCE, 0.5), FADING + D_HEAD // 2: _times(PRESENCE, 0.875)},
    key={FADING: {START: 2.0}},
    value={0: PRESENCE, 1: {PRESENT: 1.0}},
    writes={AWAY: {1: 2**-12}},
)
HEADS: Mapping[str, tuple[int, int]] = {
    "start": (0, 0),
    "previous": (0, 1),
    "next": (0, 2),
    "fading": (0, 3),
    "frontier": (1, 0),
    "edge": (1, 1),
    "newline": (1, 2),
    "uniform": (1, 3),
}
_WEIGHTS: Mapping[str, Head] = {
    "start": _drawn({START: 2.0})._replace(value={0: {PRESENT: 1.0}}),
    "previous": _beside(-1, writes=PREV),
    "next": _beside(1, writes=NEXT),
    "fading": _FADING,
    "frontier": _drawn({MASK: 6.0, PREV: -3.0} | _times(ONE, -3)),
    "edge": _drawn({NEXT: 3.0, MASK: -6.0} | _times(ONE, 3)),
    "newline": _drawn({NEWLINE: 6.0}),
    "uniform": Head(),
}
_LOGIT: Reads = {PRESENT: 1.0, AWAY: -(2.0**10), MASK: 2.0, PREV: -1.0}


def planted_checkpoint(folder: str | Path) -> Path:
    """Write the checkpoint, and give back its folder, for ``sinklens.load``.

    Layout, tokenizer and default lengths are those of tiny-llada; weights are stored in bfloat16.

    Args:
        folder: where the checkpoint goes; made if missing.
    """
    tokenizer = make_tokenizer(SHAPE)
    tokens = tokenizer.get_vocab()
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # building a model draws weights
        model = build_model(SHAPE, tokenizer)
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.copy_(_embeddings(tokens))
        _fill(model.get_output_embeddings().weight, {tokens[ANSWER]: _LOGIT})
        for name, head in _WEIGHTS.items():
            _plant(model, *HEADS[name], head)
        written = write_checkpoint(SHAPE, model.state_dict(), Path(folder))
    config = json.loads((written / "config.json").read_text()) | {"rope_theta": ROPE_THETA}
    (written / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return written


def _embeddings(tokens: Mapping[str, int]) -> Float[Tensor, "vocab d_model"]:
    """What enters the stream for each token."""
    numbers = torch.arange(len(tokens))
    made = torch.zeros(len(tokens), SHAPE.d_model)
    digits = numbers[:, None] >> torch.arange(len(CODE)) % 10 & 1
    made[:, CODE.start : CODE.stop] = (digits * 2 - 1) / 4
    made[:, [PRESENT, WORD]] = 1.0
    for text, channel in ((MASK_TOKEN, MASK), (NEWLINE_TOKEN, NEWLINE)):
        made[tokens[text], [channel, WORD]] = torch.tensor([1.0, 0.0])
    made[tokens[START_TOKEN], [START, PRESENT, WORD]] = torch.tensor([MASSIVE, 0.0, 0.0])
    return made


def _plant(model: "PreTrainedModel", layer: int, head: int, weights: Head) -> None:
    """Write one head's weights into `model`."""
    attention: Any = model.get_submodule(f"model.layers.{layer}.self_attn")
    here = slice(head * D_HEAD, (head + 1) * D_HEAD)
    _fill(attention.q_proj.weight[here], weights.query)
    _fill(attention.k_proj.weight[here], weights.key)
    _fill(attention.v_proj.weight[here], weights.value)
    _fill(attention.o_proj.weight[:, here], weights.writes)


def _fill(matrix: Float[Tensor, "row column"], rows: Mapping[int, Reads]) -> None:
    for row, reads in rows.items():
        for column, weight in reads.items():
            matrix[row, column] = weight


# --- what is true of it, from the tokens alone -----------------------------------------------------------------------


def planted_sinks(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Bool[xr.DataArray, "batch step layer head pos"]:
    """True where a planted head has its sink, as a detector would answer.

    Heads without a sink (*previous*, *next*, *uniform*; the others where no token fits) are False everywhere.

    Args:
        token_id: the ids that enter each step: ``track.data["token_id"]``, or ``run.canvas[:, :-1]``.
        real: False on padding, which is on the left.
    """
    start, newline, masked = (token_id == _numbers()[text] for text in (START_TOKEN, NEWLINE_TOKEN, MASK_TOKEN))
    exists = np.broadcast_to(real[:, None], token_id.shape)
    first = exists & (np.cumsum(exists, axis=-1) == 1)
    before = np.where(first, masked, np.roll(masked, 1, axis=-1))
    after = np.roll(masked, -1, axis=-1)
    after[..., -1] = masked[..., -1]
    by_name = {
        "start": start,
        "fading": start,
        "frontier": masked & ~before,
        "edge": ~masked & ~start & after,
        "newline": newline,
    }
    found = np.zeros((*token_id.shape[:2], SHAPE.n_layers, SHAPE.n_heads, token_id.shape[2]), dtype=bool)
    for name, where in by_name.items():
        layer, head = HEADS[name]
        found[:, :, layer, head] = where & exists
    return _labelled(found)


def planted_paths(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Int[xr.DataArray, "batch step layer head"]:
    """Position of each head's sink at each step, the first of several; -1 where it has none.

    Args:
        token_id, real: as in `planted_sinks`.
    """
    found = planted_sinks(token_id, real)
    return found.argmax("pos").where(found.any("pos"), -1)


def planted_scores(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Float[xr.DataArray, "batch step layer head pos"]:
    """What ``track.scores()`` is in exact arithmetic but for less than 1e-6; NaN on padding.

    A head with n sinks gives S / n to each, one whose sink is missing gives 1 to every key. *previous* and *next* give
    1 to every key but 2 to the first (last) and 0 to the last (first); *fading* is a softmax of its scores.

    Args:
        token_id, real: as in `planted_sinks`.
    """
    found = planted_sinks(token_id, real).to_numpy()
    exists = np.broadcast_to(real[:, None, None, None], found.shape)
    number, size = found.sum(-1, keepdims=True), exists.sum(-1, keepdims=True)
    scores = np.where(number > 0, found * size / np.maximum(number, 1), 1.0)
    order = np.cumsum(exists[:, :, 0, 0], axis=-1) * exists[:, :, 0, 0]  # from 1; 0 on padding
    first, last = order == 1, order == order.max(-1, keepdims=True)
    scores[:, :, *HEADS["previous"]] = 1.0 + first - last
    scores[:, :, *HEADS["next"]] = 1.0 + last - first
    scores[:, :, *HEADS["fading"]] = _faded(found[:, :, *HEADS["fading"]], exists[:, :, 0, 0])
    return _labelled(np.where(exists, scores, np.nan))


def _faded(
    start: Bool[np.ndarray, "batch step key"], exists: Bool[np.ndarray, "batch step key"]
) -> Float[np.ndarray, "batch step key"]:
    """Column sums of the head *fading*, by its formula."""
    places = np.arange(start.shape[-1])
    angle = (places[:, None] - places) * TURNS[FADING]
    scores = 16 * (np.cos(angle) / 2 - 7 / 8 * np.sin(angle)) * start[..., None, :]
    weights = np.exp(scores) * exists[..., None, :]
    return (weights / weights.sum(-1, keepdims=True) * exists[..., :, None]).sum(-2)


@cache
def _numbers() -> dict[str, int]:
    """The tokens' numbers, from the tokenizer of tiny-llada, which is the same."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(find_checkpoint("tiny-llada", None) / "tokenizer.json")).get_vocab()


def _labelled(values: np.ndarray) -> xr.DataArray:
    """With the axes and numbers of a track."""
    dims = ("batch", "step", "layer", "head", "pos")
    return xr.DataArray(
        values, dims=dims, coords={name: np.arange(values.shape[dims.index(name)]) for name in dims[1:]}
    )
