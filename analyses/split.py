"""Do masked and unmasked queries keep separate sinks?

    sinklens analyse split tiny-llada

A sink score is a sum over queries. Here the queries of every step are split into those still masked and the others
(prompt and committed), and the scores computed within each group are compared (Rulli et al., 2510.15731, Fig. 6a):

- ``shared``: Σ_j min(a_j, b_j) of the two groups' mean attention, 1 minus their total variation distance. It needs no
  sinks and no threshold, so it counts every step and head;
- ``correlation``: Pearson's correlation of the two groups' scores over the keys;
- ``same``: share of (step, layer, head) where both groups have the same strongest key;
- ``jaccard``: overlap |A ∩ B| / |A ∪ B| of the two groups' sinks (ε over the mean, on the group's scores scaled so
  that uniform attention is 1), which is undefined where neither group has a sink. ``jaccard_low`` and ``jaccard_high``
  are its bounds: they count those steps and heads as 0 (nothing in common) and as 1 (they agree).

The tables also report what the overlap is based on: ``neither`` and ``one``, the shares of steps and heads where
neither group has a sink and where only one has; and ``compared``, the share of steps at which both groups have members.
The other steps have nothing to compare and are left out of all measures but this one.

The control splits the same queries at random into groups of the same sizes. Most unmasked queries belong to the prompt,
so this also splits left from right; the rows ``answer`` therefore split only the answer's queries, masked against
committed. In an autoregressive model no query is masked, and all numbers are NaN.

Caveat: early in a run, the committed group of ``answer`` consists of one or two queries with noisy scores; the control
has groups of the same sizes, so compare with it and not with 1.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.hooks.front import HookPair
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.hooks.points import Point
    from sinklens.model import Model

QUERIES = ("all", "answer")
SPLITS = ("masked", "random")
LIKENESS = {
    "shared": "attention that the two groups share, 1 − total variation distance",
    "jaccard": "Jaccard overlap of the two groups' sinks, where at least one has a sink",
    "jaccard_low": "the same, 0 where neither has a sink",
    "jaccard_high": "the same, 1 where neither has a sink",
    "correlation": "correlation of the two groups' scores",
    "same": "share of heads and steps where both groups have the same strongest key",
}
COVERAGE = {
    "neither": "share of heads and steps where neither group has a sink",
    "one": "share of heads and steps where only one group has a sink",
    "compared": "share of steps at which both groups have members",
}
MEASURES = {**LIKENESS, **COVERAGE}
EPSILON = 3.0


class Likeness(NamedTuple):
    """Similarity of the attention of two groups of queries, [batch, head] each, in the order of `MEASURES`."""

    shared: Float[Tensor, "batch head"]
    jaccard: Float[Tensor, "batch head"]
    jaccard_low: Float[Tensor, "batch head"]
    jaccard_high: Float[Tensor, "batch head"]
    correlation: Float[Tensor, "batch head"]
    same: Float[Tensor, "batch head"]
    neither: Float[Tensor, "batch head"]
    one: Float[Tensor, "batch head"]
    compared: Float[Tensor, "batch head"]


@dataclass
class Split(Study):
    """See the module.

    Attributes:
        epsilon: threshold of a group's sinks: ε over the mean of the other keys, in column sums.
    """

    name: ClassVar[str] = "split"
    needs_mask_token: ClassVar[str] = "every position of its canvas holds a token, so no query is masked"
    epsilon: float = EPSILON

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES`, [prompt, layer, queries, split], averaged over heads and steps."""
        layers = model.cfg.n_layers
        coords = {"layer": np.arange(layers), "queries": list(QUERIES), "split": list(SPLITS)}
        axes = ("prompt", *coords)
        if model.causal:
            nothing = np.full((len(prompts), layers, len(QUERIES), len(SPLITS)), np.nan)
            return xr.Dataset(dict.fromkeys(MEASURES, (axes, nothing)), coords)
        groups = Groups(model, prompts, self.chat_template, self.seed, self.epsilon)
        active = self.generate(model, prompts, settings, record_sinks=False, hooks=groups.hooks()).own
        return xr.Dataset({name: (axes, value) for name, value in groups.means(active).items()}, coords)

    def example(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset | None:
        """The pattern of the step, layer and head whose two groups have the most different sinks.

        ``pattern`` [query, key], ``masked`` [query] and ``token`` [query], the labels of the positions. Attributes
        ``step``, ``layer`` and ``head``. None for an autoregressive model.
        """
        from sinklens.sinks.labels import token_labels

        if model.causal:
            return None
        groups = Groups(model, [prompt], self.chat_template, self.seed, self.epsilon)
        self.generate(model, [prompt], settings, record_sinks=False, hooks=groups.hooks())
        step, layer, head = groups.most_different()
        found = self.generate(model, [prompt], settings, record_sinks=Record(patterns=[(step, layer)]))
        assert found.run.sinks is not None
        canvas = found.run.canvas[0, step].numpy()
        return xr.Dataset(
            {
                "pattern": (("query", "key"), found.run.patterns[step, layer][0, head].float().numpy()),
                "masked": ("query", (canvas == model.mask_token_id)),
                "token": ("query", token_labels(found.run.sinks, 0, canvas)),
            },
            attrs={"step": step, "layer": layer, "head": head},
        )

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``split``: over all layers, and masked minus random with a verdict; ``layers``: by layer."""
        from pandas import concat

        means = {name: data.mean("layer") for name, data in measured.items()}
        excess = {
            name: data.sel(split="masked", drop=True) - data.sel(split="random", drop=True)
            for name, data in means.items()
        }
        likeness = interval_table(excess, list(LIKENESS), self.seed, null=0.0)
        others = interval_table(excess, [name for name in MEASURES if name not in LIKENESS], self.seed).assign(
            verdict=""
        )
        differences = concat([judged(likeness, above="no", below="separate"), others], ignore_index=True)
        differences = differences.assign(split="masked − random")
        tables = {
            "split": concat([interval_table(means, list(MEASURES), self.seed), differences], ignore_index=True),
            "layers": interval_table(measured, list(MEASURES), self.seed),
        }
        return {name: table.assign(meaning=table["measure"].map(MEASURES)) for name, table in tables.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``queries`` (Fig. 6a): one head's pattern and the two groups' scores; ``likeness``: the table."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import panels

        likeness, axes = panels(len(LIKENESS), columns=3, size=(5, 3.2))
        table = self.tables(measured)["split"]
        rows = table[table["split"].isin(SPLITS)]
        rows = rows.assign(place=[f"{row.queries} queries, {row.split} split" for row in rows.itertuples()])
        for measure, ax in zip(LIKENESS, axes, strict=True):
            interval_dots(rows[rows["measure"] == measure], "place", ax).set(xlabel=wrapped(LIKENESS[measure], 36))
        return {"queries": _examples(list(measured), examples), "likeness": likeness}


class Groups:
    """Compares the attention of groups of queries at every step and layer, as hooks of a run.

    Patterns are not kept: each is reduced to the groups' scores, and these to their likeness.

    Args:
        model: the model that runs.
        prompts: prompts of the run, encoded as in the run.
        chat_template: as in `sinklens.generate`.
        seed: seed of the random split, which depends only on the seed and the row's canvas.
        epsilon: see `Split`.
    """

    def __init__(
        self, model: "Model", prompts: Sequence[SinglePrompt], chat_template: bool | str, seed: int, epsilon: float
    ) -> None:
        ids, real = model.encode(list(prompts), chat_template)
        self._prompt_length, self._real, self._mask = ids.shape[1], real.cpu(), model.mask_token_id
        self._seed, self._epsilon, self._layers = seed, epsilon, model.cfg.n_layers
        self._members: Bool[Tensor, "batch group query"] | None = None
        self._found: dict[tuple[int, int], list[Likeness]] = {}
        self._contrast: dict[tuple[int, int], Float[Tensor, " head"]] = {}

    def hooks(self) -> list[HookPair]:
        """Hooks to pass to a run."""
        return [("denoise.hook_canvas", self._split), (lambda name: name.endswith("attn.hook_pattern"), self._compare)]

    def _split(self, canvas: Int[Tensor, "batch pos"], hook: "Point") -> None:
        ids = canvas.cpu()
        answer = torch.arange(ids.shape[1]) >= self._prompt_length
        real = torch.cat([self._real, torch.ones(len(ids), ids.shape[1] - self._prompt_length, dtype=torch.bool)], 1)
        masked = (ids == self._mask) & real
        parts = []
        for among in (real, real & answer):
            first, second = masked & among, ~masked & among
            parts += [first, second, *_shuffled(first, second, ids, real, self._seed)]
        self._members = torch.stack(parts, dim=1).to(canvas.device)

    def _compare(self, pattern: Float[Tensor, "batch head query key"], hook: "Point") -> None:
        assert self._members is not None
        assert hook.step is not None
        real = self._members[:, 0] | self._members[:, 1]
        scores = group_scores(pattern.detach(), self._members, real)
        self._found[hook.step, hook.layer()] = [
            likeness(scores[:, first], scores[:, first + 1], real, self._epsilon) for first in range(0, 8, 2)
        ]
        if len(pattern) == 1:
            sizes = self._members[0, :2].sum(dim=1)
            contrast = _contrast(scores[0, :2], self._found[hook.step, hook.layer()][0])
            self._contrast[hook.step, hook.layer()] = contrast * sizes.min() / sizes.sum()

    def means(self, active: Bool[np.ndarray, "batch step"]) -> dict[str, np.ndarray]:
        """`MEASURES`, [prompt, layer, queries, split]: means over heads and each row's active steps."""
        values = {}
        for number, name in enumerate(MEASURES):
            every = np.stack(
                [
                    [[pair[number].cpu().numpy() for pair in self._found[step, layer]] for layer in range(self._layers)]
                    for step in range(active.shape[1])
                ]
            ).astype(np.float64)  # [step, layer, pair, batch, head]
            every[~np.broadcast_to(active.T[:, None, None, :, None], every.shape)] = np.nan
            mean = xr.DataArray(every).mean(("dim_0", "dim_4")).to_numpy()
            values[name] = mean.transpose(2, 0, 1).reshape(active.shape[0], self._layers, len(QUERIES), len(SPLITS))
        return values

    def most_different(self) -> tuple[int, int, int]:
        """Step, layer and head of the largest contrast times the smaller group's share, in a run of one row."""
        step, layer = max(self._contrast, key=lambda place: float(self._contrast[place].max()))
        return step, layer, int(self._contrast[step, layer].argmax())


def group_scores(
    pattern: Float[Tensor, "batch head query key"],
    members: Bool[Tensor, "batch group query"],
    real: Bool[Tensor, "batch key"],
) -> Float[Tensor, "batch group head key"]:
    """S / |G| · Σ_{i∈G} A[i, j], with S the number of real positions: column sums, scaled so that uniform is 1.

    NaN for a group without members; the score of the group of all real queries is the sink score.
    """
    sums = torch.einsum("bhqk,bgq->bghk", pattern.float(), members.float())
    scale = real.sum(dim=1)[:, None] / members.sum(dim=2)
    return torch.where(members.any(dim=2)[:, :, None, None], sums * scale[:, :, None, None], torch.nan)


def likeness(
    one: Float[Tensor, "batch head key"],
    other: Float[Tensor, "batch head key"],
    real: Bool[Tensor, "batch key"],
    epsilon: float = EPSILON,
) -> Likeness:
    """Similarity of two groups' scores; NaN where a group has no members, or a measure is undefined."""
    keys = real[:, None, :]
    defined = ~(one.isnan().any(-1) | other.isnan().any(-1))
    first, second = ((_over_others(part, keys) > epsilon) & keys for part in (one, other))
    either, both = (first | second).sum(-1), (first & second).sum(-1)
    jaccard = torch.where(either > 0, both / either, torch.nan)
    strongest = [part.masked_fill(~keys, -torch.inf).argmax(-1) for part in (one, other)]
    single = first.any(-1) != second.any(-1)
    found = {
        "shared": (torch.minimum(one, other) * keys).nan_to_num().sum(-1) / keys.sum(-1),
        "jaccard": jaccard,
        "jaccard_low": jaccard.nan_to_num(0.0),
        "jaccard_high": jaccard.nan_to_num(1.0),
        "correlation": _correlation(one, other, keys),
        "same": (strongest[0] == strongest[1]).float(),
        "neither": (either == 0).float(),
        "one": single.float(),
    }
    return Likeness(
        **{name: torch.where(defined, value, torch.nan) for name, value in found.items()}, compared=defined.float()
    )


def _correlation(one: Tensor, other: Tensor, keys: Bool[Tensor, "batch 1 key"]) -> Float[Tensor, "batch head"]:
    """Pearson's correlation over the keys."""
    count = keys.sum(-1, keepdim=True)
    away, across = (torch.where(keys, part - (part * keys).sum(-1, keepdim=True) / count, 0.0) for part in (one, other))
    return (away * across).sum(-1) / (away.square().sum(-1) * across.square().sum(-1)).sqrt()


def _over_others(scores: Float[Tensor, "batch head key"], keys: Bool[Tensor, "batch 1 key"]) -> Tensor:
    """Each score minus the mean of the others."""
    known = scores * keys
    return scores - (known.sum(-1, keepdim=True) - known) / (keys.sum(-1, keepdim=True) - 1).clamp(min=1)


def _shuffled(
    first: Bool[Tensor, "batch query"],
    second: Bool[Tensor, "batch query"],
    ids: Int[Tensor, "batch query"],
    real: Bool[Tensor, "batch query"],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The members of two groups reassigned at random to groups of the same sizes, depending only on the row's ids."""
    groups = torch.zeros_like(first), torch.zeros_like(second)
    for row in range(len(ids)):
        row_ids = np.ascontiguousarray(ids[row][real[row]].numpy())
        digest = hashlib.sha256(repr((seed, int((first | second)[row].sum()))).encode() + row_ids.tobytes()).digest()
        places = (first | second)[row].nonzero()[:, 0].numpy()
        np.random.default_rng(int.from_bytes(digest[:8], "little")).shuffle(places)
        size = int(first[row].sum())
        for group, part in zip(groups, (places[:size], places[size:]), strict=True):
            group[row, torch.from_numpy(part)] = True
    return groups


def _contrast(scores: Float[Tensor, "group head key"], found: Likeness) -> Float[Tensor, " head"]:
    """The smaller of the groups' maximum scores where no sink is shared; −1 where one is, or neither has a sink."""
    apart = found.jaccard[0] == 0
    return torch.where(apart, scores.amax(dim=-1).amin(dim=0), -1.0)


def _examples(models: Sequence[str], examples: Mapping[str, xr.Dataset]) -> "Figure":
    """A row of panels per model: the pattern above, the two groups' scores below."""
    from sinklens.sinks.labels import short
    from sinklens.views.charts import nothing_to_show
    from sinklens.views.figures import group_profiles, grouped_pattern, panels

    heights = [part for name in models for part in ((7.0, 3.0) if name in examples else (1.0, 0.01))]
    figure, axes = panels(len(heights), columns=1, size=(10, 1), heights=heights)
    for above, below, name in zip(axes[::2], axes[1::2], models, strict=True):
        if name not in examples:
            below.set_axis_off()
            nothing_to_show(above, name, "an autoregressive model has no masked queries")
            continue
        data = examples[name]
        pattern, masked, labels = (data[part].to_numpy() for part in ("pattern", "masked", "token"))
        grouped_pattern(pattern, masked, labels.tolist(), ax=above)
        place = ", ".join(f"{part} {data.attrs[part]}" for part in ("step", "layer", "head"))
        above.set_title(f"{short(name)}: {place}")
        real = torch.ones(1, len(masked), dtype=torch.bool)
        members = torch.from_numpy(np.stack([masked, ~masked]))[None]
        scores = group_scores(torch.from_numpy(pattern)[None, None], members, real)[0, :, 0].numpy()
        group_profiles({"masked queries": scores[0], "unmasked queries": scores[1]}, labels.tolist(), ax=below)
    return figure
