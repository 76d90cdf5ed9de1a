"""Which features fire at sinks, do they follow a sink that moves, and what does ablating them do?

    sinklens analyse features tiny-llada

Two sparse autoencoders at one point of the stream, one for masked positions and one for every token, describe what the
next layer reads. On problems of the training set, the study chooses for each SAE the features that fire at this
layer's sinks most often beyond other positions of the same step and kind of token (feature_places.py). *Control*
features are matched by firing rate: for each chosen feature the one with the nearest rate among those with the smaller
half of such excesses. On the prompts of the study it then measures, for chosen and control features:

- ``excess``: the same difference of firing, on prompts that did not choose the features;
- ``follows``: firing at a position while it is a sink, minus firing at the same position while it is not one;
- ``arrives`` and ``leaves``: rise of firing at the new place and fall at the old place of a sink that moves from a step
  to the next;
- ``gone``: share of the layer's sinks that disappear when the features are ablated, on the same canvases; ``weaker``:
  by which share their scores fall; ``kl``: how the predictions change;
- ``changed`` and ``cost``: share of answers that change, and of right answers that are lost, in free runs;
- ``removed``: length of what the ablation takes from the stream at a position, where controls may differ.

Caveat: ablating a feature removes a direction, and with it all that the direction carries. A control of the same firing
rate can still be weaker: compare ``removed``.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import xarray as xr

from sinklens.analyses.answers import is_right
from sinklens.analyses.feature_places import Seen, by_place, by_step_and_kind, contrast, moves, seen, values_of
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.experiments import compare
from sinklens.features import SparseAutoencoder, SpliceSAE, load_sae
from sinklens.interventions import MaskedLogits
from sinklens.runs.identity import fingerprint
from sinklens.sampling.settings import Settings
from sinklens.tasks.word_problems import training

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

ROLES = {"sink": "features of sinks", "control": "features of the same firing rate"}
SCOPES = {"masked": "masked", "decided": "decided"}
MEASURES = {
    "excess": "share of sinks at which a feature fires, minus that of other positions of the step and kind",
    "follows": "firing at a position while it is a sink, minus while it is not one (same token)",
    "arrives": "rise of firing at the new place of a sink that moves",
    "leaves": "fall of firing at its old place",
    "gone": "share of sinks that disappear when the features are ablated",
    "weaker": "share by which the scores of sinks fall",
    "kl": "KL divergence from the unchanged run (nats per undecided position, under replay)",
    "changed": "share of answers that change",
    "cost": "share of word problems lost",
    "removed": "length of what the ablation takes from the stream",
}
CLAIMED = {
    "excess": "fires more at sinks than at other positions of the step and kind, beyond its control",
    "follows": "fires at a position more while it is a sink than while it is not one, beyond its control",
    "arrives": "appears where a sink moves to, beyond its control",
    "leaves": "disappears where a sink was, beyond its control",
    "gone": "ablated, removes more sinks than its control",
    "kl": "ablated, changes predictions more than its control",
    "cost": "ablated, loses more answers than its control",
}
DRAWN = {name: name for name in ("excess", "follows", "arrives", "leaves", "gone", "weaker", "changed", "cost")}
FIRING = ("excess", "follows", "arrives", "leaves")
SEED = 20_260_404  # of the problems that choose the features


class Chosen(NamedTuple):
    """Features of one SAE and the problems' statistics that chose them, [role, rank] each.

    Attributes:
        feature: numbers.
        rate: share of the covered positions at which they fire.
        excess: see the module.
    """

    feature: np.ndarray
    rate: np.ndarray
    excess: np.ndarray


@dataclass
class Features(Study):
    """See the module.

    Attributes:
        masked, decided: the two SAEs: names of shipped ones, or folders.
        chosen: number of features per SAE.
        problems: number of training problems that choose them.
    """

    name: ClassVar[str] = "features"
    scored: ClassVar[str] = "some"
    masked: str = "tiny-llada-masked"
    decided: str = "tiny-llada-decided"
    chosen: int = 5
    problems: int = 40

    def saes(self) -> dict[str, SparseAutoencoder]:
        """The SAEs by scope, both at one point."""
        found = {"masked": load_sae(self.masked), "decided": load_sae(self.decided)}
        points = {sae.point for sae in found.values()}
        if len(points) > 1 or not next(iter(points)).endswith("hook_resid_post"):
            raise SettingError(f"both SAEs must be at one hook_resid_post; got {', '.join(sorted(points))}.")
        return found

    def inputs(self) -> dict[str, str]:
        """Hashes of both SAEs."""
        return {scope: hashlib.sha256(fingerprint(sae).encode()).hexdigest()[:16] for scope, sae in self.saes().items()}

    def begin(self, models: Sequence[str], prompts: Sequence[Any]) -> None:
        """Check that the SAEs belong to the models."""
        for scope, sae in self.saes().items():
            other = [name for name in models if name != sae.model]
            if other:
                raise SettingError(
                    f"the SAE for {scope} positions belongs to {sae.model!r}; {', '.join(other)} cannot be studied "
                    f"with it. Pass masked= and decided= with SAEs of that model."
                )

    def measure(self, model: "Model", prompts: Sequence[Any], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, sae, role]; of the choice, ``feature``, ``rate`` and ``chosen_excess`` [prompt, sae,
        role, rank]; ``sinks`` and ``moves`` [prompt, sae], the number of sinks that were compared and of moves.
        """
        saes, chosen = self.saes(), self.choice(model, settings)
        logits = MaskedLogits()
        base = self.generate(model, prompts, settings, hooks=[logits]).run
        kept, layer = dict(logits.kept), layer_after(saes["masked"].point)
        found = seen(base, layer)
        parts = []
        for scope, sae in saes.items():
            values = values_of(base, sae, sae.point)
            fired = [_firing(found, scope, values, chosen[scope], row) for row in range(len(prompts))]
            roles = []
            for role, features in zip(ROLES, chosen[scope].feature, strict=True):
                splice = SpliceSAE(sae, sae.point, features=features.tolist(), error=True, scope=SCOPES[scope])
                replayed = self.generate(model, prompts, settings, hooks=[splice, logits], replay=base).run
                free = self.generate(model, prompts, settings, hooks=[splice], record_sinks=False).run
                own: dict[str, Any] = {name: [row[name][role] for row in fired] for name in FIRING}
                own |= _ablated(found, base, replayed, layer, scope) | _answers(prompts, base, free, self.answers)
                own["kl"] = compare(base, replayed, kept, dict(logits.kept))["kl"].mean("step").to_numpy()
                own["removed"] = _removed(found, scope, values, sae, features)
                roles.append(xr.Dataset({name: ("prompt", np.asarray(value, float)) for name, value in own.items()}))
            part = xr.concat(roles, dim="role")
            parts.append(part.assign({name: ("prompt", [row[name] for row in fired]) for name in ("sinks", "moves")}))
        data = xr.concat(parts, dim="sae").assign_coords(sae=list(saes), role=list(ROLES))
        for name, values in zip(("feature", "rate", "chosen_excess"), zip(*chosen.values(), strict=True), strict=True):
            shown = np.broadcast_to(np.stack(values), (len(prompts), *np.shape(np.stack(values))))
            data[name] = (("prompt", "sae", "role", "rank"), shown.astype(float))
        return data.transpose("prompt", ...)

    def choice(self, model: "Model", settings: Settings) -> dict[str, Chosen]:
        """The chosen features and their controls, by scope; computed once per model."""
        made = self.__dict__.setdefault("_choices", {})
        key = (model.name, repr(sorted(settings.items())))
        if key not in made:
            made[key] = self._choose(model, settings)
        return made[key]

    def _choose(self, model: "Model", settings: Settings) -> dict[str, Chosen]:
        prompts = [problem.prompt for problem in training(SEED, self.problems)]
        saes = self.saes()
        sums: dict[str, list[Any]] = {scope: [0.0, 0, 0.0, 0] for scope in saes}
        for start in range(0, len(prompts), self.batch):
            run = self.generate(model, prompts[start : start + self.batch], settings).run
            found = seen(run, layer_after(saes["masked"].point))
            for scope, sae in saes.items():
                fires, inside = values_of(run, sae, sae.point) > 0, found.inside(scope)
                for row in range(len(fires)):
                    sinks = found.sinks[row].any(axis=1)
                    stratum = by_step_and_kind(found.kind[row])
                    difference, count = contrast(fires[row], sinks, inside[row], stratum)
                    added = (
                        np.nan_to_num(difference) * count,
                        count,
                        fires[row][inside[row]].sum(0),
                        inside[row].sum(),
                    )
                    sums[scope] = [old + new for old, new in zip(sums[scope], added, strict=True)]
        return {
            scope: matched(total / max(count, 1), fired / max(places, 1), self.chosen)
            for scope, (total, count, fired, places) in sums.items()
        }

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``measures``; ``claims``, chosen minus control features, paired by prompt; ``chosen``, the features."""
        table = interval_table(measured, list(MEASURES), self.seed, {"changed": (0, 1), "cost": (-1, 1)})
        return {
            "measures": table.assign(meaning=table["measure"].map(MEASURES)),
            "claims": claims(measured, self.seed),
            "chosen": chosen_table(measured),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``measures``: a panel per SAE, chosen beside control features."""
        from sinklens.views.effects import costs_by_cell

        table = interval_table(measured, list(DRAWN), self.seed, {"changed": (0, 1), "cost": (-1, 1)})
        return {"measures": costs_by_cell(table, "sae", "measure", "role", DRAWN, ROLES, "mean over prompts")}


