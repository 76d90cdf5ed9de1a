"""Do sinks matter more to a cache than other keys, and does a cache hold sinks still?

    sinklens analyse caching tiny-llada tiny-dream tiny-mmada --limit 20

A cache reuses keys and values of earlier steps. On the canvases of the exact run (``replay=``), this study leaves
chosen keys stale and compares the predictions of each step with the exact ones (stale_keys.py says which keys, and when
they are computed again):

- ``costs``: only the sinks of each layer stale, or as many other keys, matched by attention, kind of token or position,
  or random; and the reverse, everything that is decided stale *but* these keys. Also in single layers.
- ``policies``: the same for the cache policies `DualCache`, `DelayedCache`, `KeepSinks` and its negation, with a
  complete step every `every` steps.
- ``motion``: how often strongest keys change under each policy, beside the exact run *with the column sums of the same
  queries*. A step of a cache computes fewer queries, and sums over fewer queries move more; both have the same here.
- ``sets``: how many keys the choices are, their share of the attention, and how far their keys move in the exact run.
- ``claims``: differences, paired by prompt.

Caveat: a control matches one property at a time, and `same_mass` falls short of the sinks' mass where the rest has too
little (see ``sets``). Sinks on undecided positions are left out: a step computes their keys, whatever the policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.answers import each_prompt
from sinklens.analyses.estimates.ratios import ratio_rows
from sinklens.analyses.estimates.tables import corrected, interval_table, judged, known_mean
from sinklens.analyses.nulls import rates
from sinklens.analyses.stale_keys import (
    CHANGES,
    CONTROLS,
    EVERYWHERE,
    KEYS,
    TREATED,
    Sets,
    Staleness,
    candidates,
    chosen_keys,
    conditions,
    costs,
    fresh_keys,
    layer_names,
)
from sinklens.analyses.study import SINK, Study
from sinklens.interventions import MaskedLogits
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling import DelayedCache, DualCache, KeepSinks, Planned, Policy, Refresh
from sinklens.sampling.settings import Settings
from sinklens.sinks import Detector, EpsilonOverMean, Record, SinkTrack

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

POLICIES = {
    "dual": "DualCache",
    "delayed": "DelayedCache",
    "keep-sinks": "KeepSinks",
    "not keep-sinks": "the negation of KeepSinks",
}
SOURCES = {"policy": "under the policy", "same queries": "exact, same queries", "exact": "exact, all queries"}
COSTS = {
    "kl": "KL divergence from the exact step (nats per undecided position)",
    "proposals": "share of undecided positions whose most likely token changes",
}
SETS = {
    "number": "keys per layer",
    "mass": "share of a layer's attention, %",
    "drift": "change of a key since the previous step, ‖k_t − k‖ / ‖k_t‖",
}
MOTION = {
    "jump_share": "share of steps at which the strongest key changes",
    "sink_jump_share": "the same over steps where it is a sink before and after",
}


@dataclass
class Caching(Study):
    """See the module.

    Attributes:
        every: steps of an episode; the first one computes everything.
        sink: the definition of a sink; by default the paper's, with ε = 3 in column sums.
        rows: choices of keys per pass; the results do not depend on it.
    """

    name: ClassVar[str] = "caching"
    together: ClassVar[bool] = False
    every: int = 8
    sink: Detector = field(default_factory=EpsilonOverMean)
    rows: int = 32

    def refusal(self, model: "Model") -> str:
        """See `Study.refusal`."""
        attention = model.family_record.attention
        if model.tree.timed:
            return "a model to which no cache policy applies, as its keys change with the noise level. Leave it out."
        if attention == "bidirectional" and not model.tree.architecture.encoder:
            return ""
        return f"a model to which no cache policy applies, as its attention is {attention}. Leave it out."

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`COSTS` [prompt, change, choice, layer], ``kl_age`` [prompt, change, choice, age], `SETS` [prompt, choice],
        ``policy_…`` [prompt, policy], `MOTION` [prompt, policy, source] and ``difference`` [prompt, claim].
        """

        def one(prompt: SinglePrompt) -> xr.Dataset:
            found = self._of_prompt(model, prompt, settings)
            return found.assign(difference=claim_values(found))

        return each_prompt(prompts, one)

    def _of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        logits = MaskedLogits()
        base = self.generate(model, [prompt], settings, hooks=[logits], record_sinks=Record(["drift"])).run
        allowed = candidates(base, self.every)
        sets = chosen_keys(base, allowed, self.sink, self.every, self.seed)
        found = self._empty(model)
        chosen = conditions(model.cfg.n_layers)
        steps = np.arange(base.steps_run)
        stale = steps % self.every > 0
        kl, changed = self._planned(base, prompt, settings, [fresh_keys(one, sets, allowed) for one in chosen], logits)
        for condition, divergence, other in zip(chosen, kl, changed, strict=True):
            place = dict(zip(Staleness._fields, condition, strict=True))
            found["kl"].loc[place], found["proposals"].loc[place] = (
                known_mean(divergence[stale]),
                known_mean(other[stale]),
            )
            if condition.layer == EVERYWHERE:
                ages = [known_mean(divergence[steps % self.every == age]) for age in found["age"].to_numpy()]
                found["kl_age"].loc[{"change": condition.change, "choice": condition.choice}] = ages
        self._policies(base, prompt, settings, logits, found)
        return found.assign(sizes_of(base, sets, stale))

    def _planned(
        self,
        base: "Generation",
        prompt: SinglePrompt,
        settings: Settings,
        fresh: Sequence[Bool[np.ndarray, "step layer pos"]],
        logits: MaskedLogits,
    ) -> tuple[Float[np.ndarray, "plan step"], Float[np.ndarray, "plan step"]]:
        """`costs` of every plan; several plans share a pass."""
        parts = []
        for start in range(0, len(fresh), self.rows):
            plans, seen = fresh[start : start + self.rows], MaskedLogits()
            count = len(plans)
            self.generate(
                base.model, [prompt] * count, settings, hooks=[seen], record_sinks=False,
                replay=base.canvas.repeat(count, 1, 1), cache=Planned(np.stack(plans)),
            )  # fmt: skip
            split = {step: kept.view(count, -1, kept.shape[-1]) for step, kept in seen.kept.items()}
            parts.append(
                costs(logits.kept, [{step: kept[row] for step, kept in split.items()} for row in range(count)])
            )
        kl, changed = zip(*parts, strict=True)
        return np.concatenate(kl), np.concatenate(changed)

    def policies(self) -> dict[str, Policy]:
        """The policies of `POLICIES`, with a complete step every `every` steps."""
        keep = KeepSinks(self.sink)
        inner = {"dual": DualCache(), "keep-sinks": keep, "not keep-sinks": ~keep}
        every = {name: Refresh(self.every, within=policy) for name, policy in inner.items()}
        return {**every, "delayed": DelayedCache(self.every)}

    def _policies(
        self, base: "Generation", prompt: SinglePrompt, settings: Settings, logits: MaskedLogits,
        found: xr.Dataset,
    ) -> None:  # fmt: skip
        """Fill in what the policies cost, and the motion of the strongest keys under each."""
        scores, kept, members = [], [], []
        for name in POLICIES:
            seen = MaskedLogits()
            run = self.generate(
                base.model, [prompt], settings, hooks=[seen], replay=base, cache=self.policies()[name]
            ).run
            assert run.sinks is not None
            scores.append(run.sinks["score"].to_numpy()[0])
            kept.append(seen.kept)
            members.append(torch.from_numpy(run.sinks["fresh"].to_numpy()[0].any(axis=1)))
        for name, values in zip(COSTS, costs(logits.kept, kept), strict=True):
            found[f"policy_{name}"][:] = [known_mean(of_run) for of_run in values]
        motion = motion_of(base, np.stack(scores), self._sums(base, prompt, settings, torch.stack(members)))
        for name, rate in motion.items():
            found[name][:] = rate

    def _sums(
        self,
        base: "Generation",
        prompt: SinglePrompt,
        settings: Settings,
        members: Bool[Tensor, "run step pos"],
    ) -> Float[np.ndarray, "run step layer head pos"]:
        """Column sums of the exact run over some queries of each step; a batch with a row for each choice."""
        count = len(members)
        run = self.generate(
            base.model, [prompt] * count, settings, record_sinks=Record(queries=members),
            replay=base.canvas.repeat(count, 1, 1),
        ).run  # fmt: skip
        assert run.sinks is not None
        return run.sinks["score"].to_numpy()

    def _empty(self, model: "Model") -> xr.Dataset:
        """The measurements of a prompt, all NaN."""
        layers = [EVERYWHERE, *layer_names(model.cfg.n_layers)]
        axes: dict[str, list[Any]] = {
            "change": list(CHANGES), "choice": list(KEYS), "layer": layers, "age": list(range(1, self.every)),
            "policy": list(POLICIES), "source": list(SOURCES),
        }  # fmt: skip
        shapes = {
            **dict.fromkeys(COSTS, ("change", "choice", "layer")), "kl_age": ("change", "choice", "age"),
            **dict.fromkeys(SETS, ("choice",)), **dict.fromkeys((f"policy_{name}" for name in COSTS), ("policy",)),
            **dict.fromkeys(MOTION, ("policy", "source")),
        }  # fmt: skip
        values = {name: (dims, np.full([len(axes[axis]) for axis in dims], np.nan)) for name, dims in shapes.items()}
        return xr.Dataset(values, coords=axes)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``, ``ages`` (KL by steps since the keys were computed), ``sets``, ``policies``, ``motion``,
        ``claims``: one family per model; and ``ratios``: `ratio_table`.
        """
        columns = {"costs": list(COSTS), "ages": ["kl_age"], "sets": list(SETS), "motion": list(MOTION)}
        columns["policies"] = [f"policy_{name}" for name in COSTS]
        tables = {name: interval_table(measured, variables, self.seed) for name, variables in columns.items()}
        return {**{name: table[table["estimate"].notna()] for name, table in tables.items()},
                "claims": judged(interval_table(measured, ["difference"], self.seed, null=0.0)),
                "ratios": ratio_table(measured)}  # fmt: skip

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: KL by keys, a panel per change; ``motion``: changes of the strongest key by policy."""
        return {"costs": _cost_panels(measured, self.seed), "motion": _motion_panels(measured, self.seed)}


