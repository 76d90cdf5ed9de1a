"""Do sinks matter more to a cache than other keys, and does a cache hold sinks still?

    sinklens analyse caching tiny-llada tiny-dream tiny-mmada --limit 20

A cache reuses keys and values of earlier steps. On the canvases of the exact run (``replay=``), this study leaves
chosen keys stale and compares the predictions of each step with the exact ones (`chosen_keys` says which keys, and when
they are computed again):

- ``costs``: only the sinks of each layer stale, or as many other keys, matched by attention, kind of token or position,
  or random; and the reverse, everything that is decided stale *but* these keys.
- ``policies``: the same for the cache policies `DualCache`, `DelayedCache`, `KeepSinks` and its negation, with a
  complete step every `every` steps.
- ``motion``: how often strongest keys change under each policy, beside the exact run *with the column sums of the same
  queries*. A step of a cache computes fewer queries, and sums over fewer queries move more; both have the same here.
- ``claims``: differences, paired by prompt.

Caveat: a control matches one property at a time, and `same_mass` falls short of the sinks' mass where the rest has too
little. Sinks on undecided positions are left out: a step computes their keys, whatever the policy.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.estimates.ratios import ratio_table
from sinklens.analyses.estimates.tables import interval_table, judged, known_mean
from sinklens.analyses.nulls import rates
from sinklens.analyses.runs import noise_of
from sinklens.analyses.study import SINK, Study, dot_panels
from sinklens.interventions import MaskedLogits
from sinklens.interventions.controls import largest, nearest, of_mass, rest_of, same_kind
from sinklens.model.prompts import SinglePrompt
from sinklens.runs.result import Generation
from sinklens.sampling import DelayedCache, DualCache, KeepSinks, Planned, Policy, Refresh
from sinklens.sampling.settings import Settings
from sinklens.sinks import Detector, EpsilonOverMean, Record, SinkTrack
from sinklens.sinks.kinds import kinds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

CHANGES = {"stale": "these keys stale, all others fresh", "fresh": "these keys fresh, all other decided ones stale"}
CONTROLS = {
    "same_mass": "random keys with as much attention",
    "same_kind": "random keys of the same kinds of token",
    "nearest": "the nearest keys",
    "random": "as many random keys",
}
KEYS = {"none": "no key", "sink": "sinks", "sink_of_kind": "sinks with another key of their kind", **CONTROLS}
TREATED = {control: "sink_of_kind" if control == "same_kind" else "sink" for control in CONTROLS}
"""The sinks that each control is compared with: `same_kind` has no key for a sink without another key of its kind."""

CONDITIONS = [pair for pair in product(CHANGES, KEYS) if pair != ("stale", "none")]  # that is the exact run
Sets = dict[str, Bool[np.ndarray, "step layer pos"]]
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
    """

    name: ClassVar[str] = "caching"
    together: ClassVar[bool] = False
    every: int = 8
    sink: Detector = field(default_factory=EpsilonOverMean)

    def refusal(self, model: "Model") -> str:
        attention = model.family_record.attention
        if model.tree.timed:
            return "a model to which no cache policy applies, as its keys change with the noise level. Leave it out."
        if attention == "bidirectional" and not model.tree.architecture.encoder:
            return ""
        return f"a model to which no cache policy applies, as its attention is {attention}. Leave it out."

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`COSTS` [change, choice], ``policy_…`` [policy], `MOTION` [policy, source] and ``difference`` [claim]."""
        from pandas import DataFrame, MultiIndex

        logits = MaskedLogits()
        base = self.generate(model, [prompt], settings, hooks=[logits]).run
        allowed = candidates(base, self.every)
        sets = chosen_keys(base, allowed, self.sink, self.every, self.seed)
        stale = np.arange(base.steps_run) % self.every > 0
        fresh = [fresh_keys(*condition, sets, allowed) for condition in CONDITIONS]
        planned = zip(COSTS, self._planned(base, prompt, settings, fresh, logits), strict=True)
        means = {name: [known_mean(row[stale]) for row in rows] for name, rows in planned}
        cells = DataFrame(means, MultiIndex.from_tuples(CONDITIONS, names=["change", "choice"])).to_xarray()
        found = cells.reindex(change=list(CHANGES), choice=list(KEYS)).assign(
            self._policies(base, prompt, settings, logits)
        )
        found = found.assign_coords(policy=list(POLICIES), source=list(SOURCES))
        return found.assign(difference=claim_values(found))

    def _planned(
        self,
        base: Generation,
        prompt: SinglePrompt,
        settings: Settings,
        fresh: Sequence[Bool[np.ndarray, "step layer pos"]],
        logits: MaskedLogits,
    ) -> tuple[Float[np.ndarray, "plan step"], Float[np.ndarray, "plan step"]]:
        """`costs` of every plan, all in one batch."""
        seen, count = MaskedLogits(), len(fresh)
        self.generate(
            base.model, [prompt] * count, settings, hooks=[seen], record_sinks=False,
            replay=base.canvas.repeat(count, 1, 1), cache=Planned(np.stack(fresh)),
        )  # fmt: skip
        split = {step: kept.view(count, -1, kept.shape[-1]) for step, kept in seen.kept.items()}
        return costs(logits.kept, [{step: kept[row] for step, kept in split.items()} for row in range(count)])

    def policies(self) -> dict[str, Policy]:
        """The policies of `POLICIES`, with a complete step every `every` steps."""
        keep = KeepSinks(self.sink)
        inner = {"dual": DualCache(), "keep-sinks": keep, "not keep-sinks": ~keep}
        every = {name: Refresh(self.every, within=policy) for name, policy in inner.items()}
        return {**every, "delayed": DelayedCache(self.every)}

    def _policies(
        self, base: Generation, prompt: SinglePrompt, settings: Settings, logits: MaskedLogits
    ) -> dict[str, Any]:
        """What the policies cost, and the motion of the strongest keys under each."""
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
        found = zip(COSTS, costs(logits.kept, kept), strict=True)
        means = {f"policy_{name}": ("policy", [known_mean(of_run) for of_run in values]) for name, values in found}
        motion = motion_of(base, np.stack(scores), self._sums(base, prompt, settings, torch.stack(members)))
        return {**means, **{name: (("policy", "source"), rates_of) for name, rates_of in motion.items()}}

    def _sums(
        self,
        base: Generation,
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

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``, ``policies``, ``motion``, ``claims``: one family per model; and ``ratios``: `ratio_pairs`."""
        columns = {"costs": list(COSTS), "motion": list(MOTION), "policies": [f"policy_{name}" for name in COSTS]}
        tables = {name: interval_table(measured, variables, self.seed) for name, variables in columns.items()}
        return {
            **{name: table[table["estimate"].notna()] for name, table in tables.items()},
            "claims": judged(interval_table(measured, ["difference"], self.seed, null=0.0)),
            "ratios": ratio_table({name: ratio_pairs(data) for name, data in measured.items()}),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: KL by keys, a panel per change; ``motion``: changes of the strongest key by policy."""
        costs = interval_table(measured, ["kl"], self.seed)
        moved = interval_table(measured, list(MOTION), self.seed)
        moved["run"] = moved["policy"].map(POLICIES) + ", " + moved["source"].map(SOURCES)
        label = f"{COSTS['kl']}; 95 % intervals; {SINK}"
        return {
            "costs": dot_panels(costs, "change", CHANGES, "choice", (6, 4), label, names=KEYS),
            "motion": dot_panels(moved, "measure", MOTION, "run", (6.5, 5)),
        }


def motion_of(
    base: Generation,
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


def claim_values(data: xr.Dataset) -> xr.DataArray:
    """For each claim a difference that is above 0 if it holds, [claim]."""
    named = dict(_claims(data))
    return xr.DataArray([float(value) for value in named.values()], {"claim": list(named)}, "claim")


def ratio_pairs(data: xr.Dataset) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """KL with stale sinks, and with the stale keys of each control, by prompt."""
    kl = data["kl"].sel(change="stale")
    return {
        f"KL with stale sinks ÷ with stale {name}": (
            kl.sel(choice=TREATED[control]).to_numpy(),
            kl.sel(choice=control).to_numpy(),
        )
        for control, name in CONTROLS.items()
    }


def _claims(data: xr.Dataset) -> Iterator[tuple[str, Any]]:
    stale, fresh = (data[list(COSTS)].sel(change=change) for change in CHANGES)
    left, cost = fresh["kl"], data["policy_kl"]
    for control, name in CONTROLS.items():
        sink = TREATED[control]
        excess = stale.sel(choice=sink) - stale.sel(choice=control)
        yield f"stale sinks change predictions more than {name}", excess["kl"]
        yield f"stale sinks change more proposals than {name}", excess["proposals"]
        yield f"fresh sinks save more than {name}", left.sel(choice=control) - left.sel(choice=sink)
    yield "fresh sinks save something", left.sel(choice="none") - left.sel(choice="sink")
    yield "fresh sinks save more than half of the cost", left.sel(choice="none") / 2 - left.sel(choice="sink")
    yield "KeepSinks costs less than DualCache", cost.sel(policy="dual") - cost.sel(policy="keep-sinks")
    yield (
        "the negation of KeepSinks costs less than KeepSinks",
        cost.sel(policy="keep-sinks") - cost.sel(policy="not keep-sinks"),
    )
    for policy, name in POLICIES.items():
        for measure, what in (("jump_share", "strongest keys"), ("sink_jump_share", "sinks")):
            rate = data[measure].sel(policy=policy)
            yield f"{what} move less under {name}", rate.sel(source="same queries") - rate.sel(source="policy")


def candidates(run: Generation, every: int) -> Bool[np.ndarray, "step pos"]:
    """Positions of a run of one prompt whose keys may be stale: those decided when the episode begins, and none in its
    first step. A step has to compute the others, to decide them; where logits predict the next position, also those
    before them.
    """
    undecided = run.undecided[0].numpy()
    needed = undecided.copy()
    if run.model.family_record.shift:
        needed[:, :-1] |= undecided[:, 1:]
    steps = np.arange(run.steps_run)
    allowed = ~needed[steps - steps % every] & run.real[0].numpy()
    return allowed & (steps % every > 0)[:, None]


def chosen_keys(run: Generation, allowed: Bool[np.ndarray, "step pos"], sink: Detector, every: int, seed: int) -> Sets:
    """The keys of `KEYS` at every step, from the scores of the step that begins the episode.

    A run is divided into *episodes* of `every` steps. The first step of an episode computes everything, and the keys
    are chosen from its scores; in the others they are stale, always the same ones. So all keys of an episode have the
    same age, whichever they are: sinks that last do not get older than keys drawn at random.

    A position counts as a sink of a layer if it is one in any head; its mass is the mean of its scores over heads.
    Controls are weaker than every sink of the layer (`sinklens.interventions.controls`).

    Args:
        run: an exact run of one prompt.
        allowed: `candidates`.
    """
    assert run.sinks is not None
    scores, found = run.sinks.scores().to_numpy()[0], run.sinks.detect(sink).to_numpy()[0].any(axis=2)
    codes = torch.from_numpy(kinds(run.sinks).to_numpy()[0].astype(np.int64))
    sets = {name: np.zeros((run.steps_run, *found.shape[1:]), dtype=bool) for name in KEYS}
    for start in range(0, run.steps_run - 1, every):
        inside = slice(start + 1, start + every)
        mass = torch.from_numpy(np.nan_to_num(scores[start]).mean(axis=1, keepdims=True))
        free = torch.from_numpy(allowed[start + 1])[None, None].expand_as(mass)
        sinks = torch.from_numpy(found[start])[:, None] & free
        kind = codes[start].expand(len(mass), 1, -1)
        order = torch.from_numpy(noise_of(run.canvas[0, 0], seed, start).random(tuple(mass.shape)).astype(np.float32))
        rest = rest_of(mass, sinks, free)
        of_kind = same_kind(order, sinks, rest, kind)
        chosen = {
            "sink": sinks,
            "sink_of_kind": same_kind(mass, of_kind, sinks, kind),  # as many of each kind, the strongest first
            "same_mass": of_mass(order, mass, sinks, rest),
            "same_kind": of_kind,
            "nearest": nearest(mass, sinks, rest),
            "random": largest(order, rest, sinks.sum(dim=-1, keepdim=True)),
        }
        for name, keys in chosen.items():
            sets[name][inside] = keys[:, 0].numpy()
    return sets


def fresh_keys(
    change: str,
    choice: str,
    sets: Mapping[str, Bool[np.ndarray, "step layer pos"]],
    allowed: Bool[np.ndarray, "step pos"],
) -> Bool[np.ndarray, "step layer pos"]:
    """What a condition computes, for `sinklens.sampling.Planned`."""
    return ~sets[choice] if change == "stale" else ~allowed[:, None] | sets[choice]


def costs(
    base: Mapping[int, Float[Tensor, "masked vocab"]], changed: Sequence[Mapping[int, Float[Tensor, "masked vocab"]]]
) -> tuple[Float[np.ndarray, "run step"], Float[np.ndarray, "run step"]]:
    """KL divergence of each changed run from the base run, Σ_v p(v) log(p(v) / q(v)), and the share of positions whose
    most likely token differs; means over the undecided positions whose logits every run has, NaN without one.

    Args:
        base, changed: `MaskedLogits.kept` on the same canvases.
    """
    kl, other = (np.full((len(changed), len(base)), np.nan) for _ in range(2))
    for step, logits in base.items():
        runs = torch.stack([kept[step] for kept in changed]).double()
        known = ~runs.isnan().any(dim=-1).any(dim=0)
        p, q = logits.double()[known].log_softmax(-1), runs[:, known].log_softmax(-1)
        if len(p):
            parts = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
            kl[:, step] = parts.sum(-1).mean(-1).numpy()
            other[:, step] = (p.argmax(-1) != q.argmax(-1)).double().mean(-1).numpy()
    return kl, other
