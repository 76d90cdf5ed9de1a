"""What the generations of "Attention Sinks in Diffusion Language Models" show: its figures and its Table 2.

`PaperFigures` measures every generation once, for all items (Rulli et al., 2510.15731, Figs. 1 and 3 to 10, Table 2,
Secs. 4.1 and 4.2). `ITEMS` lists these items. Each says what is measured, which of the paper's statements can be
checked on which of its models, and what the paper leaves open. ``sinklens reproduce`` runs this study (reproduce.py).

A figure of one run shows the first generation. Its layer and head are chosen by a rule: the head whose sink moves most
(`most_moving_head`), and the first step at which that sink moves.

Pitfall: the paper draws single heads of single generations. A measure here is a mean over generations, and over all
layers and heads unless the item says otherwise. So it can differ from the picture beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import xarray as xr

from sinklens.analyses.dynamics import maps, motion_of, still_and_moving
from sinklens.analyses.estimates.tables import interval_table
from sinklens.analyses.existence import BINS, EPSILONS, histogram_of, no_sink_of
from sinklens.analyses.figures import nothing_to_show, one_panel, score_histogram
from sinklens.analyses.frontier import frontier
from sinklens.analyses.runs import OwnRun, noise_of
from sinklens.analyses.study import Study
from sinklens.analyses.token_types import token_rows, tokens_of_rows
from sinklens.evaluation.protocols import PROTOCOLS, STUDY, is_checkpoint
from sinklens.evaluation.verification import MOST_SINKS, STILL
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack, motion
from sinklens.sinks.labels import short, token_labels, token_ticks
from sinklens.sinks.palette import COLOURS
from sinklens.views import color_map, curves, interval_dots, most_moving_head, panels, sink_map, sink_paths
from sinklens.views.patterns import patterns_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

SPLITS = ["masked and other queries", "random halves of the same sizes"]
LENGTHS = (1, 2, 4, 8, 16, 32, 64)  # steps, the shortest lives of each class
AT = (0.25, 0.5, 0.75)  # of the steps, where queries are split
RARE = 0.05  # share of heads and steps below which a layer has no clear sink; our choice
DLMS = ("LLaDA", "Dream", "MMaDA")
CHECKPOINTS = {
    "LLaDA": "GSAI-ML/LLaDA-8B-Instruct", "Dream": "Dream-org/Dream-v0-Instruct-7B",
    "MMaDA": "Gen-Verse/MMaDA-8B-MixCoT", "Llama": "meta-llama/Llama-3.1-8B-Instruct",
}  # fmt: skip
"""The paper's models, by the published instruct checkpoint of each."""


class Claim(NamedTuple):
    """What the paper says of a measure, such that an interval can decide it.

    Attributes:
        models: those of `CHECKPOINTS` of which it says so.
        measure: a measure of the item.
        side: whether the value lies "above" or "below" the number, or "equals" it.
        number: the number.
        where: the labels of the entry.
    """

    models: tuple[str, ...]
    measure: str
    side: Literal["above", "below", "equals"]
    number: float
    where: Mapping[str, Any] = {}


class Item(NamedTuple):
    """A table or figure of the paper.

    Attributes:
        title: what it shows.
        measures: what is measured for it: name -> meaning.
        claims: what of it can be checked.
        unstated: what the paper leaves open, and what is done here.
    """

    title: str
    measures: Mapping[str, str]
    claims: tuple[Claim, ...] = ()
    unstated: str = ""


ANY_HEAD = "The paper does not say how its layer and head were chosen; here it is the head whose sink moves most."
NO_MODEL = "Read as a statement about all three diffusion models."
TABLE_2: dict[str, dict[str, float]] = {
    "LLaDA": {"⏎": 0.368, "mask": 0.366, ".": 0.050, "<|start_header_id|>": 0.008, "␣": 0.008},
    "Dream": {"mask": 0.321, "⏎": 0.090, ".": 0.046, ",": 0.044, "<|endoftext|>": 0.040},
    "MMaDA": {"⏎": 0.180, "mask": 0.166, "<|end_header_id|>": 0.160, "<|startoftext|>": 0.108, "istant": 0.066},
}
"""Table 2: model -> token -> share of the sinks; "mask" is the mask token, whatever its text."""

