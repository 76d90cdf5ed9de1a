"""Why does a diffusion model lose so little when its sinks are masked?

    sinklens analyse mechanism tiny-llada tiny-llama

The paper's explanation (Rulli et al., 2510.15731, Sec. 4.3, not measured there) has two parts that can be measured:

1. *Masking a sink makes the positions that attended to it less certain.* Under replay, at every step, the undecided
   positions are split at the median of their attention (in the unchanged model, mean over layers and heads) to the
   masked keys. Reported are the change of the likeliest token's probability in each half, and its correlation with the
   attention. Keys are masked as in the paper, steadily, and at random as a control (answers.py).
2. *Unmasking by confidence postpones those positions, which makes the model robust.* If so, robustness should vanish
   when tokens are unmasked from left to right, or in random order. Reported is what masking costs in each order, one
   token per step, compared with the same number of random keys.

An autoregressive model has one order and decides one position at a time, so only its costs by position are reported.

Caveat: a probability of 1 cannot rise and one near 0 can hardly fall, and positions that attend to sinks may be the
uncertain ones to begin with. In the control, the two halves are split by attention to the random keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.analyses.answers import KEYS, costs_over, masked, unchanged
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.experiments import compare, of_step
from sinklens.families.dream import DreamSettings
from sinklens.families.llada import LladaSettings
from sinklens.families.samplers import settings_for
from sinklens.interventions import MaskedLogits
from sinklens.model.prompts import SinglePrompt
from sinklens.runs import generate
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

PICKS = tuple(KEYS)
TOP_K = (1, 5)  # keys masked for the costs
CONFIDENCE = {
    "change_attended": "change of confidence at positions with above-median attention to the masked keys",
    "change_rest": "change of confidence at the other positions",
    "difference": "change at those positions minus change at the others",
    "correlation": "correlation of the change with the attention, over positions",
}
ORDERS = {"confidence": "most confident first", "position": "from left to right", "random": "in random order"}
COSTS = {
    "right": "share of word problems answered right",
    "cost": "share of word problems lost by masking",
    "kept": "share still answered right, of those right with nothing masked",
    "changed": "share of answers that change",
}
# Ranges of a difference of two costs: in one order, both are measured from the same unmasked answer; in two orders,
# from two.
ONE_PAIR, TWO_PAIRS = {"above": (-1, 1)}, {"above": (-2, 2)}


@dataclass
class Mechanism(Study):
    """See the module."""

    name: ClassVar[str] = "mechanism"
    scored: ClassVar[str] = "some"
    needs_mask_token: ClassVar[str] = "its steps accept tokens and take them back, so positions are decided in no order"
    together: ClassVar[bool] = False

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """`CONFIDENCE` [pick], its first two also by step (``…_step``); `COSTS` [order, pick, top_k]; and ``base``
        [order], the share of word problems answered right with nothing masked.
        """
        axes: dict[str, list[Any]] = {"pick": list(PICKS), "top_k": list(TOP_K)}
        found = {}
        for order, within in orders(model, settings).items():
            track = unchanged(self, model, prompt, within)
            listed = {f"{pick} {top_k}": mask for top_k in TOP_K for pick, mask in masked(track, top_k).items()}
            costs = costs_over(self, model, prompt, within, axes, listed).drop_vars("control_found")
            found[order] = costs.assign(kept=costs["right"].where(costs["base"] == 1))
        every = xr.concat(found.values(), dim="order").assign_coords(order=list(found))
        return xr.merge([self._confidence(model, prompt, settings), every.reindex(order=list(ORDERS))])

    def _confidence(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        if model.causal:
            nothing = dict.fromkeys(CONFIDENCE, ("pick", np.full(len(PICKS), np.nan)))
            steps = {
                f"{name}_step": (("pick", "step"), np.full((len(PICKS), 1), np.nan)) for name in list(CONFIDENCE)[:2]
            }
            return xr.Dataset(nothing | steps, coords={"pick": list(PICKS), "step": [0]})
        kept = MaskedLogits()
        arguments: dict[str, Any] = {
            "seed": self.seed,
            "chat_template": self.chat_template,
            "progress": False,
            **settings,
        }
        base = generate(model, [prompt], hooks=[kept], record_sinks=False, **arguments)
        found = []
        for mask in masked(unchanged(self, model, prompt, settings)).values():
            changed = MaskedLogits()
            run = generate(model, [prompt], hooks=[mask, changed], replay=base, **arguments)
            mass = attention_to(base, mask.keys(run))
            compared = compare(base, run, kept.kept, changed.kept, above_median(base, mass))
            found.append(changes(compared, correlations(base, mass, kept.kept, changed.kept)))
        return xr.concat(found, dim="pick").assign_coords(pick=list(PICKS))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``confidence``: part 1; ``costs``: part 2; ``claims``: the claims that follow from both, with verdicts."""
        confidence = interval_table(measured, list(CONFIDENCE), self.seed)
        costs = interval_table(measured, [*COSTS, "base"], self.seed)
        return {
            "confidence": confidence.assign(meaning=confidence["measure"].map(CONFIDENCE)),
            "costs": costs.assign(meaning=costs["measure"].map({**COSTS, "base": "right with nothing masked"})),
            "claims": claims(measured, self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``confidence`` and ``steps``: part 1, overall and by step; ``costs``: part 2, by number of keys and model."""
        from sinklens.analyses.figures import interval_panels

        tables = self.tables(measured)
        by_step = {f"{name}_step": CONFIDENCE[name] for name in list(CONFIDENCE)[:2]}
        steps = interval_table(measured, list(by_step), self.seed)
        return {
            "confidence": interval_panels(
                tables["confidence"], CONFIDENCE, along="pick", by="pick", series=KEYS, names=KEYS
            ),
            "steps": interval_panels(steps, by_step, along="step", by="pick", series=KEYS, xlabel="step"),
            "costs": interval_panels(
                tables["costs"].assign(keys=[f"{number:g} masked per head" for number in tables["costs"]["top_k"]]),
                {"cost": COSTS["cost"]},
                along="order",
                by="pick",
                series=KEYS,
                panel="keys",
                names=ORDERS,
            ),
        }


def orders(model: "Model", settings: Settings) -> dict[str, Settings]:
    """The orders of `ORDERS` that the model's sampler can unmask in, one token per step, with the settings for each."""
    plain = cast(Settings, {name: value for name, value in settings.items() if name not in ("threshold", "steps")})
    defaults = settings_for(model, dict(settings))
    if defaults.left_to_right:
        return {"position": plain}
    plain["gen_length"] = defaults.gen_length
    if "steps" not in defaults.settings():  # one block after the other, by its own schedule
        return {"confidence": plain}
    plain["steps"] = defaults.gen_length
    if isinstance(defaults, LladaSettings):
        plain |= {"block_length": defaults.block_length}
        return {
            "confidence": {**plain, "remasking": "low_confidence"},
            "position": {**plain, "remasking": "low_confidence", "block_length": 1},
            "random": {**plain, "remasking": "random"},
        }
    if not isinstance(defaults, DreamSettings):
        return {"confidence": plain}
    by_confidence = "entropy" if defaults.alg == "origin" else defaults.alg
    return {"confidence": {**plain, "alg": by_confidence}, "random": {**plain, "alg": "origin"}}


def above_median(run: "Generation", mass: Float[np.ndarray, "batch step pos"]) -> Bool[np.ndarray, "batch step pos"]:
    """Undecided positions whose value is above the median of the undecided ones of their row and step."""
    undecided = run.undecided[:, :-1].numpy() & run.real.numpy()[:, None]
    known = np.where(undecided & (mass >= 0), mass, np.nan)
    middle = np.nanmedian(np.where(undecided.any(-1, keepdims=True), known, 0.0), axis=-1, keepdims=True)
    return np.where(np.isnan(known), False, known > middle)


def correlations(
    run: "Generation",
    mass: Float[np.ndarray, "batch step pos"],
    before: Mapping[int, Tensor],
    after: Mapping[int, Tensor],
) -> float:
    """Pearson's correlation of a position's change of confidence with its attention, mean over the steps of one row.

    Steps with fewer than three undecided positions, or in which either quantity is constant, are skipped.
    """
    found = []
    for step in sorted(before.keys() & after.keys()):
        confidence, confidence_masked = (part[step].double().softmax(-1).amax(-1).numpy() for part in (before, after))
        places = run.undecided[0, step].numpy()
        change, attention = confidence_masked - confidence, mass[0, step, places]
        if len(change) > 2 and np.ptp(change) > 0 and np.ptp(attention) > 0:
            found.append(np.corrcoef(change, attention)[0, 1])
    return float(np.mean(found)) if found else float("nan")


def attention_to(
    run: "Generation", keys: Bool[xr.DataArray, "batch step layer head pos"]
) -> Float[np.ndarray, "batch step pos"]:
    """Attention that each query of `run` gives to `keys`, averaged over layers and heads; NaN at padding.

    NaN too at positions that are not decoded yet, and at steps that the run or `keys` lacks. Recomputed by one pass of
    the unchanged model over each step's canvas.
    """
    found = np.full((len(run.answers), run.steps_run, run.canvas.shape[2]), np.nan)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(run.model.cfg.n_layers)]
    for step in range(min(keys.sizes["step"], run.steps_run)):
        ids, real, time = of_step(run, step)
        exists = int((run.canvas[0, step] >= 0).sum())
        ids, real = ids[:, :exists], real[:, :exists]
        seen = run.model.tree.peek(ids, real, names, time, run.kind_at(step))
        wanted = torch.from_numpy(keys.isel(step=step).to_numpy())[..., :exists, None]
        mass = [(seen[name] @ wanted[:, layer].to(seen[name]))[..., 0].float() for layer, name in enumerate(names)]
        found[:, step, :exists] = np.where(real.cpu(), torch.stack(mass).mean(dim=(0, 2)).cpu(), np.nan)
    return found


def changes(compared: xr.Dataset, correlation: float) -> xr.Dataset:
    """`CONFIDENCE` of one row, as means over the steps that have both halves, and its first two also by step."""
    halves = compared[["change_attended", "change_rest"]].isel(batch=0)
    halves = halves.where(halves["change_attended"].notnull() & halves["change_rest"].notnull())
    means = halves.mean("step")
    steps = {f"{name}_step": value for name, value in halves.data_vars.items()}
    difference = means["change_attended"] - means["change_rest"]
    return xr.Dataset({**means.data_vars, "difference": difference, "correlation": ((), correlation), **steps})


def claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Quantities that should be above 0 if the explanation holds, paired by prompt, with p values and verdicts.

    All claims on a model are one family of tests (`intervals.judged`).
    """
    from pandas import concat

    rows = []
    for (name, data), pick in product(measured.items(), PICKS[:2]):
        difference, cost = data["difference"].sel(pick=pick), data["cost"].sel(pick=pick)
        excess = cost - data["cost"].sel(pick="random")
        quantities = {
            "confidence falls more where the masked keys were attended to": (-difference, {}),
            "… and more so than with random keys": (data["difference"].sel(pick="random") - difference, {}),
            "masking costs more from left to right than by confidence": (_further(cost, "position"), TWO_PAIRS),
            "masking costs more in random order than by confidence": (_further(cost, "random"), TWO_PAIRS),
            "masking costs more than random keys, by confidence": (excess.sel(order="confidence"), ONE_PAIR),
            "… from left to right": (excess.sel(order="position"), ONE_PAIR),
            "… in random order": (excess.sel(order="random"), ONE_PAIR),
        }
        for claim, (values, ranges) in quantities.items():
            part = xr.Dataset({"above": values.drop_vars(("pick", "order"), errors="ignore")})
            table = interval_table({name: part}, ["above"], seed, ranges, null=0.0)
            rows.append(table.assign(measure=claim, pick=pick))
    return judged(concat(rows, ignore_index=True))


def _further(cost: xr.DataArray, order: str) -> xr.DataArray:
    return cost.sel(order=order) - cost.sel(order="confidence")
