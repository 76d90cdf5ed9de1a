"""Where a mixture of experts sends the tokens that are sinks, for the study `kinds`.

A position is a sink of a layer at a step if it is one in any of the layer's heads; attention comes before the experts,
so its routing in that layer can follow from what made it a sink. Sinks are compared with the other positions of the
same prompt, step, state (prompt, undecided, decided) and token kind; and with those of the same prompt, step, state and
token: a kind has many tokens, and the experts of the first layers follow the token. In a stratum with n sinks and m
others, their mean choices of experts count with weight n m / (n + m). Sinks without others to compare with drop out;
`matched_share` is the share that remains.

- ``distance``: total variation distance of the two distributions over experts, ½ Σ_e |p_e − q_e|, pooled over prompts.
  It is above 0 even for equal distributions, so it comes with the mean distance of 1,000 random sign changes, prompt by
  prompt, of the difference p − q (``chance``), and the share of them that is at least as far (``p``).
- ``top_difference``: how much more often sinks are sent to the expert that sinks prefer *in the other prompts*. Without
  a preference it is 0 on average, since a prompt has no part in the choice of its expert.

Caveat: sinks persist over steps, and so do their routes. Steps are therefore not counted as independent: intervals and
random changes are over prompts, or over groups of prompts if there are several. Few groups have few sign changes, so p
is at least 2 / 2^k with k groups.
"""

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.intervals import Interval, interval_rows, mean_interval, p_value, pooled
from sinklens.analyses.strata import groups_of
from sinklens.sinks import SinkTrack
from sinklens.sinks.kinds import set_codes

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model

ROUTING = {
    "distance": "total variation distance of the experts of sinks and of matched positions",
    "chance": "mean of the same distance under random sign changes, prompt by prompt",
    "top_difference": "share of sinks − of matched positions at the expert that sinks prefer in other prompts",
    "matched_share": "share of the sinks that have matched positions",
}
ROWS = ("model", "measure", "estimate", "low", "high", "prompts", "layer", "matched", "p", "meaning")
"""Columns of the table."""
MATCHED = {"kind": "step, state, kind", "token": "step, state, token"}
"""What positions of one prompt must share: value of the axis ``match`` -> value of the column ``matched``."""
COLUMNS = ("routed_sinks", "routed_others", "routed_weight", "routed_share")
CHANGES = 1000


class Routes:
    """Collects the chosen experts of every position at every step and layer of a run."""

    def __init__(self, model: "Model") -> None:
        self._layers, self._columns = model.cfg.n_layers, 0
        self._seen: dict[tuple[int, int], Int[np.ndarray, "batch pos k"]] = {}
        self._first: dict[tuple[int, int], int] = {}
        self._points = [name for name in model.hook_names() if name.endswith("mlp.hook_expert_indices")]

    @property
    def hooks(self) -> list[tuple[str, Any]]:
        """Hooks to pass to the run; none for a model without experts. A canvas model's encoder is left out."""
        points = [(name, self._keep) for name in self._points if name.startswith("blocks.")]
        return [("denoise.hook_canvas", self._begin), *points] if points else []

    def _begin(self, canvas: Int[Tensor, "batch pos"], hook: "Point") -> None:
        self._columns = canvas.shape[1]

    def _keep(self, indices: Int[Tensor, "batch pos k"], hook: "Point") -> None:
        place = hook.step or 0, hook.layer()
        self._seen[place] = indices.cpu().numpy()
        self._first[place] = self._columns - indices.shape[1]  # a pass over a canvas covers the end of the text

    def chosen(
        self, own: Bool[np.ndarray, "batch step"], length: int
    ) -> Int[np.ndarray, "batch step layer pos k"] | None:
        """The experts, active steps of each row first (see `active_steps`); -1 where nothing was routed. None without
        experts.
        """
        if not self._seen:
            return None
        every = next(iter(self._seen.values()))
        found = np.full((*own.shape, self._layers, length, every.shape[2]), -1)
        for (step, layer), value in self._seen.items():
            first = self._first[step, layer]
            found[:, step, layer, first : first + value.shape[1]] = value[: len(own)]
        order = np.argsort(~own, axis=1, kind="stable")[:, : own.sum(axis=1).max()]
        return np.take_along_axis(found, order[:, :, None, None, None], axis=1)