ITEMS = {
    "table1": Item(
        "Table 1: accuracy with sinks masked",
        {},
        tuple(
            Claim((name,), "accuracy", "equals", printed.score, {"protocol": protocol.name, "masked": printed.masked})
            for name, checkpoint in CHECKPOINTS.items()
            for protocol in PROTOCOLS.values()
            for printed in protocol.published
            if printed.score is not None and printed.source == STUDY and is_checkpoint(printed.model, checkpoint)
        ),
        "Steps, shots and checkpoints; what the first step masks (here: nothing); whether heads share a set of keys "
        "(here: no); whether a head without a sink by Eq. 3 is masked (here: yes; --sinks-only adds the other "
        "reading). In an autoregressive model, the keys that the last token attends to.",
    ),
    "table2": Item(
        "Table 2: the tokens that are sinks most often",
        {"frequency": "share of all sinks"},
        tuple(
            Claim((model,), "frequency", "equals", share, {"token": token})
            for model, shares in TABLE_2.items()
            for token, share in shares.items()
        ),
        "The prompts of the 30 generations, which are shipped word problems here, and the unit of the threshold 3.",
    ),
    "fig1": Item(
        "Fig. 1: attention received, step by token",
        {"jump_share": "share of steps at which a head's strongest key changes"},
        unstated="Layer and head; the map is the mean over all.",
    ),
    "fig3": Item(
        "Fig. 3: histogram of scores", {"histogram": "share of positions by score, in column sums"},
        unstated="The unit of the scores.",
    ),
    "fig9": Item(
        "Fig. 9: histogram of scores of other models", {"histogram": "share of positions by score, in column sums"},
        unstated="The unit of the scores.",
    ),
    "fig4": Item(
        "Fig. 4: a sink moves between two steps",
        {
            "sink_jump_share": "share of steps at which the strongest key changes, where it is a sink before and after",
            "jump_distance": "positions per change",
        },
        (Claim(("LLaDA",), "sink_jump_share", "above", STILL),),
        f"{ANY_HEAD} That sinks move is checked as: they change at more than {STILL:.0%} of the steps.",
    ),
    "fig5": Item(
        "Fig. 5: score of the main sink by layer and head",
        {
            "strength": "score of the strongest key, mean over steps",
            "deeper": "log of the mean score in the deeper half of the layers over that in the other half",
            "fewer": "share of heads and steps with a sink, deeper half minus the other half",
        },
        (Claim(DLMS, "deeper", "above", 0), Claim(DLMS, "fewer", "below", 0)),
        f"How deep is deep; halves are compared. {NO_MODEL}",
    ),
    "fig6": Item(
        "Fig. 6: separate sinks of masked and unmasked queries, and a sink of one step",
        {
            "apart": "share of heads in which two sets of queries have different strongest keys",
            "separate": "the same, masked and other queries minus random halves",
            "one_step": "share of sinks' lives that last one step",
        },
        (Claim(DLMS, "separate", "above", 0), Claim(DLMS, "one_step", "above", 0)),
        f"{ANY_HEAD} {NO_MODEL}",
    ),
    "fig7": Item(
        "Fig. 7: position of the largest sink",
        {
            "drift": "positions per step, above 0 to the right",
            "static_share": "share of heads whose strongest key never changes",
            "jump_share": "share of steps at which the strongest key changes",
        },
        (
            Claim(("LLaDA",), "drift", "above", 0), Claim(("Dream",), "drift", "below", 0),
            Claim(("MMaDA",), "jump_share", "below", STILL),
        ),
        f"{ANY_HEAD} The measures are means over all heads; a static sink changes at fewer than {STILL:.0%} of steps.",
    ),
    "fig8": Item(
        "Fig. 8: a static and a moving sink",
        {
            "static_share": "share of heads whose strongest key never changes",
            "static_sinks": "share of sinks that are sinks at every step",
        },
        unstated="How the two heads were chosen; here those whose strongest key moves least and whose sink moves most.",
    ),
    "fig10": Item(
        "Fig. 10 and Sec. 4.1: share of positions that are no sinks, by threshold",
        {"no_sink": "share of positions that are not sinks"},
        (Claim(DLMS, "no_sink", "above", 1 - MOST_SINKS, {"epsilon": 3}),),
        "The unit of the threshold, which is the column sum here.",
    ),
    "frontier": Item(
        "Sec. 4.2: do sinks begin at the rightmost mask and follow the frontier of unmasking?",
        {
            "begins": "share of sinks within one position of the place at the first step",
            "near": "the same at all steps",
            "distance": "positions between a sink and the place",
            "follows": "share near the place, minus that of shuffled orders or of other keys",
        },
        (
            Claim(("Dream",), "begins", "above", 0.5, {"place": "rightmost mask", "source": "run"}),
            Claim(("Dream",), "follows", "above", 0, {"place": "rightmost mask", "against": "shuffled orders"}),
            Claim(("Dream",), "follows", "above", 0, {"place": "rightmost mask", "against": "other keys"}),
        ),
        'How near is near, and how many sinks; "begin" is checked as: more than half.',
    ),
    "lifetimes": Item(
        "How long sinks live",
        {
            "lifetime": "steps that a sink lives", "censored": "share of lives cut off by the end",
            "lives": "share of lives by length: of so many steps or more, up to the next length",
        },
        unstated="The paper shows single sinks and counts none.",
    ),
    "rare": Item(
        "Layers without a clear sink",
        {
            "clear": "share of heads and steps with a sink, by layer",
            "least": "the same in the layer that has fewest",
        },
        (Claim(("MMaDA",), "least", "below", RARE),),
        f"What clear means; here a layer with a sink in fewer than {RARE:.0%} of its heads and steps has none.",
    ),
}  # fmt: skip


