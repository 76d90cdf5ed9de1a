"""A checkpoint whose sinks are known: every weight is set by hand, none is trained.

`planted_checkpoint` writes it in the public LLaDA layout, and `planted_sinks` computes from the tokens alone where its
sinks are. Code that finds, masks or draws sinks can be checked against it.

*Channels* of the residual stream (64, of which 24 stay 0). The embedding sets

    START    2^10 for the start token, else 0: a massive activation, which the norm turns into 8 and the rest into 0
    PRESENT  1 for every other token
    MASK, NEWLINE, WORD   1 for the mask token, for the newline, and for all tokens except these two and the start token
    CODE     32 channels of ±1/4, the binary digits of the token's number

so all tokens except the start token have the RMS 1/4 and enter layer 0 as 4 times their embedding. Layer 0 adds

    PREV, NEXT   1 if the token before (after) is the mask token, else −1 (the first token counts as its own
                 predecessor, the last as its own successor)
    AWAY         2^−10 times the share of *fading*'s attention that is not on the start token; it grows with the
                 distance from the start token and is 2^−10 without a start token

so these tokens enter layer 1 with the RMS √6/8 (AWAY changes it by less than 1e-7).

*Heads.* All queries are the same constant, PRESENT + START / 2 = 4, up to their rotation; scores are q · k / √16.
Rotary pair i rotates by ω_i = 4^−i per position: pair 7 hardly rotates and selects keys by content, pairs 0 to 4 by
position.

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

ONE is PRESENT + 2^−10 START: 1 for every token, before the norm. S is the number of real tokens. If n keys match, each
gets S / n (except for the rotation of pair 7: the score of a key 255 positions away is 0.004 lower); if none matches,
attention is uniform. The second-best key scores 31 less in *previous* and *next*, and 32 less in the other heads (in
*fading*, according to its formula): all other keys together get less than 1e-10 of the attention, up to 256 positions.

*Values.* In *start*, the value of the start token is 0: a no-op sink. In *fading*, its norm is 1/√2 of the others'; in
all other heads, the norms are equal. *previous*, *next* and *fading* write PREV, NEXT and AWAY; the other heads write
nothing, so removing them changes no logit. The MLPs are zero.

*Order.* The logit of `ANSWER` is PRESENT − 2^10 AWAY + 2 MASK − PREV, divided by the RMS; all others are 0. So the most
confident position is the frontier, then the one after it, and so on: decoding goes from left to right, and with one
token per step the sinks of *frontier* and *edge* move by one position per step.

Limitations: in the start token, START outweighs whatever layer 0 adds, so the token is not an edge if masks follow it
immediately, and *edge* is then nearly uniform. The first token must not be masked. AWAY differs little between
neighbors, in bfloat16 often not at all, so decode one token per step there. Interventions on layer 0 change the input
of layer 1.
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

from sinklens.model.files import find_checkpoint
from training.export import write_checkpoint
from training.loop import build_model, make_tokenizer
from training.recipes import Recipe
from training.tokenizer import MASK as MASK_TOKEN
from training.tokenizer import START as START_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPE = Recipe("planted", "masked", d_model=64, n_layers=2, n_heads=4, d_mlp=16, context=256)
ANSWER, NEWLINE_TOKEN = "Ġ1", "Ċ"  # " 1" and "\n" in byte-level BPE
D_HEAD = 16
ROTATIONS = tuple(4.0**-pair for pair in range(D_HEAD // 2))  # radians per position of each rotary pair
ROPE_THETA = 4.0 ** (D_HEAD // 2)  # which gives these rotations
# Rotary pairs that select keys by position, by distance from the start token, and by content
POSITION_PAIRS, DISTANCE_PAIR, CONTENT_PAIR = range(5), 4, 7

START, PRESENT, MASK, NEWLINE, WORD, PREV, NEXT, AWAY = range(8)
CODE = range(32, 64)
MASSIVE = 2.0**10
PRESENCE = {PRESENT: 1.0, START: 0.5}  # 4 for every token that enters layer 0
ONE = {PRESENT: 1.0, START: 1 / MASSIVE}  # 1 for every token, divided by its RMS

Reads = dict[int, float]  # channel of the stream -> weight


class Head(NamedTuple):
    """A head's weights.

    Attributes:
        query, key, value: dimension of the head -> weights on channels of the stream.
        writes: channel of the stream -> weights on dimensions of the head's output.
    """

    query: Mapping[int, Reads] = {}
    key: Mapping[int, Reads] = {}
    value: Mapping[int, Reads] = {0: PRESENCE}
    writes: Mapping[int, Reads] = {}


def _scaled(reads: Reads, factor: float | int) -> Reads:
    return {channel: weight * factor for channel, weight in reads.items()}


def _content_head(reads: Reads) -> Head:
    """A head that attends to the keys for which `reads` is large."""
    return Head(query={CONTENT_PAIR: _scaled(PRESENCE, 2)}, key={CONTENT_PAIR: reads})


def _neighbour_head(distance: int, writes: int) -> Head:
    """A head that attends to the key at `distance` and writes whether it is the mask token.

    The factor of its scores is (4 · 4) · (4 · 4) / √16 = 64.
    """
    ahead = {pair: distance * ROTATIONS[pair] for pair in POSITION_PAIRS}
    first = {pair: _scaled(PRESENCE, 4 * math.cos(angle)) for pair, angle in ahead.items()}
    second = {pair + D_HEAD // 2: _scaled(PRESENCE, 4 * math.sin(angle)) for pair, angle in ahead.items()}
    return Head(
        query=first | second,
        key={pair: _scaled(PRESENCE, 4) for pair in POSITION_PAIRS},
        value={0: PRESENCE, 1: _scaled(PRESENCE, -1) | {MASK: 2.0}},
        writes={writes: {1: 0.25}},
    )


_FADING = Head(
    query={DISTANCE_PAIR: _scaled(PRESENCE, 0.5), DISTANCE_PAIR + D_HEAD // 2: _scaled(PRESENCE, 0.875)},
    key={DISTANCE_PAIR: {START: 2.0}},
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
    "start": _content_head({START: 2.0})._replace(value={0: {PRESENT: 1.0}}),
    "previous": _neighbour_head(-1, writes=PREV),
    "next": _neighbour_head(1, writes=NEXT),
    "fading": _FADING,
    "frontier": _content_head({MASK: 6.0, PREV: -3.0} | _scaled(ONE, -3)),
    "edge": _content_head({NEXT: 3.0, MASK: -6.0} | _scaled(ONE, 3)),
    "newline": _content_head({NEWLINE: 6.0}),
    "uniform": Head(),
}
_LOGIT: Reads = {PRESENT: 1.0, AWAY: -(2.0**10), MASK: 2.0, PREV: -1.0}


def planted_checkpoint(folder: str | Path) -> Path:
    """Write the checkpoint and return its folder, for ``sinklens.load``.

    Layout, tokenizer and default lengths are those of tiny-llada; weights are stored in bfloat16.

    Args:
        folder: where to write the checkpoint; created if missing.
    """
    tokenizer = make_tokenizer(SHAPE)
    tokens = tokenizer.get_vocab()
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # building a model draws random weights
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
    """The embedding of each token."""
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


# --- where the sinks are, from the tokens alone -----------------------------------------------------------------------


def planted_sinks(
    token_id: Int[np.ndarray, "batch step pos"], real: Bool[np.ndarray, "batch pos"]
) -> Bool[xr.DataArray, "batch step layer head pos"]:
    """True where a planted head has its sink, in the format of a detector's result.

    Heads without a sink (*previous*, *next*, *uniform*, and the others if no token matches) are False everywhere.

    Args:
        token_id: the ids at the start of each step: ``track.data["token_id"]``, or ``run.canvas[:, :-1]``.
        real: False on padding, which is on the left.
    """
    start, newline, masked = (token_id == _vocabulary()[text] for text in (START_TOKEN, NEWLINE_TOKEN, MASK_TOKEN))
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
    dims = ("batch", "step", "layer", "head", "pos")
    return xr.DataArray(found, dims=dims, coords={name: np.arange(found.shape[dims.index(name)]) for name in dims[1:]})


@cache
def _vocabulary() -> dict[str, int]:
    """Token -> id, from the tokenizer of tiny-llada, which is the same."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(find_checkpoint("tiny-llada", None) / "tokenizer.json")).get_vocab()