def motion_of(
    base: "Generation",
    under: Float[np.ndarray, "policy step layer head pos"],
    same: Float[np.ndarray, "policy step layer head pos"],
) -> dict[str, Float[np.ndarray, "policy source"]]:
    """`MOTION` under each policy, of the exact run's sums over the same queries, and of its sums over all queries.

    Scores are scaled to a mean of 1 over the keys of a head, because a sink is defined by the sum over all queries.
    """
    assert base.sinks is not None
    track, count = base.sinks.data, len(under)
    rows = track.isel(batch=[0] * (2 * count + 1)).assign_coords(batch=np.arange(2 * count + 1))
    score = np.concatenate([under, same, track["score"].to_numpy()])
    rows["score"] = (rows["score"].dims, score / np.nanmean(score, axis=-1, keepdims=True))
    measured = rates(SinkTrack(rows))
    sources = [[row, count + row, 2 * count] for row in range(count)]
    return {name: measured[name][sources] for name in MOTION}


def sizes_of(base: "Generation", sets: Sets, stale: Bool[np.ndarray, " step"]) -> dict[str, Any]:
    """`SETS` of the chosen keys; means over the steps with stale keys and the layers after the first."""
    assert base.sinks is not None
    score = np.nan_to_num(base.sinks.scores("percent").to_numpy()[0]).mean(axis=2)
    moved = np.nan_to_num(base.sinks["drift"].to_numpy()[0])
    found: dict[str, list[float]] = {name: [] for name in SETS}
    for keys in sets.values():
        inside = keys[stale, 1:]
        found["number"].append(float(inside.sum(axis=-1).mean()) if inside.size else np.nan)
        found["mass"].append(float((score[stale, 1:] * inside).sum(axis=-1).mean()) if inside.size else np.nan)
        found["drift"].append(float(moved[stale, 1:][inside].mean()) if inside.any() else np.nan)
    return {name: ("choice", np.array(values)) for name, values in found.items()}