@dataclass
class PaperFigures(Study):
    """See the module."""

    name: ClassVar[str] = "paper"
    needs_mask_token: ClassVar[str] = "most items of the paper are about masked positions"

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        found = self.generate(model, prompts, settings)
        track = found.track
        parts = [tokens_of_rows(track), motion_of(track), of_layers(track), frontier(track, self.seed)]
        return xr.merge([*parts, apart(found, self.seed)])

    def example(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """The track of the run, its final tokens ``final``, and ``pattern`` [moment, query, key] of a head before and
        after its sink moves, with ``moment`` the steps and the attribute ``of`` the layer and head.
        """
        found = self.generate(model, [prompt], settings)
        track, sinks = found.track, found.track.detect().any("pos")
        layer, head = most_moving_head(track)
        path, sunk = track.trajectory(layer, head), sinks[0, :, layer, head].to_numpy()
        moves = np.flatnonzero((np.diff(path) != 0) & sunk[1:] & sunk[:-1])
        step = int(moves[0]) if len(moves) else track.steps // 2 - 1
        seen = [patterns_at(found.run, at, [layer])[layer][head] for at in (step, step + 1)]
        size = track.data.sizes["pos"]
        padded = [torch.nn.functional.pad(one, (0, size - one.shape[1], 0, size - len(one))) for one in seen]
        pattern = xr.DataArray(torch.stack(padded).numpy(), dims=("moment", "query", "key"))
        states = {"pattern": pattern, "moment": [step, step + 1], "final": (("batch", "pos"), found.run.tokens.numpy())}
        return track.data.assign(states).assign_attrs(of=f"layer {layer}, head {head}")

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """None: those of `tables_of` are of all models, which need not be in memory at once."""
        return {}


def tables_of(measured: Mapping[str, xr.Dataset], items: Sequence[str], seed: int) -> "dict[str, DataFrame]":
    """By item, those of `items` that are measured on generations: its measures, with 95 % intervals over them."""
    from pandas import concat

    found = {name: interval_table(measured, list(ITEMS[name].measures), seed) for name in items if name != "table2"}
    if "table2" in items:
        rows = concat([token_rows(name, data, seed) for name, data in measured.items()], ignore_index=True)
        found["table2"] = rows.assign(token=rows["token"].where(rows["kind"] != "mask", "mask"))
    return found


def pictures(
    measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset], tables: "Mapping[str, DataFrame]"
) -> "dict[str, Figure]":
    """The figure of each item of `tables`."""
    tracks = {name: SinkTrack(data) for name, data in examples.items()}

    def rows(item: str, measure: str) -> "DataFrame":
        return tables[item][tables[item]["measure"] == measure]

    def scores() -> "Figure":
        return one_panel(
            lambda ax: score_histogram(
                BINS, {name: data["histogram"].mean("prompt").to_numpy() for name, data in measured.items()}, "sum", ax
            )
        )

    def dots(table: "DataFrame", column: str, xlabel: str) -> "Figure":
        return one_panel(lambda ax: interval_dots(table, column, ax), xlabel=xlabel)

    def along(item: str, measure: str, axis: str) -> "Callable[[Axes], Axes]":
        return lambda ax: curves(rows(item, measure), axis, ax)

    drawn: dict[str, Callable[[], Figure]] = {
        "table2": lambda: dots(tables["table2"].groupby("model", sort=False).head(5), "token", "share of all sinks"),
        "fig1": lambda: maps(tracks),
        "fig3": scores,
        "fig9": scores,
        "fig4": lambda: _each(examples, _moving, 2),
        "fig5": lambda: _each(measured, _strength),
        "fig6": lambda: _each(examples, _separate, 2),
        "fig7": lambda: sink_paths(tracks),
        "fig8": lambda: still_and_moving(tracks),
        "fig10": lambda: one_panel(along("fig10", "no_sink", "epsilon"), xlabel="threshold ε, in column sums",
                              ylabel="share that are no sinks"),
        "frontier": lambda: dots(
            rows("frontier", "near").assign(at=lambda table: table["place"] + ", " + table["source"]), "at",
            "share of sinks within one position",
        ),
        "lifetimes": lambda: one_panel(along("lifetimes", "lives", "length"), xlabel="steps", xscale="log",
                                  ylabel="share of lives"),
        "rare": lambda: one_panel(along("rare", "clear", "layer"), xlabel="layer",
                             ylabel="share of heads and steps with a sink"),
    }  # fmt: skip
    return {name: drawn[name]() for name in tables}


