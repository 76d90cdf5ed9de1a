"""Does a model show the warning signs of sinks that it cannot do without?

    sinklens analyse diagnose tiny-llada tiny-llama

Three signs (Rulli et al., 2510.15731, in its discussion), each measured, compared with a threshold, and drawn on one
page:

- *masking*: each head's strongest key of the previous step is hidden from it. A cost above 5 % (the paper's bound)
  indicates the dependence of an autoregressive model. As controls, an ordinary key is hidden instead, or as many random
  weaker keys of the head as receive the attention of the strongest. ``removed`` in the table of accuracies is the share
  of attention that the hidden keys receive in the unchanged run at that step.
- *start*: all sinks are at the start of the sequence, as in an autoregressive model.
- *cut*: the middle third of the prompt is hidden from all queries, and the sinks stay where they were: fixed anchors
  that do not compensate for the missing text. Sinks are compared on the same canvas, that of the unchanged run.

The paper names the signs and one number; the other thresholds are ours, and the table gives the source of each. The
cost is accuracy on the shipped word problems; for other prompts only the share of answer tokens that change is known.

Caveat: masking is not the same dose for both kinds of model. In a diffusion model a key is hidden from all queries of
the head, in an autoregressive model from the newest query alone. Also, a changed answer is not necessarily worse, and
any model must lose an answer that depends on a number in the cut third; ``changed`` and the cost of the cut are
therefore reported beside the signs but do not decide them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import is_right
from sinklens.analyses.estimates.tables import corrected, interval_table, verdict
from sinklens.analyses.runs import active_steps
from sinklens.analyses.study import SINK, Study
from sinklens.interventions import MaskKeys, MaskSinks, Rule
from sinklens.interventions.rules import Moment
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack, motion
from sinklens.sinks.data import TrackData
from sinklens.sinks.detectors import Detector

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

FIRST = 4  # positions
BINS = 20  # of the sequence's length: the first holds the first 5 %
PARTS = 10  # of a run's steps
RUNS = ["as it is", "sinks masked", "ordinary keys masked", "as much attention masked", "middle cut"]


class Sign(NamedTuple):
    """One row of the page.

    Attributes:
        sign: the warning sign it belongs to.
        meaning: what the number is.
        threshold: the sign is present above it; NaN for a number that is reported but does not decide.
        source: whose threshold it is.
    """

    sign: str
    meaning: str
    threshold: float
    source: str


SIGNS = {
    "masking_cost": Sign("masking", "accuracy lost when every head's strongest key is masked", 0.05, "paper"),
    "masking_changed": Sign("masking", "answer tokens that change with that key masked", np.nan, ""),
    "ordinary_cost": Sign("masking", "accuracy lost when an ordinary key is masked instead", np.nan, ""),
    "ordinary_changed": Sign("masking", "answer tokens that change with an ordinary key masked", np.nan, ""),
    "mass_cost": Sign("masking", "accuracy lost when random keys with as much attention are masked", np.nan, ""),
    "mass_changed": Sign("masking", "answer tokens that change with those keys masked", np.nan, ""),
    "first_four": Sign("start", f"strongest keys on the first {FIRST} positions", 0.9, "ours"),
    "first_twentieth": Sign("start", "strongest keys in the first 5 % of the sequence", 0.9, "ours"),
    "first_always": Sign("start", "heads whose strongest key is the first token at every step", 0.5, "ours"),
    "cut_same": Sign("cut", "strongest keys outside the cut that stay where they were", 0.5, "ours"),
    "cut_overlap": Sign("cut", "overlap of the sinks with those of the uncut run", 0.5, "ours"),
    "cut_static": Sign("cut", "heads whose strongest key never moves while the middle is cut", 0.5, "ours"),
    "cut_cost": Sign("cut", "accuracy lost when the middle of the prompt is cut", np.nan, ""),
    "cut_changed": Sign("cut", "answer tokens that change with the middle cut", np.nan, ""),
}


@dataclass
class Diagnose(Study):
    """See the module."""

    name: ClassVar[str] = "diagnose"
    scored: ClassVar[str] = "some"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`SIGNS` [prompt]; ``right`` [prompt, run], NaN for a prompt whose answer is unknown; and ``places`` and
        ``kept`` for the curves.
        """
        start, end = middle_third(model.encode(list(prompts), self.chat_template)[1])
        base = self.generate(model, prompts, settings)
        masked, ordinary, mass, cut = (
            self.generate(model, prompts, settings, record_sinks=False, hooks=hooks)
            for hooks in (masking(), masking(ordinary=True), masking(mass=True), hiding(start, end))
        )
        same = self.generate(model, prompts, settings, hooks=hiding(start, end), replay=base.run)
        assert same.run.sinks is not None
        runs = [found.run for found in (base, masked, ordinary, mass, cut)]
        right = np.stack([right_answers(run, prompts, self.answers) for run in runs], axis=1)
        data = xr.Dataset()
        named = {"masking": masked, "ordinary": ordinary, "mass": mass, "cut": cut}
        for number, (name, found) in enumerate(named.items(), 1):
            data[f"{name}_cost"] = ("prompt", right[:, 0] - right[:, number])
            data[f"{name}_changed"] = ("prompt", changed_tokens(base.run, found.run))
        data["right"] = (("prompt", "run"), right)
        track, hidden = base.track, active_steps(same.run.sinks, base.own)
        return xr.merge([data.assign_coords(run=RUNS),
                         at_the_start(track), anchors(track, hidden, start, end)])  # fmt: skip

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``signs``: every number with its threshold, the source of that, and a verdict; ``accuracy``: of `RUNS`."""
        thresholds = {name: sign.threshold for name, sign in SIGNS.items()}
        table = corrected(interval_table(measured, list(SIGNS), self.seed, null=thresholds))
        signs = [SIGNS[name] for name in table["measure"]]
        table = table.assign(**{name: [getattr(sign, name) for sign in signs] for name in Sign._fields})
        table["verdict"] = [
            ""
            if np.isnan(row.threshold)
            else verdict(row.estimate, row.low, row.high, row.threshold, "warns", "clear", row.p_holm)
            for row in table.itertuples()
        ]
        first = [
            "model",
            "sign",
            "measure",
            "estimate",
            "low",
            "high",
            "threshold",
            "source",
            "p_holm",
            "shown",
            "verdict",
        ]
        return {
            "signs": table[[*first, "prompts", "meaning"]],
            "accuracy": interval_table(measured, ["right"], self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``page``: a row per sign, its numbers and thresholds on the left and the underlying data on the right."""
        return {"page": _page(measured, self.tables(measured)["signs"], self.seed)}