def layer_after(point: str) -> int:
    """The layer that reads the stream at ``blocks.{l}.hook_resid_post``."""
    return int(point.split(".")[1]) + 1


def matched(difference: np.ndarray, rate: np.ndarray, number: int) -> Chosen:
    """The features with the largest differences, and for each the one with the nearest rate among the smaller half.

    Features that never fire are not controls; a control is used once.
    """
    top = np.argsort(-difference, kind="stable")[:number]
    free = np.flatnonzero((np.abs(difference) <= np.median(np.abs(difference[rate > 0]))) & (rate > 0)).tolist()
    free = [feature for feature in free if feature not in top]
    controls = []
    for feature in top:
        controls.append(min(free, key=lambda other: abs(rate[other] - rate[feature])))
        free.remove(controls[-1])
    both = np.stack([top, np.array(controls)])
    return Chosen(both, rate[both], difference[both])


def _firing(found: Seen, scope: str, values: np.ndarray, chosen: Chosen, row: int) -> dict[str, Any]:
    """`FIRING` by role, mean over the features; ``sinks`` and ``moves``."""
    inside, names = found.inside(scope)[row], list(ROLES)
    fires = values[row][..., chosen.feature.ravel()] > 0
    sinks, kind = found.sinks[row].any(axis=1), found.kind[row]
    difference, count = contrast(fires, sinks, inside, by_step_and_kind(kind))
    follows, _ = contrast(fires, sinks, inside, by_place(kind))
    arrives, leaves, number = moves(fires, found.sinks[row], found.strongest[row], inside)
    by_role = {
        name: dict(zip(names, value.reshape(len(names), -1).mean(axis=1), strict=True))
        for name, value in zip(FIRING, (difference, follows, arrives, leaves), strict=True)
    }
    return {**by_role, "sinks": count, "moves": number}