def _each(data: Mapping[str, xr.Dataset], draw: Callable[..., None], per_model: int = 1) -> "Figure":
    """Panels of each model; `draw` takes them, its data and its name."""
    figure, axes = panels(per_model * len(data), columns=2, size=(6.5, 3.8))
    for number, (name, of_model) in enumerate(data.items()):
        draw(*axes[per_model * number : per_model * (number + 1)], of_model, short(name))
    return figure


def _strength(ax: "Axes", data: xr.Dataset, name: str) -> None:
    image = ax.imshow(data["strength"].mean("prompt"), cmap=color_map(), aspect="auto", vmin=0)
    ax.figure.colorbar(image, ax=ax, label="column sum of the strongest key")
    ax.set(xlabel="head", ylabel="layer", title=name)


def _moving(before: "Axes", after: "Axes", data: xr.Dataset, name: str) -> None:
    labels = token_labels(SinkTrack(data))
    for ax, step, pattern in zip((before, after), data["moment"].to_numpy(), data["pattern"], strict=True):
        image = ax.imshow(pattern, cmap=color_map(), interpolation="nearest")
        ax.figure.colorbar(image, ax=ax, label="attention")
        token_ticks(ax.xaxis, labels)
        token_ticks(ax.yaxis, labels)
        ax.set(xlabel="key", ylabel="query", title=f"{name}, {data.attrs['of']}, step {step}")