def routing(track: SinkTrack, chosen: Int[np.ndarray, "batch step layer pos k"], experts: int) -> xr.Dataset:
    """What each prompt contributes to `routing_rows`.

    ``routed_sinks`` and ``routed_others`` [prompt, match, layer, expert]: Σ over strata of weight × share of the
    choices, of sinks and of matched positions; ``routed_weight`` [prompt, match, layer]: Σ of the weights;
    ``routed_share`` [prompt, match, layer]: share of the sinks in strata with others, NaN without sinks. ``match``: see
    `MATCHED`.
    """
    sinks = track.detect().any("head").to_numpy()  # [batch, step, layer, pos]
    shape = sinks.shape[0], len(MATCHED), sinks.shape[2]
    sides, weight, share = np.zeros((2, *shape, experts)), np.zeros(shape), np.zeros(shape)
    for match, name in enumerate(MATCHED):
        strata = _strata(track, name)
        for row, layer in np.ndindex(shape[0], shape[2]):
            known = (strata[row] >= 0) & (chosen[row, :, layer, :, 0] >= 0)
            place = row, match, layer
            one, other, weight[place], share[place] = _matched(
                strata[row][known], sinks[row, :, layer][known], chosen[row, :, layer][known], experts
            )
            sides[(slice(None), *place)] = one, other
    axes = ("prompt", "match", "layer", "expert")
    values = (axes, sides[0]), (axes, sides[1]), (axes[:3], weight), (axes[:3], share)
    coords = {"match": list(MATCHED), "layer": np.arange(shape[2]), "expert": np.arange(experts)}
    return xr.Dataset(dict(zip(COLUMNS, values, strict=True)), coords)


def _strata(track: SinkTrack, match: str) -> Int[np.ndarray, "batch step pos"]:
    """Number of the step, state and token, or token kind, of each place; -1 where none exists."""
    state, names = set_codes(track, "state")
    kind, _ = set_codes(track, "kind")
    label = kind if match == "kind" else track["token_id"].to_numpy()
    step = np.arange(state.shape[1])[:, None]
    exists = (state >= 0) & (kind >= 0) & track.scores().notnull().any(("layer", "head")).to_numpy()
    return np.where(exists, (step * len(names) + state) * (int(label.max()) + 1) + label, -1)


def _matched(
    strata: Int[np.ndarray, " place"],
    sinks: Bool[np.ndarray, " place"],
    chosen: Int[np.ndarray, "place k"],
    experts: int,
) -> tuple[Any, Any, float, float]:
    """The weighted choices of sinks and of others, the sum of the weights, and the share of sinks that are matched."""
    distinct, number = np.unique(strata, return_inverse=True)
    counts = np.stack([np.bincount(number, group, len(distinct)) for group in (sinks, ~sinks)])
    weights = counts[0] * counts[1] / np.maximum(counts.sum(axis=0), 1)
    choices = np.zeros((2, len(distinct), experts))
    np.add.at(choices, ((~sinks).astype(int)[:, None], number[:, None], chosen), 1 / chosen.shape[1])
    means = choices / np.maximum(counts, 1)[..., None]
    one, other = (weights[:, None] * means).sum(axis=1)
    share = counts[0][counts[1] > 0].sum() / counts[0].sum() if sinks.any() else np.nan
    return one, other, float(weights.sum()), float(share)


def without_experts(prompts: int, layers: int) -> xr.Dataset:
    """The variables of a model without experts, all NaN."""
    shapes = (("prompt", "match", "layer", "expert"),) * 2 + (("prompt", "match", "layer"),) * 2
    sizes = {"prompt": prompts, "match": len(MATCHED), "layer": layers, "expert": 1}
    columns = {
        name: (axes, np.full([sizes[axis] for axis in axes], np.nan))
        for name, axes in zip(COLUMNS, shapes, strict=True)
    }
    return xr.Dataset(columns, {"match": list(MATCHED), "layer": np.arange(layers), "expert": [0]})


