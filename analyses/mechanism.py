"""Why does a diffusion model lose so little when its sinks are masked?

    sinklens analyse mechanism tiny-llada tiny-llama

The paper's explanation (Rulli et al., 2510.15731, Sec. 4.3, where it is not measured) has two parts that can be:

1. *Masking a sink makes the positions that attended to it less certain.* Under replay, at every step, the undecided
   positions are split at the median of their attention (in the unchanged model, mean over layers and heads) to the keys
   that are masked; told is the change of the likeliest token's probability in either half, and its correlation with the
   attention. Keys are masked as the paper does it, steadily, and at random as control (swept.py).
2. *Unmasking by confidence postpones those positions, and that is what makes the model robust.* Then robustness should
   vanish when tokens are unmasked from left to right, or in random order. Told is what masking costs under each order,
   one token per step, beside the same number of random keys.

An autoregressive model has one order and decides one position at a time: only its costs are told, by position.

One way this fails: a probability of 1 cannot rise and one near 0 hardly falls, and positions that attend to sinks may
be the uncertain ones to begin with. The control has the same two halves by their attention to other keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.answers import KEYS, each_prompt, free_effects, masked, unchanged
from sinklens.analyses.intervals import interval_table, verdict
from sinklens.analyses.study import Study
from sinklens.experiments import attention_to, compare
from sinklens.interventions import MaskedLogits
from sinklens.sampling import AutoregressiveSettings, LladaSettings, settings_for
from sinklens.tracing import generate

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.hooks.points import Point
    from sinklens.model import Model
    from sinklens.runs.result import Generation

PICKS = tuple(KEYS)
TOP_K = (1, 5)  # keys masked for the costs
CONFIDENCE = {
    "change_attended": "change of confidence at positions that attended more than the median to the masked keys",
    "change_rest": "change of confidence at the other positions",
    "difference": "the former less the latter",
    "correlation": "correlation of the change with the attention, over positions",
}
ORDERS = {"confidence": "most confident first", "position": "from left to right", "random": "in random order"}
COSTS = {
    "right": "word problems answered right",
    "cost": "word problems lost by masking",
    "kept": "of those answered right with nothing masked, the share still right",
    "changed": "answers that change",
}


@dataclass
class Mechanism(Study):
    """See the module."""

    name: ClassVar[str] = "mechanism"
    together: ClassVar[bool] = False

    def measure(self, model: "Model", prompts: Sequence[Any], settings: Mapping[str, Any]) -> xr.Dataset:
        """`CONFIDENCE` [prompt, pick], its first two also by step (``…_step``); `COSTS` [prompt, order, pick, top_k],
        and ``base`` [prompt, order], the word problems answered right with nothing masked.
        """

        def one(prompt: Any) -> xr.Dataset:
            return xr.merge([self._confidence(model, prompt, settings), self._costs(model, prompt, settings)])

        return each_prompt(prompts, one)

    def _confidence(self, model: "Model", prompt: Any, settings: Mapping[str, Any]) -> xr.Dataset:
        if model.config.is_causal:
            nothing = dict.fromkeys(CONFIDENCE, ("pick", np.full(len(PICKS), np.nan)))
            steps = {
                f"{name}_step": (("pick", "step"), np.full((len(PICKS), 1), np.nan)) for name in list(CONFIDENCE)[:2]
            }
            return xr.Dataset(nothing | steps, coords={"pick": list(PICKS), "step": [0]})
        kept = MaskedLogits()
        asked: dict[str, Any] = {"seed": self.seed, "chat_template": self.chat_template, "progress": False, **settings}
        base = generate(model, [prompt], hooks=[kept], record_sinks=False, **asked)
        found = []
        for mask in masked(unchanged(self, model, prompt, settings)).values():
            hidden, changed = MaskedKeys(model), MaskedLogits()
            hooks: list[Any] = [mask, *hidden.hooks(), changed]
            run = generate(model, [prompt], hooks=hooks, record_sinks=False, replay=base, **asked)
            mass = attention_to(base, hidden.keys(base))
            compared = compare(base, run, kept.kept, changed.kept, above_median(base, mass))
            found.append(changes(compared, correlations(base, mass, kept.kept, changed.kept)))
        return xr.concat(found, dim="pick").assign_coords(pick=list(PICKS))

    def _costs(self, model: "Model", prompt: Any, settings: Mapping[str, Any]) -> xr.Dataset:
        sizes, parts = (len(PICKS), len(TOP_K)), []
        possible = orders(model, settings)
        for order in ORDERS:
            if order not in possible:
                nothing = (("pick", "top_k"), np.full(sizes, np.nan))
                parts.append(xr.Dataset({**dict.fromkeys(COSTS, nothing), "base": ((), np.nan)}))
                continue
            track, listed = unchanged(self, model, prompt, possible[order]), dict[str, Any](none=[])
            every = {top_k: masked(track, top_k) for top_k in TOP_K}
            listed |= {f"{pick} {top_k}": every[top_k][pick] for pick in PICKS for top_k in TOP_K}
            found = free_effects(self, model, prompt, possible[order], listed)
            base, right = float(found["right"][0]), found["right"].to_numpy()[1:].reshape(sizes)
            values = {
                "right": right,
                "cost": base - right,
                "kept": right if base == 1 else np.full(sizes, np.nan),
                "changed": found["changed"].to_numpy()[1:].reshape(sizes),
            }
            parts.append(xr.Dataset({**{n: (("pick", "top_k"), v) for n, v in values.items()}, "base": ((), base)}))
        places = {"order": list(ORDERS), "pick": list(PICKS), "top_k": list(TOP_K)}
        return xr.concat(parts, dim="order").assign_coords(places)

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``confidence``: part 1; ``costs``: part 2; ``claims``: what follows, with verdicts."""
        confidence = interval_table(measured, list(CONFIDENCE), self.seed)
        costs = interval_table(measured, [*COSTS, "base"], self.seed)
        return {
            "confidence": confidence.assign(meaning=confidence["measure"].map(CONFIDENCE)),
            "costs": costs.assign(meaning=costs["measure"].map({**COSTS, "base": "right with nothing masked"})),
            "claims": claims(measured, self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``confidence``: part 1, over all and by step; ``costs``: part 2, a panel per number of keys and model."""
        from sinklens.views.effects import confidence_changes, costs_by_order

        tables = self.tables(measured)
        steps = interval_table(measured, [f"{name}_step" for name in list(CONFIDENCE)[:2]], self.seed)
        return {
            "confidence": confidence_changes(tables["confidence"], steps, CONFIDENCE, KEYS),
            "costs": costs_by_order(tables["costs"], ORDERS, KEYS, COSTS["cost"]),
        }


def orders(model: "Model", settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The orders of `ORDERS` that the model's sampler can unmask in, one token per step, with the settings for each."""
    plain = {name: value for name, value in settings.items() if name not in ("threshold", "steps")}
    made = settings_for(model, dict(settings))
    if isinstance(made, AutoregressiveSettings):
        return {"position": plain}
    plain |= {"gen_length": made.gen_length, "steps": made.gen_length}
    if isinstance(made, LladaSettings):
        plain |= {"block_length": made.block_length}
        return {
            "confidence": {**plain, "remasking": "low_confidence"},
            "position": {**plain, "remasking": "low_confidence", "block_length": 1},
            "random": {**plain, "remasking": "random"},
        }
    by_confidence = "entropy" if made.alg == "origin" else made.alg
    return {"confidence": {**plain, "alg": by_confidence}, "random": {**plain, "alg": "origin"}}


class MaskedKeys:
    """Which keys were masked, read from the additive mask of a run of one row.

    Its hooks belong behind the intervention that masks.
    """

    def __init__(self, model: "Model") -> None:
        self._layers, self._seen = model.cfg.n_layers, dict[tuple[int, int], Tensor]()

    def hooks(self) -> list[tuple[Any, Any]]:
        """To be given to the run."""
        return [(lambda name: name.endswith("attn.hook_attn_mask"), self._see)]

    def _see(self, bias: Float[Tensor, "batch head query key"], hook: "Point") -> None:
        assert hook.step is not None
        self._seen[hook.step, hook.layer()] = (bias[:, :, 0] == -torch.inf).cpu()

    def keys(self, run: "Generation") -> Bool[xr.DataArray, "batch step layer head pos"]:
        """The keys by step, layer and head, as `attention_to` takes them."""
        steps = [
            torch.stack([self._seen[step, layer] for layer in range(self._layers)], 1) for step in range(run.steps_run)
        ]
        return xr.DataArray(torch.stack(steps, 1).numpy(), dims=("batch", "step", "layer", "head", "pos"))


def above_median(run: "Generation", mass: Float[np.ndarray, "batch step pos"]) -> Bool[np.ndarray, "batch step pos"]:
    """Undecided positions whose value is above the median of the undecided ones of their row and step."""
    undecided = run.canvas[:, :-1].eq(_mask(run)).numpy() & run.real.numpy()[:, None]
    known = np.where(undecided & (mass >= 0), mass, np.nan)
    middle = np.nanmedian(np.where(undecided.any(-1, keepdims=True), known, 0.0), axis=-1, keepdims=True)
    return np.where(np.isnan(known), False, known > middle)


def _mask(run: "Generation") -> int:
    assert run.model.mask_token_id is not None
    return run.model.mask_token_id


def correlations(
    run: "Generation",
    mass: Float[np.ndarray, "batch step pos"],
    before: Mapping[int, Tensor],
    after: Mapping[int, Tensor],
) -> float:
    """Pearson's correlation of a position's change of confidence with its attention, mean over the steps of one row.

    Steps with fewer than three undecided positions, or in which either is constant, tell nothing.
    """
    found = []
    for step in sorted(before.keys() & after.keys()):
        sure, sure_changed = (part[step].double().softmax(-1).amax(-1).numpy() for part in (before, after))
        places = run.canvas[0, step].eq(_mask(run)).numpy()
        change, given = sure_changed - sure, mass[0, step, places]
        if len(change) > 2 and np.ptp(change) > 0 and np.ptp(given) > 0:
            found.append(np.corrcoef(change, given)[0, 1])
    return float(np.mean(found)) if found else float("nan")


def changes(compared: xr.Dataset, correlation: float) -> xr.Dataset:
    """`CONFIDENCE` of one row, means over the steps that have both halves, and its first two by step."""
    halves = compared[["change_attended", "change_rest"]].isel(batch=0)
    both = halves["change_attended"].notnull() & halves["change_rest"].notnull()
    halves = halves.where(both)
    means = halves.mean("step")
    steps = {f"{name}_step": value for name, value in halves.data_vars.items()}
    difference = means["change_attended"] - means["change_rest"]
    return xr.Dataset({**means.data_vars, "difference": difference, "correlation": ((), correlation), **steps})


def claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """What should be below or above 0 if the explanation holds, paired by prompt, with a verdict each."""
    from pandas import concat

    rows = []
    for (name, data), pick in product(measured.items(), PICKS[:2]):
        difference, cost = data["difference"].sel(pick=pick), data["cost"].sel(pick=pick)
        excess = cost - data["cost"].sel(pick="random")
        asked = {
            "confidence falls more where the masked keys were attended to": -difference,
            "… and more so than with random keys": data["difference"].sel(pick="random") - difference,
            "masking costs more from left to right than by confidence": _further(cost, "position"),
            "masking costs more in random order than by confidence": _further(cost, "random"),
            "masking costs more than random keys, by confidence": excess.sel(order="confidence"),
            "… from left to right": excess.sel(order="position"),
            "… in random order": excess.sel(order="random"),
        }
        for claim, values in asked.items():
            part = xr.Dataset({"above": values.drop_vars(("pick", "order"), errors="ignore")})
            rows.append(interval_table({name: part}, ["above"], seed).assign(measure=claim, pick=pick))
    table = concat(rows, ignore_index=True)
    table["verdict"] = [verdict(row.estimate, row.low, row.high, 0.0, "holds", "no") for row in table.itertuples()]
    return table


def _further(cost: xr.DataArray, order: str) -> xr.DataArray:
    return cost.sel(order=order) - cost.sel(order="confidence")