@dataclass(frozen=True)
class OrdinaryKey(Detector):
    """The key of median strength among those that a head attends to; none where it attends to nothing."""

    def detect(self, track: TrackData) -> xr.DataArray:
        score = track.scores()
        values = score.fillna(-np.inf).to_numpy()
        order = np.argsort(-values, axis=-1, kind="stable")
        attended = (values > 0).sum(axis=-1, keepdims=True)
        found = np.zeros(values.shape, dtype=bool)
        np.put_along_axis(found, np.take_along_axis(order, attended // 2, axis=-1), attended > 0, axis=-1)
        return score.copy(data=found)


def masking(ordinary: bool = False, mass: bool = False) -> MaskKeys:
    """Hide from every head, at each step, its strongest key of the previous step (Rulli et al., Sec. 4.3).

    As a control, with `ordinary`, the key of median strength among those it attends to is hidden instead; with `mass`,
    as many random weaker keys as receive the attention of the strongest.
    """
    if mass:
        return MaskSinks(top_k=1, pick="same_mass", persistent=True)
    return MaskSinks(top_k=None, detector=OrdinaryKey()) if ordinary else MaskSinks(top_k=1)


@dataclass(frozen=True, eq=False)
class Between(Rule):
    """The columns of each row from `first` up to `stop`."""

    first: Int[Tensor, " batch"]
    stop: Int[Tensor, " batch"]

    def at(self, now: Moment) -> Bool[Tensor, "batch 1 1 pos"]:
        assert now.canvas is not None
        places = torch.arange(now.canvas.ids.shape[1], device=now.canvas.ids.device)
        first, stop = (bound.to(places.device)[:, None] for bound in (self.first, self.stop))
        return ((places >= first) & (places < stop))[:, None, None]


def hiding(start: Int[Tensor, " batch"], end: Int[Tensor, " batch"]) -> MaskKeys:
    """Hide the keys from `start` up to `end` from all queries of all heads, at every step."""
    return MaskSinks(top_k=None, where=Between(start, end), queries="each")


def middle_third(real: Bool[Tensor, "batch pos"]) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Start and end (not included) of the middle ⌊n / 3⌋ of each row's n prompt tokens."""
    length = real.sum(dim=1)
    start = real.int().argmax(dim=1) + length // 3
    return start, start + length // 3


def right_answers(
    run: "Generation", prompts: Sequence[SinglePrompt], answers: Mapping[str, str] | None = None
) -> Float[np.ndarray, " prompt"]:
    """`answers.is_right` of every answer."""
    pairs = zip(prompts, run.answers, strict=True)
    return np.array([is_right(prompt, answer.text or "", answers) for prompt, answer in pairs])


def changed_tokens(one: "Generation", other: "Generation") -> Float[np.ndarray, " prompt"]:
    """Share of answer positions that hold a different token, up to and including the later of the two end tokens."""
    pairs = zip(_answers(one), _answers(other), strict=True)
    lengths = (max(a.tokens, b.tokens) + 1 for a, b in zip(one.answers, other.answers, strict=True))
    return np.array([float((a[:n] != b[:n]).mean()) for (a, b), n in zip(pairs, lengths, strict=True)])


def _answers(run: "Generation") -> np.ndarray:
    return run.tokens[:, run.prompt_length :].numpy()


def at_the_start(track: SinkTrack) -> xr.Dataset:
    """Where the strongest keys are, over steps, layers and heads.

    ``first_four`` and ``first_twentieth`` [prompt]: share among the first 4 positions, and among the first 5 % of the
    positions that exist at the step. ``first_always``: share of heads whose strongest key is the first position at
    every step. ``places`` [prompt, place]: share per twentieth of the positions, labelled by its start.
    """
    main = motion.strongest_key(track)
    first = track.data["is_real"].argmax("pos")
    behind = main - first
    some = main.notnull()
    length = motion.existing(track).any(("layer", "head")).sum("pos")
    twentieth = np.floor(BINS * behind / length)
    over = ("step", "layer", "head")
    number = some.sum(over)
    places = xr.concat([(twentieth == place).sum(over) / number for place in range(BINS)], dim="place")
    heads = some.any("step")
    data = xr.Dataset(
        {
            "first_four": (behind < FIRST).sum(over) / number,
            "first_twentieth": (twentieth == 0).sum(over) / number,
            "first_always": (((behind == 0) | ~some).all("step") & heads).sum(over[1:]) / heads.sum(over[1:]),
            "places": places.transpose("batch", "place"),
        }
    )
    return _by_prompt(data.assign_coords(place=np.arange(BINS) / BINS))


def anchors(
    track: SinkTrack, hidden: SinkTrack, start: Int[Tensor, " batch"], end: Int[Tensor, " batch"]
) -> xr.Dataset:
    """Whether the sinks of a run stay when the keys from `start` up to `end` are hidden.

    ``cut_same`` [prompt]: share of (step, layer, head) with the same strongest key in both runs, among those whose key
    was not hidden; ``kept`` [prompt, part]: the same by tenths of the run, labelled by their start. ``cut_overlap``
    [prompt]: Jaccard overlap of the sinks of both runs at the same step, layer and head, excluding the hidden keys; it
    is lowered by keys that become sinks because others are hidden. ``cut_static`` [prompt]: share of heads whose
    strongest key never changes while the keys are hidden.

    Args:
        track: the unchanged run.
        hidden: the same steps on the same canvas, with the keys hidden.
        start, end: bounds of the hidden keys of each row.
    """
    places = xr.DataArray(np.arange(track.data.sizes["pos"]), dims="pos")
    first, last = (xr.DataArray(bound.cpu().numpy(), dims="batch") for bound in (start, end))
    seen = (places < first) | (places >= last)
    one, other = (part.detect().drop_vars(("pos", "step"), errors="ignore") & seen for part in (track, hidden))
    overlap = (one & other).sum("pos") / (one | other).sum("pos")
    alive = motion.existing(track).any(("layer", "head", "pos"))
    step = xr.DataArray(np.arange(track.steps), dims="step")
    part = np.floor(PARTS * step / alive.sum("step"))
    before, after = (motion.strongest_key(part).drop_vars("step", errors="ignore") for part in (track, hidden))
    same = (before == after).where(before.notnull() & ((before < first) | (before >= last))).astype(np.float64)
    over = ("step", "layer", "head")
    kept = xr.concat([same.where(part == at).mean(over) for at in range(PARTS)], dim="part")
    data = xr.Dataset(
        {
            "cut_same": same.mean(over),
            "cut_overlap": overlap.mean(over),
            "cut_static": motion.static_share(hidden),
            "kept": kept.transpose("batch", "part"),
        }
    )
    return _by_prompt(data.assign_coords(part=np.arange(PARTS) / PARTS))


def _by_prompt(data: xr.Dataset) -> xr.Dataset:
    return data.rename(batch="prompt").drop_vars("prompt", errors="ignore").astype(np.float64)


def _label(sign: Sign) -> str:
    return sign.meaning if np.isnan(sign.threshold) else f"{sign.meaning}\n({sign.source}: above {sign.threshold})"


def _page(measured: Mapping[str, xr.Dataset], signs: "DataFrame", seed: int) -> "Figure":
    from sinklens.views.charts import curves, interval_dots, share_bars
    from sinklens.views.figures import panels

    figure, axes = panels(6, columns=2, size=(7, 3.2))
    for ax, sign in zip(axes[::2], ("masking", "start", "cut"), strict=True):
        rows = signs[signs["sign"] == sign]
        interval_dots(rows, "measure", ax, names={name: _label(entry) for name, entry in SIGNS.items()})
        for height, name in enumerate(dict.fromkeys(rows["measure"])):
            bound = SIGNS[name].threshold
            ax.plot([bound, bound], [height - 0.45, height + 0.45], "--", color="0.3", linewidth=1)
        ax.set(xlabel="share (dashed: threshold of the warning)", title=f"sign: {sign}")
    right = interval_table(measured, ["right"], seed)
    interval_dots(right, "run", axes[1]).set(xlabel="share of word problems answered right", title="accuracy")
    shares = {name: data["places"].mean("prompt").to_numpy() for name, data in measured.items()}
    share_bars(shares, np.arange(BINS + 1) / BINS, axes[3]).set(
        xlabel="place in the sequence (0: first token, 1: last)",
        ylabel="share of strongest keys",
        title="where the strongest keys are",
    )
    curves(interval_table(measured, ["kept"], seed), "part", axes[5]).set(
        xlabel="share of the run's steps so far",
        ylabel="strongest keys that stay",
        title="do they stay while the middle is cut?",
    )
    figure.suptitle(f"Warning signs: means over {max(signs['prompts'])} prompts with 95 % intervals; {SINK}")
    return figure
