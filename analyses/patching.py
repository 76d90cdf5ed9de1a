"""Where is a fact of the prompt, in which layers and until which step?

    sinklens analyse patching tiny-llada tiny-llama

Two prompts differ in one number and have the same tokens otherwise: the *corrupted* prompt, on which the model runs,
and the *clean* prompt, whose last number is the original. Their answers differ in some positions, D. The *gap* of a
step is

    G = Σ_{p ∈ D, undecided} z_p[clean token] − z_p[corrupted token]

with z the logits. The stream after a layer (``hook_resid_post``; layer −1 is the embedding) is replaced at some
positions by its value for the clean prompt *on the same canvas*, and the gap moves from G_corrupted toward G_clean,
its value for the clean prompt on that canvas:

- ``restored`` = Σ (G − G_corrupted) / Σ (G_clean − G_corrupted), sums over prompts: under replay of the corrupted run,
  for every layer, step and group of positions (the number, the rest of the prompt, the answer). 0: none of the fact is
  there, 1: all of it. At the number in layer −1 it is 1 by definition.
- ``flipped``: free-running, with the number's stream replaced at one layer *from a step on*: the share of answers that
  become the clean answer.

``usable`` is 1 for a pair if both answers have the same number of tokens and differ. All runs use temperature 0.
In an autoregressive run every step computes all positions (no cache), and the gap is that of the token being decoded.

Limitation: patching shows where a fact can be inserted, not where the model reads it; and the shares of several groups
need not add up to 1, since layers are not linear.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import each_prompt
from sinklens.analyses.intervals import Interval, interval_rows, interval_table, pooled
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.families import settings_for
from sinklens.families.registry import find_sampler
from sinklens.hooks.front import HookPair
from sinklens.model.prompts import SinglePrompt
from sinklens.runs import generate
from sinklens.sampling.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.hooks.points import Point
    from sinklens.model import Model
    from sinklens.runs.result import Generation

GROUPS = {"number": "the number", "prompt": "rest of the prompt", "answer": "answer"}
STARTS = (0.0, 0.125, 0.25, 0.375, 0.5, 0.75)  # of the steps that the corrupted run took


class RunPair(NamedTuple):
    """The runs of two prompts, and where they differ.

    Attributes:
        clean, corrupted: runs of one row.
        number: True at the canvas positions of the number.
        differ: True at the canvas positions where the answers differ.
    """

    clean: "Generation"
    corrupted: "Generation"
    number: Bool[Tensor, " pos"]
    differ: Bool[Tensor, " pos"]


class Patch(NamedTuple):
    """A replacement defaults in one row of a run.

    Attributes:
        layer: the layer whose output is replaced; -1 is the embedding.
        where: True at the canvas positions to replace.
        start: first step of the replacement.
    """

    layer: int
    where: Bool[Tensor, " pos"]
    start: int = 0


@dataclass
class Patching(Study):
    """See the module."""

    name: ClassVar[str] = "patching"
    needs_complete_passes: ClassVar[str] = (
        "streams are patched in passes over the complete text, and its steps compute those of their canvas alone"
    )
    together: ClassVar[bool] = False

    def refusal(self, model: "Model") -> str:
        """See `Study.refusal`."""
        if why := super().refusal(model):
            return why
        sampler = model.family_record.sampler
        if "temperature" in find_sampler(sampler).setting_names():
            return ""
        return f"whose sampler {sampler} always draws its tokens: the study needs runs at temperature 0. Leave it out."

    def begin(self, models: Sequence[str], prompts: Sequence[SinglePrompt]) -> None:
        """Reject prompts of token ids.

        Raises:
            SettingError: a prompt is not a text.
        """
        for number, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise SettingError(
                    f"patching changes a number in the text of a prompt; prompt {number} is a list of token ids. Give "
                    f"texts, and a model with a tokenizer."
                )

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """``moved`` [prompt, group, layer, step] and ``gap`` [prompt, step], numerator and denominator of ``restored``,
        0 for unusable prompts; ``flipped`` [prompt, layer, start] and ``usable`` [prompt], 1 if the pair is usable.
        """
        layers = range(-1, model.cfg.n_layers)
        defaults = settings_for(model, dict(settings))
        chosen: Settings = {**settings, "temperature": 0.0}
        if defaults.left_to_right:
            chosen["use_cache"] = False
        places = {
            "group": list(GROUPS),
            "layer": list(layers),
            "step": np.arange(defaults.steps),
            "start": list(STARTS),
        }

        def one(prompt: SinglePrompt) -> xr.Dataset:
            pair = self._pair(model, str(prompt), chosen)
            moved = np.zeros((len(GROUPS), len(layers), defaults.steps))
            gap, flipped = np.zeros(defaults.steps), np.full((len(layers), len(STARTS)), np.nan)
            if pair is not None:
                moved, gap = self._restored(pair, layers, chosen, defaults.steps)
                flipped = self._flipped(pair, layers, chosen)
            values = {
                "moved": (("group", "layer", "step"), moved),
                "gap": ("step", gap),
                "flipped": (("layer", "start"), flipped),
                "usable": ((), float(pair is not None)),
            }
            return xr.Dataset(values, coords=places)

        return each_prompt(prompts, one)

    def _pair(self, model: "Model", prompt: str, settings: Settings) -> RunPair | None:
        """The two runs of a prompt, or None if the pair is not usable."""
        other = with_another_number(prompt)
        if other is None:
            return None
        texts = [model.encode(text, self.chat_template)[0] for text in (prompt, other)]
        if texts[0].shape != texts[1].shape:
            return None
        clean, corrupted = (
            generate(model, ids, seed=self.seed, record_sinks=False, progress=False, **settings) for ids in texts
        )
        differ = clean.tokens[0] != corrupted.tokens[0]
        number = differ & (torch.arange(len(differ)) < clean.prompt_length)
        differ = differ & ~number
        if clean.answers[0].tokens != corrupted.answers[0].tokens or not bool(differ.any()):
            return None
        return RunPair(clean, corrupted, number, differ)

    def _run(self, pair: RunPair, patches: Sequence["Patch | None"], settings: Settings, replay: bool) -> "Gaps":
        """One run of the corrupted prompt, with a different patch in each row."""
        gaps, copies = Gaps(pair, patches), len(patches)
        prompt = pair.corrupted.canvas[:, 0, : pair.corrupted.prompt_length].repeat(copies, 1)
        replayed = _Canvas(pair.corrupted.canvas.repeat(copies, 1, 1)) if replay else None
        gaps.run = generate(
            pair.clean.model, prompt, seed=self.seed, hooks=gaps.hooks(), record_sinks=False, progress=False,
            replay=replayed, **settings,
        )  # fmt: skip
        return gaps

    def _restored(
        self, pair: RunPair, layers: range, settings: Settings, steps: int
    ) -> tuple[Float[np.ndarray, "group layer step"], Float[np.ndarray, " step"]]:
        every, prompt = torch.ones_like(pair.number), torch.arange(len(pair.number)) < pair.clean.prompt_length
        where = {"number": pair.number, "prompt": prompt & ~pair.number, "answer": ~prompt}
        rows = [Patch(layer, where[group]) for group in GROUPS for layer in layers]
        gaps = self._run(pair, [None, Patch(layers[-1], every), *rows], settings, replay=True).values(steps)
        moved = (gaps[2:] - gaps[0]).reshape(len(GROUPS), len(layers), steps)
        return moved, gaps[1] - gaps[0]

    def _flipped(self, pair: RunPair, layers: range, settings: Settings) -> Float[np.ndarray, "layer start"]:
        starts = [int(share * pair.corrupted.steps_run) for share in STARTS]
        rows = [Patch(layer, pair.number, start) for layer in layers for start in starts]
        run = self._run(pair, rows, settings, replay=False).run
        assert run is not None
        answer = pair.clean.tokens[0, pair.clean.prompt_length :][: pair.clean.answers[0].tokens + 1]
        same = (run.tokens[:, run.prompt_length :][:, : len(answer)] == answer).all(dim=1)
        return same.double().numpy().reshape(len(layers), len(STARTS))

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``restored``: by group, layer and step; ``layers``: the same over all steps; ``flipped``; ``usable``: share
        of prompts whose pair is usable.
        """
        from pandas import DataFrame

        steps, layers = [], []
        for name, data in measured.items():
            moved, gap, usable = data["moved"], data["gap"], data["usable"].to_numpy() > 0
            axes = {axis: data[axis].to_numpy() for axis in ("group", "layer", "step")}
            steps += interval_rows(name, "restored", _share(moved.to_numpy(), gap.to_numpy(), usable, self.seed), axes)
            del axes["step"]
            all_steps = _share(moved.sum("step").to_numpy(), gap.sum("step").to_numpy(), usable, self.seed)
            layers += interval_rows(name, "restored", all_steps, axes)
        return {
            "restored": DataFrame(steps),
            "layers": DataFrame(layers),
            "flipped": interval_table(measured, ["flipped"], self.seed),
            "usable": interval_table(measured, ["usable"], self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``restored``: layer × step maps, a row of panels per model, a panel per group; ``flipped``: curves."""
        from sinklens.views.effects import patch_maps, start_curves

        tables = self.tables(measured)
        return {"restored": patch_maps(tables["restored"], GROUPS), "flipped": start_curves(tables["flipped"])}


class Gaps:
    """Hooks that apply each row's patch and record each row's gap.

    Attributes:
        run: the finished run; None before.
    """

    def __init__(self, pair: RunPair, patches: Sequence["Patch | None"]) -> None:
        self._pair, self._patches, self._model = pair, patches, pair.clean.model
        self._gaps: dict[int, Float[Tensor, " row"]] = {}
        self._clean: dict[int, Tensor] = {}
        self._canvas: Tensor | None = None
        self.run: Generation | None = None

    def hooks(self) -> list[HookPair]:
        """Hooks to pass to the run."""
        points = {_point(patch.layer) for patch in self._patches if patch is not None}
        return [
            ("denoise.hook_canvas", self._look),
            *((point, self._replace) for point in sorted(points)),
            ("denoise.hook_logits", self._measure),
        ]

    def _look(self, canvas: Int[Tensor, "row pos"], hook: "Point") -> None:
        """Compute the stream for the clean prompt on each row's canvas; equal canvases are passed once."""
        self._canvas = canvas.clone()
        length = self._pair.clean.prompt_length
        distinct, of = canvas.unique(dim=0, return_inverse=True)
        distinct[:, :length] = self._pair.clean.canvas[:, 0, :length].to(canvas.device)
        layers = sorted({patch.layer for patch in self._patches if patch is not None})
        seen = self._model.tree.peek(distinct, torch.ones_like(distinct, dtype=torch.bool), map(_point, layers))
        self._clean = {layer: seen[_point(layer)][of] for layer in layers}

    def _replace(self, value: Float[Tensor, "row pos d_model"], hook: "Point") -> Float[Tensor, "row pos d_model"]:
        assert hook.step is not None
        value = value.clone()
        for row, patch in enumerate(self._patches):
            if patch is not None and _point(patch.layer) == hook.name and hook.step >= patch.start:
                where = patch.where[: value.shape[1]].to(value.device)
                value[row, where] = self._clean[patch.layer][row, where]
        return value

    def _measure(self, logits: Float[Tensor, "row some vocab"], hook: "Point") -> None:
        """Record `G` of every row; in an autoregressive run, the logits are those of the next position alone."""
        assert self._canvas is not None
        assert hook.step is not None
        mask = -1 if self._model.mask_token_id is None else self._model.mask_token_id
        places = self._pair.differ.nonzero()[:, 0].tolist()
        gap = torch.zeros(len(logits), dtype=torch.float64)
        for place in places:
            if self._model.causal:
                if place != self._canvas.shape[1]:
                    continue
                undecided, at = torch.ones(len(logits), dtype=torch.bool), 0
            else:
                undecided, at = self._canvas[:, place].eq(mask).cpu(), place
            wanted, unwanted = (int(run.tokens[0, place]) for run in (self._pair.clean, self._pair.corrupted))
            gap += torch.where(undecided, (logits[:, at, wanted] - logits[:, at, unwanted]).double().cpu(), 0.0)
        self._gaps[hook.step] = gap

    def values(self, steps: int) -> Float[np.ndarray, "row step"]:
        """The gap of every row and step; 0 at steps that did not run."""
        nothing = torch.zeros(len(self._patches), dtype=torch.float64)
        return torch.stack([self._gaps.get(step, nothing) for step in range(steps)], dim=1).numpy()


class _Canvas:
    """An earlier run's canvas, for ``replay=``."""

    def __init__(self, canvas: Int[Tensor, "batch step pos"]) -> None:
        self.canvas = canvas


def with_another_number(prompt: str) -> str | None:
    """`prompt` with its last number decreased by one (0 and 1: increased by one); None without a number.

    >>> with_another_number("Tom has 5 pens. He buys 12 more.")
    'Tom has 5 pens. He buys 11 more.'
    """
    numbers = list(re.finditer(r"\d+", prompt))
    if not numbers:
        return None
    last = numbers[-1]
    value = int(last.group())
    return prompt[: last.start()] + str(value - 1 if value > 1 else value + 1) + prompt[last.end() :]


def _point(layer: int) -> str:
    return "hook_embed" if layer < 0 else f"blocks.{layer}.hook_resid_post"


def _share(moved: np.ndarray, gap: np.ndarray, usable: np.ndarray, seed: int) -> Interval:
    """Σ moved / Σ gap over the usable prompts; NaN if no prompt is usable or the gap is undefined everywhere."""
    if not usable.any():
        nothing = np.full(moved.shape[1:], np.nan)
        return Interval(nothing, nothing, nothing, np.zeros(nothing.shape))
    moved, gap = moved[usable], gap[usable]
    axes = moved.ndim - gap.ndim
    below = np.broadcast_to(gap.reshape(gap.shape[0], *[1] * axes, *gap.shape[1:]), moved.shape)
    return pooled(
        lambda one, all_: np.divide(one, all_, where=all_ != 0, out=np.full(one.shape, np.nan)), [moved, below], seed
    )