def claim_values(data: xr.Dataset) -> xr.DataArray:
    """For each claim a difference that is above 0 if it holds, [claim]."""
    named = dict(_claims(data))
    return xr.DataArray([float(value) for value in named.values()], {"claim": list(named)}, "claim")


def ratio_table(measured: Mapping[str, xr.Dataset]) -> "DataFrame":
    """KL with stale sinks ÷ KL with the stale keys of each control, prompt by prompt (log_ratios.py)."""
    from pandas import DataFrame

    rows = []
    for model, data in measured.items():
        kl = data["kl"].sel(change="stale", layer=EVERYWHERE)
        for control, name in CONTROLS.items():
            first, second = (kl.sel(choice=choice).to_numpy() for choice in (TREATED[control], control))
            rows += ratio_rows(model, f"KL with stale sinks ÷ with stale {name}", first, second)
    return corrected(DataFrame(rows))


def _claims(data: xr.Dataset) -> Iterator[tuple[str, Any]]:
    stale, fresh = (data[list(COSTS)].sel(change=change) for change in CHANGES)
    everywhere = fresh["kl"].sel(layer=EVERYWHERE)
    for control, name in CONTROLS.items():
        sink = TREATED[control]
        excess = (stale.sel(choice=sink) - stale.sel(choice=control)).sel(layer=EVERYWHERE)
        yield f"stale sinks change predictions more than {name}", excess["kl"]
        yield f"stale sinks change more proposals than {name}", excess["proposals"]
        yield f"fresh sinks save more than {name}", everywhere.sel(choice=control) - everywhere.sel(choice=sink)
    yield "fresh sinks save something", everywhere.sel(choice="none") - everywhere.sel(choice="sink")
    for layer in data["layer"].to_numpy():
        where = "all layers" if layer == EVERYWHERE else f"layer {layer}"
        if layer != EVERYWHERE:
            alone = stale["kl"].sel(layer=layer)
            yield (f"{where}: stale sinks change predictions more than {CONTROLS['same_mass']}",
                   alone.sel(choice="sink") - alone.sel(choice="same_mass"))  # fmt: skip
        left = fresh["kl"].sel(layer=layer)
        yield (
            f"{where}: fresh sinks save more than half of the cost",
            left.sel(choice="none") / 2 - left.sel(choice="sink"),
        )
    cost = data["policy_kl"]
    yield "KeepSinks costs less than DualCache", cost.sel(policy="dual") - cost.sel(policy="keep-sinks")
    yield (
        "the negation of KeepSinks costs less than KeepSinks",
        cost.sel(policy="keep-sinks") - cost.sel(policy="not keep-sinks"),
    )
    for policy, name in POLICIES.items():
        for measure, what in (("jump_share", "strongest keys"), ("sink_jump_share", "sinks")):
            rate = data[measure].sel(policy=policy)
            yield f"{what} move less under {name}", rate.sel(source="same queries") - rate.sel(source="policy")


