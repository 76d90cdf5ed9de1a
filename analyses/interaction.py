"""Does a model need its sinks more when its attention is restricted?

    sinklens analyse interaction tiny-llada tiny-llama

The paper (Rulli et al., 2510.15731) explains the robustness of diffusion models by bidirectional attention. If that is
the reason, masking sinks should cost more once attention is one-sided. Each *window* restricts the attention of every
layer: to earlier positions (causal attention), to later ones, or to near ones. In each, the strongest keys of the run
with that window and nothing masked are masked at every step; or, as controls, as many weaker random keys of the head,
or as many as receive the attention of the strongest. The *interaction* is the cost of masking in a window minus the
cost without one, prompt by prompt: a difference of differences. An autoregressive model is causal, so only the near
window applies.

Caveat: a model that was trained without a window answers few problems in one, and what it no longer answers, masking
cannot cost. Look at ``base`` first; the KL divergence from the run with the window alone has no such floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import each_prompt, is_right
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.study import Study
from sinklens.experiments import compare
from sinklens.interventions import MaskedLogits, MaskSinks, WindowAttention
from sinklens.interventions.controls import Pick
from sinklens.model.prompts import SinglePrompt
from sinklens.runs import generate
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

NEAR = 8
WINDOWS = {
    "none": "unrestricted",
    "earlier": "earlier positions only (causal)",
    "later": "later positions only",
    "near": f"{NEAR} positions to each side",
}
DRAWN: tuple[Pick, ...] = ("random", "same_mass")
CONTROLS = {"random": "random key", "same_mass": "random keys with as much attention"}
PICKS = {"strongest": "strongest key", **CONTROLS}
MEASURES = {
    "cost": "share of word problems lost by masking, in the same window",
    "right": "share of word problems answered right",
    "kl": "KL divergence from the run with the window alone (nats per undecided position, under replay)",
}
BASE = {"base": "share of word problems answered right with the window alone"}


@dataclass
class Interaction(Study):
    """See the module.

    Attributes:
        top_k: number of keys masked per head.
    """

    name: ClassVar[str] = "interaction"
    scored: ClassVar[str] = "some"
    together: ClassVar[bool] = False
    top_k: int = 1

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, window, pick] and ``base`` [prompt, window]; NaN for windows that do not apply."""
        possible = windows(model.causal)

        def one(prompt: SinglePrompt) -> xr.Dataset:
            parts = [self._in_window(model, prompt, settings, possible.get(name)) for name in WINDOWS]
            return xr.concat(parts, dim="window").assign_coords(window=list(WINDOWS), pick=list(PICKS))

        return each_prompt(prompts, one)

    def _in_window(
        self, model: "Model", prompt: SinglePrompt, settings: Settings, window: list[WindowAttention] | None
    ) -> xr.Dataset:
        values = {name: np.full(len(PICKS), np.nan) for name in MEASURES}
        base_right = np.nan
        if window is not None:
            kept = MaskedLogits()
            base = self._run(model, prompt, settings, [*window, kept], record_sinks=True)
            base_right = is_right(prompt, base.text[0] or "", self.answers)
            for place, mask in enumerate(self.masks(base).values()):
                free = self._run(model, prompt, settings, [*window, mask])
                seen = MaskedLogits()
                replayed = self._run(model, prompt, settings, [*window, mask, seen], replay=base)
                values["right"][place] = is_right(prompt, free.text[0] or "", self.answers)
                values["kl"][place] = float(compare(base, replayed, kept.kept, seen.kept)["kl"].mean())
            values["cost"] = base_right - values["right"]
        return xr.Dataset({name: ("pick", value) for name, value in values.items()} | {"base": base_right})

    def masks(self, base: "Generation") -> dict[str, MaskSinks]:
        """One intervention per pick, from the run with the window alone."""
        shared: dict[str, Any] = {"top_k": self.top_k, "source": base, "seed": self.seed}
        controls: dict[str, MaskSinks] = {pick: MaskSinks(**shared, pick=pick, persistent=True) for pick in DRAWN}
        return {"strongest": MaskSinks(**shared), **controls}

    def _run(self, model: "Model", prompt: SinglePrompt, settings: Settings, hooks: list[Any], **more: Any) -> Any:
        more = {"record_sinks": False, **more}
        return generate(
            model, [prompt], hooks=hooks, seed=self.seed, chat_template=self.chat_template, progress=False,
            **more, **settings,
        )  # fmt: skip

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``costs``: every measure by window and pick; ``interactions``: cost and KL in a window minus without one."""
        costs = interval_table(measured, [*MEASURES, *BASE], self.seed)
        named = costs.assign(meaning=costs["measure"].map(MEASURES | BASE))
        return {"costs": named[named["estimate"].notna()], "interactions": interactions(measured, self.seed)}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: word problems lost and KL by window, a row per model."""
        from sinklens.views.effects import costs_by_cell

        table = interval_table(measured, ["cost", "kl"], self.seed)
        return {"costs": costs_by_cell(table, "measure", "window", "pick", WINDOWS, PICKS, "cost of masking")}


def windows(causal: bool) -> dict[str, list[WindowAttention]]:
    """The windows of `WINDOWS` that apply to a model."""
    near = WindowAttention(left=NEAR) if causal else WindowAttention(width=NEAR)
    if causal:
        return {"none": [], "near": [near]}
    return {"none": [], "earlier": [WindowAttention(right=0)], "later": [WindowAttention(left=0)], "near": [near]}


def interactions(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Cost and KL of a window minus those without one, paired by prompt, for each pick, and for the excess of the
    strongest keys over each control; each with a verdict on whether it is above 0.
    """
    found = {}
    for model, data in measured.items():
        values = data[["cost", "kl"]]
        excess = values.sel(pick="strongest", drop=True) - values.sel(pick=list(CONTROLS))
        named = ["excess" if pick == "random" else f"excess over {pick}" for pick in CONTROLS]
        every = xr.concat([values, excess.assign_coords(pick=named)], dim="pick")
        found[model] = every.sel(window=list(WINDOWS)[1:]) - every.sel(window="none", drop=True)
    table = interval_table(found, ["cost", "kl"], seed, {"cost": (-2, 2)}, null=0.0)
    return judged(table[table["estimate"].notna()].reset_index(drop=True), above="more")
