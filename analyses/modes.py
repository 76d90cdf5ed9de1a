"""With the same weights and text, do sinks move more under denoising than in causal passes, and matter more?

    sinklens analyse modes tiny-two-modes --limit 20

Models that only diffuse and models that only decode from left to right differ in their training too. A model that does
both (docs/concepts/modes.md) has one set of weights, so what differs between its passes is the mode. The text of one
run is read by both kinds of pass (mode_text.py):

- ``motion``: how often the strongest key of a head changes if one token of a block changes, the same edits in both
  modes; over all queries and keys of the block, over the queries that see the edit, and over the same queries and keys
  (mode_motion.py). ``decoding`` is the motion of a run in each mode, in which nothing is matched.
- ``costs`` and ``sets``: likelihood lost if a head's sinks are hidden from the block, beside random keys and keys of
  the same mass (mode_costs.py); also with the keys that the other mode chose.
- ``answers``: word problems answered right in a run of each mode, with sinks or controls masked at every step.
- ``heads`` and ``similarity``: strength of every head in both modes, and whether they are the same heads, beside heads
  shuffled within layers (mode_heads.py).
- ``claims``: differences, paired by prompt.

The text is that of a run with diffusion; ``settings={"mode": "autoregressive"}`` takes the other.

Caveat: ``answers`` compares what masking costs two ways of decoding, whose steps differ in number and kind. Only
``costs`` compares the modes at equal text and information.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import xarray as xr

from sinklens.analyses.answers import each_prompt, free_effects
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.mode_costs import CHOICES, COSTS, SETS, costs
from sinklens.analyses.mode_heads import SIMILARITY, heads
from sinklens.analyses.mode_heads import SOURCES as HEAD_SOURCES
from sinklens.analyses.mode_motion import EDITS, MATCHING, MOTION, motion
from sinklens.analyses.mode_text import MODES, BlockText
from sinklens.analyses.nulls import rates
from sinklens.analyses.study import Study
from sinklens.families.samplers import settings_for
from sinklens.interventions import MaskSinks
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import EpsilonOverMean, SinkTrack
from sinklens.utils.arguments import NonNegative

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model

RUNS = {"causal": "autoregressive", "denoise": "diffusion"}
"""The mode of a run whose steps are passes of each kind of `MODES`."""
DECODING = {
    "decoding_jump_share": "share of steps of a run at which the strongest key changes; nothing is matched",
    "decoding_sink_jump_share": "the same over steps where it is a sink before and after",
}
LOGPROB = {"logprob": "log-likelihood of the text, nats per token"}
ANSWERS = {"right": "share of word problems answered right", "lost": "share of word problems lost by masking"}
ANSWER_RANGES = {"lost": (-1, 1)}
MEANINGS = MOTION | DECODING | COSTS | SETS | LOGPROB | ANSWERS | SIMILARITY
CONTROLS = ("random", "same_mass")


@dataclass
class Modes(Study):
    """See the module.

    Attributes:
        epsilon: a key is a sink if its attention, scaled to a mean of 1 over the keys, is more than this above the mean
            of the others.
    """

    name: ClassVar[str] = "modes"
    together: ClassVar[bool] = False
    epsilon: NonNegative = 3.0

    def refusal(self, model: "Model") -> str:
        """See `Study.refusal`."""
        if model.family_record.modes:
            return ""
        return "a model that decodes in one way. Give one that decodes in several, such as tiny-two-modes."

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MOTION` [prompt, mode, edit, matching], `DECODING` [prompt, mode], `COSTS` [prompt, mode, keys, choice],
        `SETS` [prompt, keys, choice], ``logprob`` [prompt, mode], `ANSWERS` [prompt, mode, masked], ``strength`` and
        ``has_sink`` [prompt, mode, layer, head], `SIMILARITY` [prompt, source] and ``difference`` [prompt, claim].
        """

        def one(prompt: SinglePrompt) -> xr.Dataset:
            found = self._of_prompt(model, prompt, settings)
            return found.assign(difference=claim_values(found))

        return each_prompt(prompts, one)

    def _of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        text = BlockText.of(self.generate(model, [prompt], settings).run)
        moved = motion(model, text, self.epsilon, self.seed)
        cost = costs(model, text, self.epsilon, self.seed)
        compared = heads(model, text, self.epsilon, self.seed)
        axes = {
            **dict.fromkeys(MOTION, ("mode", "edit", "matching")), **dict.fromkeys(COSTS, ("mode", "keys", "choice")),
            **dict.fromkeys(SETS, ("keys", "choice")), **dict.fromkeys(LOGPROB, ("mode",)),
            **dict.fromkeys(SIMILARITY, ("source",)),
            **dict.fromkeys(("strength", "has_sink"), ("mode", "layer", "head")),
        }  # fmt: skip
        values = {name: (axes[name], value) for name, value in (moved | cost | compared).items()}
        labels: dict[str, Any] = {
            "mode": list(MODES), "edit": list(EDITS), "matching": list(MATCHING), "keys": list(MODES),
            "choice": list(CHOICES), "source": list(HEAD_SOURCES), "masked": ["nothing", *CHOICES],
            "layer": np.arange(model.cfg.n_layers), "head": np.arange(model.cfg.n_heads),
        }  # fmt: skip
        return xr.Dataset(values | self._decoded(model, prompt, settings), coords=labels)

    def _decoded(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> dict[str, Any]:
        """`DECODING` and `ANSWERS` of a run in each mode."""
        rows: dict[str, list[Any]] = {name: [] for name in (*DECODING, *ANSWERS)}
        for mode in RUNS.values():
            given = settings_in(model, mode, settings)
            run = self.generate(model, [prompt], given)
            moved = rates(run.track)
            for name in DECODING:
                rows[name].append(float(moved[name.removeprefix("decoding_")][0]))
            assert run.run.sinks is not None
            effects = free_effects(self, model, prompt, given, self.masking(run.run.sinks))
            right = effects["right"].to_numpy()
            rows["right"].append(right)
            rows["lost"].append(right[0] - right)
        return {name: (("mode", "masked") if name in ANSWERS else ("mode",), value) for name, value in rows.items()}

    def masking(self, track: SinkTrack) -> dict[str, Any]:
        """Nothing, and an intervention per entry of `CHOICES`, by the steps of the unchanged run."""
        shared: dict[str, Any] = {
            "top_k": None, "detector": EpsilonOverMean(self.epsilon), "source": track, "seed": self.seed,
        }  # fmt: skip
        controls = {name: MaskSinks(**shared, pick=cast(Any, name), persistent=True) for name in CONTROLS}
        return {"nothing": [], "sink": MaskSinks(**shared), **controls}

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """``difference`` [prompt, claim]: above 0 if the claim holds."""
        return data[["difference"]]

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``motion``, ``decoding``, ``costs``, ``sets``, ``likelihood``, ``answers``, ``heads``, ``similarity``, and
        ``claims``: one family per model.
        """
        columns = {
            "motion": list(MOTION), "decoding": list(DECODING), "costs": list(COSTS), "sets": list(SETS),
            "likelihood": list(LOGPROB), "answers": list(ANSWERS), "similarity": list(SIMILARITY),
        }  # fmt: skip
        tables = {name: interval_table(measured, names, self.seed, ANSWER_RANGES) for name, names in columns.items()}
        tables = {name: table.assign(meaning=table["measure"].map(MEANINGS)) for name, table in tables.items()}
        tables["heads"] = interval_table(measured, ["strength", "has_sink"], self.seed)
        return {**tables, "claims": judged(interval_table(measured, ["difference"], self.seed, null=0.0))}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``motion``: a panel per measure; ``costs``: a panel per mode; ``heads``: strength in both modes."""
        return {
            "motion": _motion_panels(measured, self.seed),
            "costs": _cost_panels(measured, self.seed),
            "heads": _head_panels(measured),
        }


def settings_in(model: "Model", mode: str, settings: Mapping[str, Any]) -> Settings:
    """Those of `settings` that the sampler of a mode has, and the mode."""
    names = settings_for(model, {"mode": mode}).setting_names()
    kept = {name: value for name, value in settings.items() if name in names}
    return cast(Settings, {**kept, "mode": mode})


def claim_values(data: xr.Dataset) -> xr.DataArray:
    """For each claim a difference that is above 0 if it holds, [claim]."""
    named = dict(_claims(data))
    return xr.DataArray([float(value) for value in named.values()], {"claim": list(named)}, "claim")


def _claims(data: xr.Dataset) -> Iterator[tuple[str, Any]]:
    more = data.sel(mode="denoise") - data.sel(mode="causal")
    for edit, where in (("fill", "filling a block"), ("swap", "swapping a token")):
        here = more.sel(edit=edit, matching="matched")
        yield f"{where}: strongest keys move more under denoising", here["jump_share"]
        yield f"{where}: sinks move more under denoising", here["sink_jump_share"]
    own = {mode: data["nll"].sel(mode=mode, keys=mode) for mode in MODES}
    for control in CONTROLS:
        name = CHOICES[control]
        excess = {mode: cost.sel(choice="sink") - cost.sel(choice=control) for mode, cost in own.items()}
        for mode, meaning in MODES.items():
            yield f"{meaning}: hiding sinks costs more than {name}", excess[mode]
        yield f"hiding sinks costs more than {name}, more so under denoising", excess["denoise"] - excess["causal"]
        lost = data["lost"].sel(masked="sink") - data["lost"].sel(masked=control)
        yield (
            f"masking sinks loses more answers than {name}, more so under denoising",
            lost.sel(mode="denoise") - lost.sel(mode="causal"),
        )
    for measure, meaning in (
        ("correlation", "sinks are strong in the same heads"),
        ("same_key", "heads keep their key"),
    ):
        yield f"{meaning} in both modes", data[measure].sel(source="difference")


def _motion_panels(measured: Mapping[str, xr.Dataset], seed: int) -> "Figure":
    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import interval_dots
    from sinklens.views.figures import panels

    table = interval_table(measured, list(MOTION), seed)
    table["passes"] = table["edit"] + ", " + table["matching"].map(MATCHING) + ": " + table["mode"].map(MODES)
    table = table.sort_values(["edit", "matching"], kind="stable", key=lambda column: column.map(_order))
    figure, axes = panels(len(MOTION), columns=len(MOTION), size=(7, 5))
    for (measure, meaning), ax in zip(MOTION.items(), axes, strict=True):
        interval_dots(table[table["measure"] == measure], "passes", ax).set(xlabel=wrapped(meaning, 36))
    return figure


def _order(label: str) -> int:
    return [*EDITS, *MATCHING].index(label)


def _cost_panels(measured: Mapping[str, xr.Dataset], seed: int) -> "Figure":
    from sinklens.sinks.labels import wrapped
    from sinklens.views.charts import interval_dots
    from sinklens.views.figures import panels

    table = interval_table(measured, ["nll"], seed)
    table["hidden"] = table["choice"].map(CHOICES) + ", of the " + table["keys"].map(MODES)
    figure, axes = panels(len(MODES), columns=len(MODES), size=(6.5, 4))
    for (mode, meaning), ax in zip(MODES.items(), axes, strict=True):
        interval_dots(table[table["mode"] == mode], "hidden", ax, line=0.0).set(
            title=f"predictions of the {meaning}", xlabel=wrapped(f"{COSTS['nll']}; 95 % intervals over prompts", 50)
        )
    return figure


def _head_panels(measured: Mapping[str, xr.Dataset]) -> "Figure":
    from sinklens.sinks.labels import short
    from sinklens.views.figures import panels

    figure, axes = panels(len(measured), size=(4.5, 4.5))
    for (name, data), ax in zip(measured.items(), axes, strict=True):
        mean = data["strength"].mean("prompt")
        ax.axline((0, 0), slope=1, color="0.7", linewidth=0.8)
        for layer in mean["layer"].to_numpy():
            causal, denoise = (mean.sel(mode=mode, layer=layer) for mode in MODES)
            ax.plot(causal, denoise, "o", markersize=4, label=f"layer {layer}")
        ax.set(title=short(name), xlabel="strongest key's share, causal pass", ylabel="the same, denoising pass")
        ax.legend(fontsize="small")
    return figure
