"""At which step is the answer known, and what would stopping there have cost?

    sinklens analyse settling tiny-llada tiny-dream

A masked diffusion model predicts all undecided positions at every step. The study asks when these predictions stop
changing, when the answer that they spell is right (Li et al., 2508.19982), and what an early exit would have returned,
by the *gap* between the probabilities of the first and the second token at every undecided position (see
`sinklens.experiments.early_exit`). Costs are paired: the complete run and its exits have the same prompt.

Caveat: answers that are known early need not be early because of diffusion: a template that ends every answer makes
most positions easy. ``lead`` counts every position alike, ``stable`` only the number after ``####``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.answers import is_right
from sinklens.analyses.estimates.tables import interval_table
from sinklens.analyses.study import Study
from sinklens.experiments import answer_emergence, early_exit, settling_steps, step_predictions
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

KNOWN = {
    "right": "share of word problems answered right",
    "lead": "steps by which a position's prediction is final before it is decided, share of all steps",
    "first": "first step whose guess is right, share of all steps",
    "stable": "first step from which all guesses are right, share of all steps",
}
EXITS = {
    "exit_right": "share of word problems answered right",
    "exit_cost": "problems lost by stopping early, share",
    "exit_share": "steps that run, share of all",
    "exit_same": "answers that stay the same, share",
}
GAPS = (0.5, 0.8, 0.9, 0.99)
RANGES = {"exit_right": (0, 1), "exit_same": (0, 1), "exit_cost": (-1, 1)}


@dataclass
class Settling(Study):
    """See the module."""

    name: ClassVar[str] = "settling"
    needs_mask_token: ClassVar[str] = "the study reads predictions at undecided positions"
    needs_complete_passes: ClassVar[str] = "the study reads predictions at undecided positions"
    scored: ClassVar[str] = "some"

    def refusal(self, model: "Model") -> str:
        """See `Study.refusal`; autoregressive models predict one token per step."""
        causal = "an autoregressive model, which predicts one token per step; leave it out." if model.causal else ""
        return super().refusal(model) or causal

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`KNOWN` [prompt], and `EXITS` [prompt, threshold], at each of `GAPS`."""
        run = self.generate(model, prompts, settings).run
        found, verdicts = step_predictions(run), [is_right(prompt, "", self.answers) for prompt in prompts]
        scored = ~np.isnan(verdicts)

        def right(row: int, text: str) -> bool:
            return is_right(prompts[row], text, self.answers) == 1

        known = answer_emergence(run, found, right)
        exits = early_exit(run, found, right, GAPS).transpose("batch", "threshold")
        data = {"right": np.where(scored, known["final"], np.nan), "lead": _lead(found, run.active.cpu().numpy())}
        data |= {name: known[name].to_numpy() for name in ("first", "stable")}
        by_gap = {name: exits[name].to_numpy().astype(float) for name in ("right", "share", "same")}
        by_gap["right"][~scored] = np.nan
        by_gap["cost"] = known["final"].to_numpy()[:, None] - by_gap["right"]
        measured = {name: ("prompt", values) for name, values in data.items()}
        measured |= {f"exit_{name}": (("prompt", "threshold"), values) for name, values in by_gap.items()}  # type: ignore[misc]
        return xr.Dataset(measured, {"threshold": list(GAPS)})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``known``: when the answer is known; ``exits``: what each early exit costs and saves."""
        known = interval_table(measured, list(KNOWN), self.seed)
        exits = interval_table(measured, list(EXITS), self.seed, RANGES)
        meanings = {"known": (known, KNOWN), "exits": (exits, EXITS)}
        return {name: table.assign(meaning=table["measure"].map(of)) for name, (table, of) in meanings.items()}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``settling``: what stopping early costs against the steps that it saves."""
        from sinklens.views.charts import curves
        from sinklens.views.figures import panels

        table = self.tables(measured)["exits"]
        figure, axes = panels(2, columns=2, size=(4.4, 3.4))
        for measure, ax in zip(("exit_cost", "exit_share"), axes, strict=True):
            curves(table[table["measure"] == measure], "threshold", ax)
            ax.set(xlabel="gap of probability", ylabel=EXITS[measure].partition(", ")[0])
        return {"settling": figure}


def _lead(found: xr.Dataset, active: np.ndarray) -> np.ndarray:
    """Mean over the answer's positions of the row's steps from settling to decision, as a share of its steps."""
    settled, decided = settling_steps(found).to_numpy(), found["decided_step"].to_numpy()
    number = np.pad(active.cumsum(axis=1), ((0, 0), (1, 1)), mode="edge")
    number[:, 0] = 0  # own steps before each step
    rows = np.arange(len(number))[:, None]
    ahead = number[rows, decided.clip(min=0)] - number[rows, settled.clip(min=0)]
    inside = (settled >= 0) & found["answer"].to_numpy()
    return np.where(inside, ahead.clip(min=0), 0).sum(axis=1) / inside.sum(axis=1) / active.sum(axis=1)
