"""The kinds and states of the tokens that are sinks: newlines, punctuation, masks, end tokens, words.

Each place (row, step, position) of a track has one `Kind`, from its token's text and position, and one `PlaceState`:
part of the prompt, still masked, or committed before the step began. Places that do not exist (padding, tokens that an
autoregressive run has not decoded yet, and every place of a row after its end) are MISSING and never counted.

Whether sinks prefer a kind needs a baseline: on a canvas full of masks most sinks are masks, preferred or not. So
`enrichment` compares the share of a kind among the sinks with its share among the positions.

Pitfall: the shares are pooled over the steps. Where early steps have both more masks and more sinks of any kind, masks
look preferred although they are not at any single step; ``matched`` compares within each step instead. Positions differ
as well: most sinks are near the start of the prompt, where no masks are. `sinklens.analyses.matching` compares within
steps, states and positions.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.errors import TrackError, require
from sinklens.sinks.detectors import Detector
from sinklens.sinks.track import SinkTrack


class Kind(IntEnum):
    """Kinds of tokens. The first one that fits applies, in this order:

    MISSING: padding, not decoded yet, or in a row that has ended. MASK: undecided. START: a beginning-of-text token, or
    an end token at the row's first position. FILLING: an end token of the answer after the first end token that the
    answer has on this step's canvas. END: any other end-of-sequence token. MARKUP: any other special token, or text
    such as ``<|start_header_id|>`` and ``[INST]``. NEWLINE: white space with a line break. SPACE: other white space, or
    empty text. PUNCTUATION: no letter or number, so also ``+`` and ``####``. DIGIT: only numbers, ignoring surrounding
    white space. WORD: the rest, and pieces of a character, which decode to U+FFFD.
    """

    MISSING = -1
    NEWLINE = 0
    SPACE = 1
    PUNCTUATION = 2
    DIGIT = 3
    MASK = 4
    START = 5
    END = 6
    FILLING = 7
    MARKUP = 8
    WORD = 9


class PlaceState(IntEnum):
    """The state of a place when the step began.

    MISSING: as in `Kind`. MASKED: undecided. PROMPT: given. COMMITTED: decided at an earlier step.
    """

    MISSING = -1
    PROMPT = 0
    MASKED = 1
    COMMITTED = 2


STATES = tuple(state.name.lower() for state in PlaceState if state is not PlaceState.MISSING)
"""Names of the states of places that exist."""


_MARKUP = re.compile(r"<\|.+\|>|\[/?INST\]|<</?SYS>>|<(start|end)_of_turn>")
_READABLE = str.maketrans({" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"})


@lru_cache(maxsize=65_536)
def text_kind(text: str) -> Kind:
    r"""The kind of a token that is not special, from its decoded text alone.

    >>> [text_kind(text).name for text in ("\n\n", " ", ".", " 12", " Tom", "<|eot_id|>")]
    ['NEWLINE', 'SPACE', 'PUNCTUATION', 'DIGIT', 'WORD', 'MARKUP']
    """
    bare = text.strip()
    if _MARKUP.fullmatch(bare):
        return Kind.MARKUP
    if not bare:
        return Kind.NEWLINE if "\n" in text or "\r" in text else Kind.SPACE
    groups = {unicodedata.category(character)[0] for character in bare}  # L letter, M mark on a letter, N number
    if "\N{REPLACEMENT CHARACTER}" in bare:
        return Kind.WORD
    if not groups & {"L", "M", "N"}:
        return Kind.PUNCTUATION
    return Kind.DIGIT if groups == {"N"} else Kind.WORD


def token_kinds(track: SinkTrack) -> dict[int, Kind]:
    """The kind of every token id that occurs in `track`, regardless of position; never MISSING or FILLING.

    Raises:
        TrackError: a token without text (the model has no tokenizer) that is not special.
    """
    occurring = np.unique(track.data["token_id"].to_numpy()[_existing(track)]).tolist()
    return kinds_of_tokens(occurring, track.special, track.vocabulary)


def kinds_of_tokens(
    tokens: Sequence[int], special: Mapping[str, Sequence[int]], vocabulary: Mapping[int, str]
) -> dict[int, Kind]:
    """The kind of each of `tokens`, as in `token_kinds`, from the ids of special tokens and the texts of the others.

    Raises:
        TrackError: a token without text that is not special.
    """
    kinds: dict[int, Kind] = {}
    for kind, name in ((Kind.MARKUP, "markup"), (Kind.START, "start"), (Kind.END, "end"), (Kind.MASK, "mask")):
        kinds |= dict.fromkeys(special.get(name, ()), kind)
    for word in special.get("words", ()):
        if word in vocabulary:
            kinds.pop(word)
    if unknown := [token for token in tokens if token not in kinds and token not in vocabulary]:
        raise TrackError(
            f"token {unknown[0]} has no text, so its kind is unknown (no text for {len(unknown)} of "
            f"{len(tokens)} tokens); record the run with a model that has a tokenizer, or use by='state'."
        )
    return {token: kinds[token] if token in kinds else text_kind(vocabulary[token]) for token in tokens}


def kinds(track: SinkTrack) -> Int[xr.DataArray, "batch step pos"]:
    """The `Kind` of every place, as an integer code: ``kinds(track) == Kind.NEWLINE``.

    An end token at the row's first position begins the text (in many models one token does both), so it is START.

    Raises:
        TrackError: see `token_kinds`.
    """
    token_id, masked = track.data["token_id"].to_numpy(), track.data["masked"].to_numpy()
    codes = kind_codes(token_id, masked, track.data["is_real"].to_numpy(), track.prompt_length, token_kinds(track))
    return _coded(np.where(_existing(track), codes, Kind.MISSING))


def kind_codes(
    token_id: Int[np.ndarray, "batch step pos"],
    masked: Bool[np.ndarray, "batch step pos"],
    real: Bool[np.ndarray, "batch pos"],
    prompt_length: int,
    known: Mapping[int, Kind],
) -> Int[np.ndarray, "batch step pos"]:
    """The `Kind` of every place, from the kind of each token in `known`; MISSING for other tokens."""
    answer = np.arange(token_id.shape[2]) >= prompt_length
    ids, place = np.unique(token_id, return_inverse=True)
    codes = np.array([known.get(int(one), Kind.MISSING) for one in ids], dtype=np.int8)[place].reshape(token_id.shape)
    first = np.arange(token_id.shape[2]) == real.argmax(axis=1)[:, None]
    codes[(codes == Kind.END) & first[:, None] & ~answer] = Kind.START
    ends = (codes == Kind.END) & answer
    codes[ends & (ends.cumsum(axis=-1) > 1)] = Kind.FILLING
    codes[masked] = Kind.MASK
    return codes


def states(track: SinkTrack) -> Int[xr.DataArray, "batch step pos"]:
    """The `PlaceState` of every place, as an integer code: ``states(track) == PlaceState.MASKED``."""
    return _coded(state_codes(track.data["masked"].to_numpy(), _existing(track), track.prompt_length))


def state_codes(
    masked: Bool[np.ndarray, "batch step pos"], exists: Bool[np.ndarray, "batch step pos"], prompt_length: int
) -> Int[np.ndarray, "batch step pos"]:
    """The `PlaceState` of every place."""
    decided = np.where(np.arange(masked.shape[2]) < prompt_length, PlaceState.PROMPT, PlaceState.COMMITTED)
    return np.where(exists, np.where(masked, PlaceState.MASKED, decided), PlaceState.MISSING)


def absorption(track: SinkTrack, by: str = "kind") -> Float[xr.DataArray, "batch step layer set"]:
    """Attention that all tokens of a kind receive together, in percent: [batch, step, layer, kind].

    100 · Σ_{j∈set} a[j] / Σ_j a[j], with a[j] the score of position j averaged over the heads. The values sum to 100
    over the sets; a set without positions has 0. NaN where the patterns of all heads of the layer are zero. The last
    axis is named after `by`, and its coordinate holds the kinds in lower case:
    ``absorption(track).sel(kind="newline")``.

    Source: Attention Floating (2601.07894), which takes detected sinks as the set; here the sets are kinds.

    Args:
        by: "kind" or "state".

    Raises:
        TrackError: an unknown `by`, or as in `token_kinds`.
    """
    codes, names = set_codes(track, by)
    received = track.scores().mean("head")
    parts = _per_set(received.fillna(0.0).to_numpy(), codes[:, :, None], len(names))
    percent = 100 * _ratio(parts, parts.sum(axis=-1, keepdims=True))
    coords = {name: received.coords[name] for name in ("step", "layer")}
    return xr.DataArray(percent, dims=("batch", "step", "layer", by), coords={**coords, by: names}, name="absorption")


def enrichment(track: SinkTrack, detector: Detector | None = None, by: str = "kind") -> xr.Dataset:
    """Whether sinks prefer a kind of token: 1 is chance, 2 twice as often, 0 never. Variables [batch, kind]:

    - ``sinks``: detected sinks of the kind, over steps, layers and heads; ``positions``: places where one could occur.
    - ``sink_share``: sinks of the kind / all sinks. ``position_share``: positions of the kind / all positions.
    - ``enrichment``: sink_share / position_share.
    - ``matched_share``: the expected sink_share if the sinks of each step fell on that step's positions at random,
      Σ_t sinks(t) · position_share(t) / Σ_t sinks(t). ``matched``: sink_share / matched_share.

    NaN: shares of sinks in a row without sinks, and ratios of a kind that the row does not have. Rows are independent
    runs, so compute intervals by resampling rows and summing their ``sinks`` and ``positions``.

    Args:
        detector: definition of a sink; by default the paper's.
        by: "kind" or "state".

    Raises:
        TrackError: an unknown `by`, or as in `token_kinds`.
    """
    codes, names = set_codes(track, by)
    found = track.detect(detector)
    heads = found.sizes["layer"] * found.sizes["head"]
    sinks = _per_set(found.sum(("layer", "head")).to_numpy(), codes, len(names))
    places = _per_set(np.ones(codes.shape, dtype=np.int64), codes, len(names))
    at_step = sinks.sum(axis=-1, keepdims=True)
    chance = np.nan_to_num(_ratio(places, places.sum(axis=-1, keepdims=True)))
    sink_share = _ratio(sinks.sum(axis=1), at_step.sum(axis=1))
    position_share = _ratio(places.sum(axis=1), places.sum(axis=(1, 2))[:, None])
    matched_share = _ratio((at_step * chance).sum(axis=1), at_step.sum(axis=1))
    columns = {
        "sinks": sinks.sum(axis=1),
        "positions": places.sum(axis=1) * heads,
        "sink_share": sink_share,
        "position_share": position_share,
        "enrichment": _ratio(sink_share, position_share),
        "matched_share": matched_share,
        "matched": _ratio(sink_share, matched_share),
    }
    return xr.Dataset({name: (("batch", by), values) for name, values in columns.items()}, coords={by: names})


def frequency_table(track: SinkTrack, detector: Detector | None = None) -> "DataFrame":
    """Which tokens are sinks, over all rows, steps, layers and heads: the paper's Table 2 (Rulli et al., 2510.15731).

    One row per token id that occurs, most frequent sinks first. Columns: ``token``, its text, with spaces and breaks as
    ␣ ⏎ ␍ ⇥; ``id``; ``kind``, in lower case, regardless of position (so "end" for FILLING too); ``count``, number of
    sinks on it; ``frequency``, count / all sinks (NaN if there are none); ``position_frequency``, its share of the
    existing positions. frequency / position_frequency is the token's enrichment.

    Args:
        detector: definition of a sink; by default the paper's.

    Raises:
        TrackError: see `token_kinds`.
    """
    known, vocabulary, existing = token_kinds(track), track.vocabulary, _existing(track)
    tokens, place = np.unique(track.data["token_id"].to_numpy()[existing], return_inverse=True)
    found = track.detect(detector).sum(("layer", "head")).to_numpy()[existing]
    count = np.bincount(place, weights=found, minlength=len(tokens)).astype(np.int64)
    positions = np.bincount(place, minlength=len(tokens))
    table = DataFrame(
        {
            "token": [vocabulary.get(int(token), "").translate(_READABLE) for token in tokens],
            "id": tokens,
            "kind": [known[int(token)].name.lower() for token in tokens],
            "count": count,
            "frequency": _ratio(count, count.sum()),
            "position_frequency": _ratio(positions, positions.sum()),
        }
    )
    return table.sort_values(["count", "id"], ascending=[False, True], ignore_index=True)


def _existing(track: SinkTrack) -> np.ndarray:
    """True at places that exist, [batch, step, pos]: not padding, already decoded, in a row that has not ended."""
    exists = track.data["is_real"].to_numpy()[:, None] & (track.data["token_id"].to_numpy() >= 0)
    return exists & track.running.to_numpy()[:, :, None]


def _coded(codes: np.ndarray) -> xr.DataArray:
    return xr.DataArray(codes.astype(np.int8), dims=("batch", "step", "pos"))


def set_codes(track: SinkTrack, by: str) -> tuple[np.ndarray, list[str]]:
    """Codes [batch, step, pos] of the kind or state of every place, −1 where missing, and the names of 0, 1, …

    Raises:
        TrackError: an unknown `by`, or as in `token_kinds`.
    """
    require(by in ("kind", "state"), f"by must be 'kind' or 'state'; got {by!r}.", TrackError)
    codes, enum = (kinds(track), Kind) if by == "kind" else (states(track), PlaceState)
    return codes.to_numpy(), [code.name.lower() for code in enum if code >= 0]


def _per_set(values: np.ndarray, codes: np.ndarray, count: int) -> np.ndarray:
    """Sums of `values` [..., pos] over the positions of each code: [..., set]."""
    return np.stack([np.where(codes == code, values, 0).sum(axis=-1) for code in range(count)], axis=-1)


def _ratio(part: Any, total: Any) -> np.ndarray:
    """`part` / `total`; NaN where `total` is 0, or either is NaN."""
    part, total = np.broadcast_arrays(np.asarray(part, dtype=np.float64), total)
    return np.divide(part, total, out=np.full(part.shape, np.nan), where=total != 0)
