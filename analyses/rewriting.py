"""A control for just decided tokens in the study `events`: other tokens whose embedding changes as much.

A step that decides a token changes the model's input at this position only, from the embedding of the mask to that of
the token. So no other position of a run matches it in the size of this change, and a matched control has to be made:
the canvas of the step before, with the decided token *written over* an answer token that was decided earlier. Chosen is
the one at which ‖e(new) − e(old)‖ is nearest to ‖e(new) − e(mask)‖.

Caveat: a token written over another seldom fits its text, which can change attention for other reasons than the size of
the change.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.sinks import SinkTrack

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model

CHUNK = 16  # canvases per pass
CHANGES = {
    "change_just": "length of the change of the embedding at tokens decided by the previous step",
    "change_written": "the same where these tokens are written over earlier ones",
}
WRITTEN = ("written_landed_at", "written_at_risk_at")


class Rewritten(NamedTuple):
    """A canvas in which tokens decided earlier are replaced by just decided ones.

    Attributes:
        step: the step after the one that decided them.
        places: where they are written.
        ids: the canvas of the step before, with them.
        just, written: changes of the embedding where they were decided, and where they are written.
    """

    step: int
    places: list[int]
    ids: Int[Tensor, " pos"]
    just: float
    written: float


def embedding_change(
    model: "Model", before: Int[Tensor, " pos"], after: Int[Tensor, " pos"]
) -> Float[np.ndarray, " pos"]:
    """‖e(after) − e(before)‖ at every position."""
    table = model.tree.W_E
    with torch.no_grad():
        change = table[after.to(table.device)] - table[before.to(table.device)]
        return change.float().norm(dim=-1).cpu().numpy()


def nearest_changes(wanted: Sequence[float], sizes: Float[np.ndarray, " place"]) -> list[int]:
    """For each wanted size in turn, the place of the nearest size that is not taken; places of size 0 or NaN are not
    taken, and the list is shorter if there are no more.
    """
    found: list[int] = []
    left = np.where(sizes > 0, sizes, np.inf)
    for size in wanted:
        place = int(np.abs(left - size).argmin()) if len(left) else 0
        if len(left) and left[place] < np.inf:
            found.append(place)
            left[place] = np.inf
    return found


def written_over(model: "Model", track: SinkTrack) -> xr.Dataset:
    """Landings on just decided tokens that are written over earlier ones, as in `events.landings`.

    Returns:
        ``written_landed_at`` and ``written_at_risk_at`` [prompt, step, place], NaN elsewhere: the heads whose strongest
        key is this place of the rewritten canvas, and those that had another on the canvas of the step before.
        `CHANGES` [prompt], means over steps.
    """
    masked = track.data["masked"]
    shape = (masked.sizes["batch"], masked.sizes["step"], masked.sizes["pos"])
    landed, at_risk, changes = np.full(shape, np.nan), np.full(shape, np.nan), np.full((2, shape[0]), np.nan)
    for row in range(shape[0]):
        ids = torch.from_numpy(track.data["token_id"][row].to_numpy().astype(np.int64))
        real = np.flatnonzero(track.data["is_real"][row].to_numpy())
        masks, decided = (track.data[name][row].to_numpy()[:, real] for name in ("masked", "committed"))
        found = rewritten(model, ids[:, real], masks, decided, real >= track.prompt_length)
        if not found:
            continue
        before = strongest_keys(model, torch.stack([ids[one.step - 1, real] for one in found]))
        after = strongest_keys(model, torch.stack([one.ids for one in found]))
        for one, old, new in zip(found, before, after, strict=True):
            for place in one.places:
                at_risk[row, one.step, real[place]] = (old != place).sum()
                landed[row, one.step, real[place]] = ((old != place) & (new == place)).sum()
        changes[:, row] = np.mean([(one.just, one.written) for one in found], axis=0)
    answer = slice(track.prompt_length, None)
    return xr.Dataset(
        {
            name: (("prompt", "step", "place"), value[..., answer].astype(np.float32))
            for name, value in zip(WRITTEN, (landed, at_risk), strict=True)
        }
        | {name: ("prompt", value) for name, value in zip(CHANGES, changes, strict=True)}
    )


def rewritten(
    model: "Model",
    ids: Int[Tensor, "step pos"],
    masked: Bool[np.ndarray, "step pos"],
    committed: Bool[np.ndarray, "step pos"],
    answer: Bool[np.ndarray, " pos"],
) -> list[Rewritten]:
    """The canvases of one row without padding, for the steps that see a just decided token and earlier ones."""
    found = []
    for step in range(1, len(ids)):
        before, now = ids[step - 1], ids[step]
        just = np.flatnonzero(committed[step - 1] & answer & (now >= 0).numpy())
        earlier, canvas, sizes = answer & ~masked[step - 1] & (before >= 0).numpy(), before.clone(), []
        for source in just:
            change = embedding_change(model, before, now[source].expand_as(before))
            places = nearest_changes([float(change[source])], np.where(earlier, change, 0))
            for place in places:
                earlier[place], canvas[place] = False, now[source]
                sizes.append((place, change[source], change[place]))
        if sizes:
            chosen, here, there = zip(*sizes, strict=True)
            found.append(Rewritten(step, list(chosen), canvas, float(np.mean(here)), float(np.mean(there))))
    return found


@torch.no_grad()
def strongest_keys(model: "Model", canvases: Int[Tensor, "canvas pos"]) -> Int[np.ndarray, "canvas layer head"]:
    """The key with the largest column sum, in separate passes over canvases without padding."""
    found: dict[str, Tensor] = {}

    def keep(pattern: Tensor, hook: "Point") -> None:
        found[str(hook.name)] = pattern.float().sum(dim=-2).argmax(dim=-1).cpu()

    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    parts = []
    with model.tree.hooks(fwd_hooks=[(name, keep) for name in names]):
        for start in range(0, len(canvases), CHUNK):
            model.tree.hidden(canvases[start : start + CHUNK].to(model.cfg.device))
            parts.append(np.stack([found[name].numpy() for name in names], axis=1))
    return np.concatenate(parts)