def _ablated(found: Seen, base: "Generation", replayed: "Generation", layer: int, scope: str) -> dict[str, np.ndarray]:
    """``gone`` and ``weaker`` at the unchanged run's sinks inside the scope; NaN without any."""
    assert base.sinks is not None
    assert replayed.sinks is not None
    sinks = found.sinks & found.inside(scope)[:, :, None]
    still = replayed.sinks.detect().isel(layer=layer).to_numpy()
    tracks = (base.sinks, replayed.sinks)
    before, after = (track.scores().isel(layer=layer).fillna(0.0).to_numpy() for track in tracks)
    axes = (1, 2, 3)
    number = sinks.sum(axis=axes).astype(float)
    number[number == 0] = np.nan
    total = np.where(number > 0, (before * sinks).sum(axis=axes), np.nan)
    return {
        "gone": (sinks & ~still).sum(axis=axes) / number,
        "weaker": ((before - after) * sinks).sum(axis=axes) / total,
    }


def _answers(
    prompts: Sequence[Any], base: "Generation", free: "Generation", known: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """``changed`` and ``cost``."""
    texts = [[str(answer.text) for answer in run.answers] for run in (base, free)]
    right = [[is_right(prompt, text, known) for prompt, text in zip(prompts, of, strict=True)] for of in texts]
    changed = [before != after for before, after in zip(*texts, strict=True)]
    return {"changed": np.array(changed, float), "cost": np.array(right[0]) - np.array(right[1])}


def _removed(found: Seen, scope: str, values: np.ndarray, sae: SparseAutoencoder, features: np.ndarray) -> np.ndarray:
    """Mean length of the chosen features' part of the reconstruction, over the covered positions of each row."""
    parts = values[..., features] @ sae.W_dec.numpy()[features]
    inside = found.inside(scope)
    lengths = np.linalg.norm(parts, axis=-1) * inside
    return lengths.sum(axis=(1, 2)) / inside.sum(axis=(1, 2))


def claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Chosen minus control features by SAE, paired by prompt: one family of claims on each model (`judged`)."""
    from pandas import concat

    rows = []
    for model, data in measured.items():
        for sae in data["sae"].to_numpy():
            for name, claim in CLAIMED.items():
                values = data[name].sel(sae=sae, role="sink", drop=True) - data[name].sel(
                    sae=sae, role="control", drop=True
                )
                part = xr.Dataset({"above": values})
                ranges = {"above": (-1, 1)} if name == "cost" else None
                table = interval_table({model: part}, ["above"], seed, ranges, null=0.0)
                rows.append(table.assign(measure=name, sae=sae, claim=f"{sae}: {claim}"))
    return judged(concat(rows, ignore_index=True))


def chosen_table(measured: Mapping[str, xr.Dataset]) -> "DataFrame":
    """One row per chosen feature: number, firing rate, and as estimate its excess on the problems that chose it."""
    from pandas import DataFrame

    rows = []
    for model, data in measured.items():
        first = data[["feature", "rate", "chosen_excess"]].isel(prompt=0)
        for sae in data["sae"].to_numpy():
            for role in ROLES:
                one = first.sel(sae=sae, role=role)
                for rank in range(one.sizes["rank"]):
                    cell = one.isel(rank=rank)
                    numbers = {"feature": int(cell["feature"]), "rate": float(cell["rate"])}
                    found = {"estimate": float(cell["chosen_excess"]), "low": float("nan"), "high": float("nan")}
                    rows.append({"model": model, "sae": sae, "role": role, "rank": rank, **numbers, **found})
    return DataFrame(rows)