def routing_rows(model: str, data: xr.Dataset, seed: int) -> list[dict[str, Any]]:
    """`ROUTING` of each layer and matching, with intervals over prompts, or over their groups if there are several, and
    ``p`` of distance and top_difference.

    Empty for a model without experts. A layer without a matched sink is NaN.
    """
    rows: list[dict[str, Any]] = []
    if data["routed_weight"].isnull().all():
        return rows
    for match, layer in product(MATCHED, data["layer"].to_numpy()):
        part = data.sel(layer=layer, match=match).transpose("prompt", ...)
        for measure, (interval, p) in _of_layer(_by_group(part), part["routed_share"].to_numpy(), seed).items():
            (line,) = interval_rows(model, measure, interval, {})
            labels = {"layer": int(layer), "matched": MATCHED[match], "p": p, "meaning": ROUTING[measure]}
            rows.append({**line, **labels})
    return rows


def _by_group(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sinks − others, weight, and prompts with a matched sink, of each group of prompts; of each prompt without groups
    or with a single one.
    """
    part, group = data[list(COLUMNS[:3])].fillna(0), groups_of(data)
    difference, weight = (part["routed_sinks"] - part["routed_others"]).to_numpy(), part["routed_weight"].to_numpy()
    prompts = (weight > 0).astype(int)
    if group is None or len(np.unique(group[prompts > 0])) < 2:
        return difference, weight, prompts
    members = np.arange(group.max() + 1)[:, None] == group
    return members @ difference, members @ weight, members @ prompts


def _of_layer(
    sums: tuple[np.ndarray, np.ndarray, np.ndarray], share: np.ndarray, seed: int
) -> dict[str, tuple[Interval, float]]:
    """`ROUTING` with their p values, of one layer."""
    difference, weight, prompts = sums
    changed = _sign_changes(difference, weight, seed)
    distance = float(_distance(difference.sum(axis=0), weight.sum()))
    tops, number = top_differences(difference, weight), np.array(prompts.sum())
    as_far = (1 + (changed >= distance * (1 - 1e-12)).sum()) / (1 + len(changed))
    far = _of_contributing(pooled(_distance, [difference, weight], seed), weight)
    chance = Interval(changed.mean(), np.array(np.nan), np.array(np.nan), number)
    return {
        "distance": (far._replace(prompts=number), float(as_far) if (weight > 0).sum() > 1 else np.nan),
        "chance": (chance, np.nan),
        "top_difference": (mean_interval(tops, seed=seed), p_value(tops, seed=seed)),
        "matched_share": (mean_interval(share, seed=seed), np.nan),
    }


def _of_contributing(found: Interval, weight: Float[np.ndarray, " prompt"]) -> Interval:
    """`found` with the number of prompts that have a matched sink; without an interval if fewer than two have."""
    number = (weight > 0).sum()
    low, high = (np.where(number > 1, bound, np.nan) for bound in (found.low, found.high))
    return Interval(found.estimate, low, high, number)


def top_differences(
    difference: Float[np.ndarray, "prompt expert"], weight: Float[np.ndarray, " prompt"]
) -> Float[np.ndarray, " prompt"]:
    """Of each prompt, p_e − q_e at the expert e with the largest difference in the other prompts; NaN without sinks."""
    others = difference.sum(axis=0) - difference
    chosen = np.take_along_axis(difference, others.argmax(axis=1)[:, None], axis=1)[:, 0]
    usable = (weight > 0) & (len(weight) > 1)
    return np.divide(chosen, weight, out=np.full(len(weight), np.nan), where=usable)


def _distance(difference: Float[np.ndarray, "*rest expert"], weight: Any) -> np.ndarray:
    """½ Σ_e |p_e − q_e| of summed differences; NaN without a matched sink."""
    with np.errstate(invalid="ignore"):
        return np.asarray(0.5 * np.abs(difference).sum(axis=-1) / np.asarray(weight, dtype=np.float64))


def _sign_changes(difference: np.ndarray, weight: np.ndarray, seed: int) -> Float[np.ndarray, " change"]:
    """`_distance` after random sign changes of whole prompts."""
    signs = np.random.default_rng(seed).integers(0, 2, size=(CHANGES, len(difference))) * 2 - 1
    return _distance(signs @ difference, weight.sum())
