"""The kinds and states of the tokens on the canvas of the current step, as `sinklens.sinks.kinds` defines them.

Limitation: a row of an autoregressive batch that has ended keeps the kinds of its tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, TrackError
from sinklens.runs.intervention import RunContext, Snapshot
from sinklens.sinks.kinds import STATES, PlaceState, kind_codes, kinds_of_tokens
from sinklens.sinks.strongest import in_only, needs_text


def kinds_now(run: RunContext, canvas: Snapshot, reason: str) -> Int[Tensor, "batch pos"]:
    """The `Kind` of each position's token.

    Args:
        reason: the setting that needs it, for the error.

    Raises:
        SettingError: the model has no tokenizer.
    """
    ids, masked = (part.cpu().numpy()[:, None] for part in (canvas.ids, canvas.undecided))
    real = run.real[:, : ids.shape[2]].cpu().numpy()
    tokens = np.unique(ids[real[:, None] & (ids >= 0)]).tolist()
    try:
        known = kinds_of_tokens(tokens, run.special, run.vocabulary(tokens))
    except TrackError as error:
        raise SettingError(f"{reason} needs the text of tokens: {error}") from error
    codes = kind_codes(ids, masked, real, run.prompt_length, known)[:, 0]
    return torch.from_numpy(codes.astype(np.int64)).to(canvas.ids.device)


def states_now(run: RunContext, canvas: Snapshot) -> Int[Tensor, "batch pos"]:
    """The `PlaceState` of each position; MISSING on padding and where nothing is decoded yet."""
    ids, masked = canvas.ids, canvas.undecided
    length = ids.shape[1]
    prompt = torch.arange(length, device=ids.device) < run.prompt_length
    codes = torch.where(prompt, int(PlaceState.PROMPT), int(PlaceState.COMMITTED)).expand_as(ids)
    codes = torch.where(masked, int(PlaceState.MASKED), codes)
    return torch.where(run.real[:, :length].to(ids.device) & (ids >= 0), codes, int(PlaceState.MISSING))


def of_kind(names: Sequence[str], run: RunContext, canvas: Snapshot, reason: str) -> Bool[Tensor, "batch pos"]:
    """Positions whose state or token kind is among `names`, which may begin with "not "."""
    states = states_now(run, canvas).cpu().numpy()
    by_state = {name: states == int(PlaceState[name.upper()]) for name in STATES}
    codes = kinds_now(run, canvas, reason).cpu().numpy() if needs_text(names) else None
    keep = in_only(names, by_state, codes) & (states != int(PlaceState.MISSING))
    return torch.from_numpy(keep).to(canvas.ids.device)
