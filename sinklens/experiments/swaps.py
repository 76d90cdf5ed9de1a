"""Swap tests: the same place of the same canvas with another token of a chosen kind.

Suppose that sinks prefer digits: is it because of the token, or because of the places where digits stand? A *swap*
replaces the token at one place and changes nothing else. If the kind of token makes the sink, a digit replaced by a
word loses its sinks, and a word replaced by a digit gains them. The control is a swap within the kind: a digit replaced
by another digit.

    run = sinklens.generate("tiny-llada", prompts)
    lost, control = swap(run, "digit", "word"), swap(run, "digit", "digit")
    print(lost["sinks_before"].mean(), lost["sinks_after"].mean(), control["sinks_after"].mean())

Pitfall: a canvas with a swapped token can be one that no text has. A swap within the kind shows the effect of that
alone.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import nearest, require
from sinklens.experiments.step_ids import StepIds, exact_step
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs.result import Generation
from sinklens.sinks.detectors import over_others
from sinklens.sinks.kinds import Kind, kinds_of_tokens
from sinklens.utils.arguments import Count, Seed, checked

CHUNK = 32  # canvases per pass
SWAPPED = {kind.name.lower(): kind for kind in (Kind.NEWLINE, Kind.SPACE, Kind.PUNCTUATION, Kind.DIGIT, Kind.MASK,
                                                Kind.WORD)}  # fmt: skip
"""Kinds of token that can be swapped, by name."""


@checked
def swap(
    run: "Generation",
    replace: str,
    by: str,
    *,
    rows: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    count: Count = 4,
    among: Sequence[int] | None = None,
    epsilon: float = 3.0,
    seed: Seed = 0,
) -> xr.Dataset:
    """Replace tokens of one kind by tokens of another, one at a time, and count the sinks at their places.

    Each swap is a separate pass over the canvas of a step. A place is a sink of a head if its column sum exceeds the
    mean of the other keys by more than `epsilon`, before (on the run's canvas) and after.

    Args:
        replace: kind of the replaced tokens, one of `SWAPPED`, anywhere on the canvas.
        by: kind of the new tokens; the same kind is the control. A new token always differs from the old one.
        rows, steps: rows and steps of the run; by default all rows, and the first and last step and those at one and
            two thirds of the run.
        count: number of places to swap on each canvas, drawn at random; all if there are fewer.
        among: ids to draw new tokens from; by default all that occur in the run.
        seed: seed of the draws, for each row by itself.

    Returns:
        Along ``swap``: ``row``, ``step``, ``pos`` (column of the canvas), ``old`` and ``new`` (ids), ``sinks_before``
        and ``sinks_after`` (heads with a sink there, over all layers), ``score_before`` and ``score_after`` (column sum
        there, mean over layers and heads).

    Raises:
        SettingError: an unknown kind; no token of the kind `by`; a row or step that did not run; a model without a
            tokenizer; or a run that separate passes do not reproduce (`exact_step`).
    """
    for kind in (replace, by):
        require(
            kind in SWAPPED, f"no kind {kind!r} can be swapped; known: {', '.join(SWAPPED)}.{nearest(kind, SWAPPED)}"
        )
    known, fresh = kinds_of_vocabulary(run.model), _candidates(run, SWAPPED[by], among)
    last = run.steps_run - 1
    steps = sorted({0, last // 3, 2 * last // 3, last}) if steps is None else steps
    found: list[dict[str, int | float]] = []
    for row in range(len(run.canvas)) if rows is None else rows:
        noise = np.random.default_rng([seed, row])
        for step in steps:
            canvas = exact_step(run, step)
            ids, columns = canvas.row(row), np.array(canvas.columns(row))
            at = np.flatnonzero(known[ids.ids[0].cpu().numpy()] == SWAPPED[replace])
            at = np.sort(noise.choice(at, min(count, len(at)), replace=False)) if len(at) else at
            chosen = []
            for place in at.tolist():
                others = fresh[fresh != int(ids.ids[0, place])]
                chosen += [(place, int(noise.choice(others)))] if len(others) else []
            if chosen:
                made = _swapped(run.model, ids, chosen, epsilon)
                found += [{**one, "row": row, "step": step, "pos": int(columns[int(one["pos"])])} for one in made]
    names = ("row", "step", "pos", "old", "new", "sinks_before", "sinks_after", "score_before", "score_after")
    return xr.Dataset({name: ("swap", np.array([one[name] for one in found])) for name in names})


def _swapped(
    model: "Model", canvas: StepIds, chosen: Sequence[tuple[int, int]], epsilon: float
) -> list[dict[str, int | float]]:
    """What each swap (place, new id) of one canvas does."""
    edited = canvas.ids.repeat(len(chosen) + 1, 1)
    for number, (place, new) in enumerate(chosen):
        edited[number + 1, place] = new
    scores = column_sums(model, edited, time=canvas.time)[:, 0]
    named = xr.DataArray(scores, dims=("canvas", "layer", "head", "pos"))
    sinks = (named - over_others(named) > epsilon).to_numpy()
    return [
        {
            "pos": place, "old": int(canvas.ids[0, place]), "new": new,
            "sinks_before": int(sinks[0, ..., place].sum()), "sinks_after": int(sinks[number, ..., place].sum()),
            "score_before": float(scores[0, ..., place].mean()),
            "score_after": float(scores[number, ..., place].mean()),
        }
        for number, (place, new) in enumerate(chosen, 1)
    ]  # fmt: skip


@torch.no_grad()
def column_sums(
    model: "Model",
    canvases: Int[Tensor, "canvas pos"],
    first: Int[np.ndarray, "canvas sum"] | None = None,
    time: Float[Tensor, " 1"] | None = None,
) -> Float[np.ndarray, "canvas sum layer head pos"]:
    """Column sums in separate passes over canvases without padding, Σ_{i ≥ first} A[i, j].

    Args:
        first: for each canvas, the first query of each of its sums; by default one sum over all queries.
        time: noise level, for networks that read one.
    """
    start = np.zeros((len(canvases), 1), dtype=int) if first is None else first
    later = torch.arange(canvases.shape[1]) >= torch.from_numpy(start)[..., None]
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    kept: dict[str, Tensor] = {}

    def keep(pattern: Float[Tensor, "canvas head query key"], hook: "Point") -> None:
        kept[str(hook.name)] = torch.einsum("bhqk,bsq->bshk", pattern.float(), members.to(pattern).float()).cpu()

    parts = []
    with model.tree.hooks(fwd_hooks=[(name, keep) for name in names]):
        for begin in range(0, len(canvases), CHUNK):
            some, members = canvases[begin : begin + CHUNK], later[begin : begin + CHUNK]
            model.tree.hidden(some.to(model.cfg.device), time=None if time is None else time.expand(len(some)))
            parts.append(np.stack([kept[name].numpy() for name in names], axis=2))
    return np.concatenate(parts)


def kinds_of_vocabulary(model: "Model") -> Int[np.ndarray, " vocab"]:
    """The `Kind` of every id of a model's vocabulary, regardless of position; never MISSING or FILLING.

    Raises:
        SettingError: the model has no tokenizer.
    """
    require(
        model.tokenizer is not None,
        f"{model.name} has no tokenizer, so the kinds of its tokens are unknown; load it with one.",
    )
    return _kinds_of(model.tokenizer, model.cfg.d_vocab, repr(model.special_tokens))


@lru_cache(maxsize=8)
def _kinds_of(tokenizer: object, size: int, special: str) -> Int[np.ndarray, " vocab"]:
    import ast

    ids = range(size)
    texts = {token: str(tokenizer.decode([token])) for token in ids}  # type: ignore[attr-defined]
    kinds = kinds_of_tokens(list(ids), ast.literal_eval(special), texts)
    return np.array([int(kinds[token]) for token in ids])


def _candidates(run: "Generation", kind: Kind, among: Sequence[int] | None) -> Int[np.ndarray, " id"]:
    """Ids of the kind that occur in the run, or of those given."""
    if kind is Kind.MASK and run.model.mask_token_id is not None:
        return np.array([run.model.mask_token_id])
    seen = run.canvas[run.canvas >= 0].unique().tolist() if among is None else list(among)
    known = kinds_of_vocabulary(run.model)
    found = np.array([token for token in seen if known[token] == kind], dtype=int)
    require(
        len(found),
        f"{'the run' if among is None else 'among'} has no token of the kind {kind.name.lower()} to put in place; "
        f"give ids of that kind (among=).",
    )
    return found