def _cost_panels(measured: Mapping[str, xr.Dataset], seed: int) -> "Figure":
    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import interval_dots
    from sinklens.views.figures import panels

    table = interval_table(measured, ["kl"], seed)
    table = table[table["layer"] == EVERYWHERE]
    figure, axes = panels(len(CHANGES), columns=len(CHANGES), size=(6, 4))
    for (change, meaning), ax in zip(CHANGES.items(), axes, strict=True):
        interval_dots(table[table["change"] == change], "choice", ax, names=KEYS).set(
            title=meaning, xlabel=wrapped(f"{COSTS['kl']}; 95 % intervals over prompts; {SINK}", 50)
        )
    return figure


def _motion_panels(measured: Mapping[str, xr.Dataset], seed: int) -> "Figure":
    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import interval_dots
    from sinklens.views.figures import panels

    table = interval_table(measured, list(MOTION), seed)
    table["run"] = table["policy"].map(POLICIES) + ", " + table["source"].map(SOURCES)
    figure, axes = panels(len(MOTION), columns=len(MOTION), size=(6.5, 5))
    for (measure, meaning), ax in zip(MOTION.items(), axes, strict=True):
        interval_dots(table[table["measure"] == measure], "run", ax).set(xlabel=wrapped(meaning, 50))
    return figure