def _separate(queries: "Axes", single: "Axes", data: xr.Dataset, name: str) -> None:
    """What masked and other queries attend to, and the first sink that lives a single step."""
    step, track = int(data["moment"][1]), SinkTrack(data)
    masked = data["masked"][0, step].to_numpy()
    for label, members, colour in (("masked queries", masked, COLOURS[0]), ("other queries", ~masked, COLOURS[1])):
        queries.plot(data["pattern"][1][members].mean("query"), label=label, color=colour)
    queries.legend(fontsize="small")
    queries.set(xlabel="position", ylabel="attention received", title=f"{name}, {data.attrs['of']}, step {step}")
    lives = motion.lifetimes(track.detect(), motion.existing(track))
    brief = lives[(lives["length"] == 1) & ~lives["censored"] & (lives["start"] > 0)]
    if brief.empty:
        nothing_to_show(single, name, "no sink lives a single step in this generation")
        return
    layer, head, start = (int(brief.iloc[0][column]) for column in ("layer", "head", "start"))
    around = slice(max(0, start - 2), start + 3)
    sink_map(track, layer, head, ax=single, steps=around, tokens=data["final"][0].to_numpy())


def of_layers(track: SinkTrack) -> xr.Dataset:
    """What the items measure by layer, score and length of life, [prompt, ...]; see `ITEMS`."""
    exists, found = motion.existing(track), track.detect()
    strength = track.scores().where(exists).max("pos").mean("step").transpose("batch", *motion.HEADS)
    clear = found.any("pos").where(exists.any("pos")).mean(("step", "head")).transpose("batch", "layer")
    half, lives = track.data.sizes["layer"] // 2, motion.lifetimes(found, exists)
    by_row = [lives["length"][lives["batch"] == row] for row in track["batch"].to_numpy()]
    counts = np.stack([np.histogram(lengths, [*LENGTHS, np.inf])[0] for lengths in by_row])
    data = xr.Dataset(
        {
            "strength": strength, "clear": clear, "least": clear.min("layer"),
            "deeper": np.log(strength[:, half:].mean(motion.HEADS) / strength[:, :half].mean(motion.HEADS)),
            "fewer": clear[:, half:].mean("layer") - clear[:, :half].mean("layer"),
            "histogram": (("batch", "bin"), histogram_of(track, "sum")),
            "no_sink": (("batch", "epsilon"), no_sink_of(track, "sum")),
            "lives": (("batch", "length"), counts / np.maximum(1, counts.sum(axis=1, keepdims=True))),
        },
        coords={"bin": BINS[:-1], "epsilon": list(EPSILONS), "length": list(LENGTHS)},
    )  # fmt: skip
    return data.rename(batch="prompt").drop_vars("prompt")


def apart(found: OwnRun, seed: int) -> xr.Dataset:
    """``apart`` [prompt, split]: share of layers and heads in which two sets of queries have different strongest keys;
    NaN for an autoregressive run. Each set's keys are ranked by its own column sums, at the steps `AT` of the run.

    ``separate`` [prompt]: the first split minus the second.
    """
    run, values = found.run, np.full((len(found.own), len(SPLITS)), np.nan)
    for row, active in enumerate(found.own if not run.causal else ()):
        steps = np.flatnonzero(active)
        values[row] = np.mean([_splits(run, row, int(steps[int(at * len(steps))]), seed) for at in AT], axis=0)
    shares = xr.DataArray(values, dims=("prompt", "split"), coords={"split": SPLITS})
    return xr.Dataset({"apart": shares, "separate": shares[:, 0].drop_vars("split") - shares[:, 1].drop_vars("split")})


def _splits(run: "Generation", row: int, step: int, seed: int) -> list[float]:
    assert run.sinks is not None
    masked = run.sinks["masked"][row, step].to_numpy()[run.real[row].numpy()]
    seen = torch.stack(list(patterns_at(run, step, range(run.model.cfg.n_layers), row).values()))
    halves = noise_of(run.canvas[row, 0], seed, step).permutation(masked)

    def differ(members: np.ndarray) -> float:
        first, second = (seen[:, :, torch.from_numpy(part)].sum(dim=2).argmax(dim=-1) for part in (members, ~members))
        return float((first != second).double().mean())

    return [differ(masked), differ(halves)]
