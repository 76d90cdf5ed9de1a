"""Who writes the key of a sink, who reads it, and which edge moves a sink that jumps?

    sinklens analyse circuits tiny-llada tiny-dream

Per prompt of a diffusion model, in layers that read other components (all but the first):

- ``excess``: the key's part of the pre-softmax score minus its mean over the other keys (`write_attribution`), split
  over the classes of components that wrote it, for two sinks: the ``strongest`` of all steps, and the ``mobile`` one,
  the first new place in the head with the most jumps. Each beside a ``control``: the nearest key of the same step,
  head, token kind and side of the prompt that is not a sink.
- ``read``: what the step's predictions lose without the key's message, i.e. with its value in the head replaced by the
  mean (`read_attribution`): the KL divergence if only some later components read the change. Of the same sinks and
  controls.
- ``undone``: share of a jump that is undone if paths into the head's queries or keys carry what their senders wrote one
  step before. A jump is a change of the strongest key between two steps, each a sink at its step. Its size is the rise
  of the new key's score over the old one's. Over the largest jumps of a prompt: Σ undone / Σ size.
- ``local``: the same for the queries at the positions that the step before decided, and at as many nearest others.
  These keep their token, so what is carried to them hardly differs. A control of equal size is ``again``: as many
  answer tokens that were decided earlier, each masked again in the canvas whose values are carried, with changes of
  the embedding as near as possible to those of the just decided tokens (rewriting.py). ``change`` is the mean change.
  Jumps that lack as many earlier tokens are left out of all three.

Caveat: shares of single classes need not add up to 1, because norms and the softmax are nonlinear, and a sum of scores
over queries does not say which query looks where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import each_prompt
from sinklens.analyses.intervals import interval_table, judged
from sinklens.analyses.rewriting import embedding_change, masked_again
from sinklens.analyses.study import SINK, Study
from sinklens.experiments import Jump, jump_undone, read_attribution, sink_jumps, write_attribution
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks.kinds import kinds
from sinklens.sinks.matching import ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

ROLES = {"strongest": "the strongest sink", "mobile": "the most mobile head's sink"}
PLACES = {"sink": "sink", "control": "nearest other key of the kind"}
WRITERS = {"embed": "embedding", "head": "heads", "mlp": "MLPs", "bias": "biases"}
READERS = {
    "queries": "queries of later heads",
    "keys": "keys of later heads",
    "values": "values of later heads",
    "mlp": "MLPs",
    "logits": "logits",
    "all": "all later components",
}
LETTERS = {"q": "queries", "k": "keys"}
SENDERS = {"all": "all components", "embed": "embedding", "head": "heads", "mlp": "MLPs"}
WHERE = {
    "decided": "just decided positions",
    "nearby": "as many nearest others",
    "again": "as many tokens decided earlier, masked again",
}
AXES: dict[str, dict[str, Mapping[str, str]]] = {
    "excess": {"role": ROLES, "place": PLACES, "writer": WRITERS},
    "read": {"role": ROLES, "place": PLACES, "reader": READERS},
    "undone": {"letter": LETTERS, "sender": SENDERS},
    "local": {"where": WHERE},
    "change": {"where": WHERE},
    "jumps": {},
}
MEASURES = {
    "excess": "part of the score minus its mean over the other keys",
    "read": "KL divergence of the predictions without the key's message (nats)",
    "undone": "share of the jumps undone by patching paths from the step before",
    "local": "share undone through the queries of some positions",
    "change": "length of the change of the embedding at these positions",
    "jumps": "jumps from sink to sink",
}


@dataclass
class Circuits(Study):
    """See the module.

    Attributes:
        largest: number of jumps per prompt that are patched, the largest first.
    """

    name: ClassVar[str] = "circuits"
    needs_complete_passes: ClassVar[str] = (
        "edges are patched in separate passes, which lack the self-conditioning of the step before"
    )
    together: ClassVar[bool] = False
    largest: int = 4

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt, *`AXES`]; NaN for autoregressive models and where there is no such sink or jump."""

        def one(prompt: SinglePrompt) -> xr.Dataset:
            values = {name: np.full([len(axis) for axis in axes.values()], np.nan) for name, axes in AXES.items()}
            if not model.causal:
                self._of_prompt(self.generate(model, [prompt], settings).run, values)
            return xr.Dataset({name: (list(AXES[name]), value) for name, value in values.items()})

        coords = {axis: list(labels) for axes in AXES.values() for axis, labels in axes.items()}
        return each_prompt(prompts, one).assign_coords(coords)

    def _of_prompt(self, run: "Generation", values: dict[str, np.ndarray]) -> None:
        """Fill in the measurements of a run of one prompt."""
        assert run.sinks is not None
        score, sinks = run.sinks.scores().to_numpy()[0], run.sinks.detect().to_numpy()[0]
        found = sink_jumps(run)
        values["jumps"] = np.array(float(len(found)))
        kind = kinds(run.sinks).to_numpy()[0]
        side = np.arange(kind.shape[1]) < run.prompt_length
        for role, (step, layer, head, key) in enumerate((strongest(score, sinks), mobile(found))):
            if step < 0:
                continue
            free = ~sinks[step, layer, head] & (kind[step] == kind[step, key]) & (side == side[key])
            for place, position in enumerate((key, nearest(free, key))):
                if position >= 0:
                    values["excess"][role, place] = written(run, step, layer, head, position)
                    values["read"][role, place] = read(run, step, layer, head, position)
        if found:
            values["undone"] = mediated(run, found[: self.largest])
            values["local"], values["change"] = localized(run, found[: self.largest])

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """``difference`` [prompt, claim] of every claim; above 0 if it holds."""
        pairs = _pairs(data)
        values = xr.concat(list(pairs.values()), dim="claim")
        return xr.Dataset({"difference": values.assign_coords(claim=list(pairs))})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``writers``: ``excess``; ``readers``: ``read``; ``edges``: ``undone``, ``local``, ``change`` and ``jumps``;
        ``claims``: paired differences.
        """
        from pandas import concat

        edges = [interval_table(measured, [name], self.seed) for name in ("undone", "local", "change", "jumps")]
        return {
            "writers": interval_table(measured, ["excess"], self.seed),
            "readers": interval_table(measured, ["read"], self.seed),
            "edges": concat(edges, ignore_index=True),
            "claims": claims(measured, self.seed),
        }

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``writers``, ``readers`` and ``edges``: means with intervals."""
        import matplotlib.pyplot as plt

        figures = {}
        for name, measure in (("writers", "excess"), ("readers", "read"), ("edges", "undone")):
            table = interval_table(measured, [measure], self.seed)
            figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
            for number, (model, part) in enumerate(table.groupby("model", sort=False)):
                places = np.arange(len(part)) + 0.2 * number
                bounds = [part["estimate"] - part["low"], part["high"] - part["estimate"]]
                ax.errorbar(part["estimate"], places, xerr=bounds, fmt="o", label=str(model))
                ax.set_yticks(places, part[list(AXES[measure])].agg(", ".join, axis=1))
            ax.axvline(0, color="0.6", linewidth=0.8)
            ax.set(xlabel=f"{MEASURES[measure]}\n95 % intervals over prompts; {SINK}")
            ax.invert_yaxis()
            ax.legend()
            figures[name] = figure
        return figures


def strongest(score: np.ndarray, sinks: np.ndarray) -> tuple[int, int, int, int]:
    """Step, layer, head and position of the sink with the largest score after the first layer; -1 without one."""
    value = np.where(sinks, score, -np.inf)[:, 1:]
    step, layer, head, key = np.unravel_index(value.argmax(), value.shape)
    return (int(step), int(layer) + 1, int(head), int(key)) if value.max() > -np.inf else (-1, -1, -1, -1)


def mobile(found: Sequence[Jump]) -> tuple[int, int, int, int]:
    """The same of the first new place in the head with the most jumps (the first such head)."""
    if not found:
        return (-1, -1, -1, -1)
    places = [(jump.layer, jump.head) for jump in found]
    layer, head = min(set(places), key=lambda place: (-places.count(place), place))
    first = min((jump for jump in found if (jump.layer, jump.head) == (layer, head)), key=lambda jump: jump.step)
    return first.step, layer, head, first.new


def nearest(free: Bool[np.ndarray, " pos"], key: int) -> int:
    """The position in `free` that is nearest to `key`, the earlier of two; -1 if none is free."""
    places = np.flatnonzero(free)
    return int(places[np.abs(places - key).argmin()]) if places.size else -1


def written(run: "Generation", step: int, layer: int, head: int, key: int) -> Float[np.ndarray, " writer"]:
    """The excess of a key's score by class of writer; the rest, which is rounding, is left out."""
    table = write_attribution(run, step, layer, head, key=key, weighted=True)
    parts = table["from_key_excess"].groupby(table["kind"]).sum()
    return parts.sel(kind=list(WRITERS)).to_numpy()


def read(run: "Generation", step: int, layer: int, head: int, key: int) -> Float[np.ndarray, " reader"]:
    """The effect of a key's message by class of reader."""
    cfg = run.model.cfg
    later, heads, key_heads = range(layer + 1, cfg.n_layers), cfg.n_heads, cfg.n_key_value_heads
    letters = {"queries": ("q", heads), "keys": ("k", key_heads), "values": ("v", key_heads)}
    readers = {
        name: [f"L{n}H{number}.{letter}" for n in later for number in range(count)]
        for name, (letter, count) in letters.items()
        if later
    }
    readers |= {"mlp": [f"{n}_mlp_in" for n in (layer, *later)], "logits": ["logits"]}
    table = read_attribution(run, step, layer, head, key, readers=readers)
    return table["kl"].reindex(reader=list(READERS), fill_value=0.0).to_numpy()  # no later head reads the last layer


def mediated(run: "Generation", found: Sequence[Jump]) -> Float[np.ndarray, "letter sender"]:
    """``undone`` over some jumps: Σ undone / Σ size."""
    undone = [[sum(carried(run, jump, sender, letter) for jump in found) for sender in SENDERS] for letter in LETTERS]
    return np.array(undone) / sum(jump.size for jump in found)


def localized(
    run: "Generation", found: Sequence[Jump]
) -> tuple[Float[np.ndarray, " where"], Float[np.ndarray, " where"]]:
    """``local``, Σ undone / Σ size, and ``change``, the mean change of the embedding, over the jumps that have equally
    many positions of each kind.
    """
    undone, sizes, change, number = (np.zeros(len(WHERE)) for _ in range(4))
    for jump in found:
        places = _places(run, jump)
        counts = {positions.size for positions, _ in places}
        if 0 in counts or len(counts) > 1:  # too few earlier tokens to compare with
            continue
        for place, (positions, source) in enumerate(places):
            undone[place] += carried(run, jump, "all", "q", positions.tolist(), source)
            sizes[place] += jump.size
            change[place] += embedding_change(run.model, source, run.canvas[0, jump.step])[positions].sum()
            number[place] += positions.size
    return ratio(undone, sizes), ratio(change, number)


def _places(run: "Generation", jump: Jump) -> list[tuple[Int[np.ndarray, " place"], Int[Tensor, " pos"]]]:
    """For each of `WHERE`, positions and the canvas whose values are carried to them."""
    before, now = run.canvas[0, jump.step - 1], run.canvas[0, jump.step]
    decided = (now != before).numpy()
    again, masked = masked_again(run.model, before, now, run.prompt_length)
    return [(np.flatnonzero(decided), before), (neighbours(decided), before), (again, masked)]


def neighbours(chosen: Bool[np.ndarray, " pos"]) -> Int[np.ndarray, " place"]:
    """As many other positions as are chosen, each the nearest to a chosen one that is still free."""
    free = ~chosen
    for key in np.flatnonzero(chosen):
        position = nearest(free, int(key))
        if position >= 0:
            free[position] = False
    return np.flatnonzero(~free & ~chosen)


def carried(
    run: "Generation",
    jump: Jump,
    sender: str,
    letter: str,
    positions: list[int] | None = None,
    source: Int[Tensor, " pos"] | None = None,
) -> float:
    """By how much new − old falls if paths carry what a class of `SENDERS` wrote one step before, or on `source`."""
    names = _senders(run.model, jump.layer, sender)
    return jump.size * jump_undone(run, jump, names, letter, positions=positions, source=source)


def _senders(model: "Model", layer: int, sender: str) -> list[str]:
    classes = {
        "embed": ["embed"],
        "head": [f"L{n}H{head}" for n in range(layer) for head in range(model.cfg.n_heads)],
        "mlp": [f"{n}_mlp_out" for n in range(layer)],
    }
    return [name for kind, names in classes.items() if sender in (kind, "all") for name in names]


def claims(measured: Mapping[str, xr.Dataset], seed: int) -> "DataFrame":
    """Differences paired by prompt, one family per model (`judged`)."""
    from pandas import concat

    rows = []
    for model, data in measured.items():
        for claim, values in _pairs(data).items():
            part = xr.Dataset({"difference": values})
            rows.append(interval_table({model: part}, ["difference"], seed, null=0.0).assign(claim=claim))
    return judged(concat(rows, ignore_index=True))


def _pairs(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """The claims, and the differences that are above 0 if they hold."""
    found = {}
    for role, name in ROLES.items():
        beyond = data["excess"].sel(role=role, place="sink") - data["excess"].sel(role=role, place="control")
        for writer in ("head", "mlp"):
            found[f"{name}: {WRITERS[writer]} write more of its score than of its control's"] = beyond.sel(
                writer=writer
            )
        with_key, with_control = (data["read"].sel(role=role, reader="all", place=place) for place in PLACES)
        found[f"{name}: predictions need its message more than its control's"] = with_key - with_control
    undone, local = data["undone"], data["local"]
    through = undone.sel(sender="all")
    found["jumps go through queries more than through keys"] = through.sel(letter="q") - through.sel(letter="k")
    for letter, name in LETTERS.items():
        part = undone.sel(letter=letter)
        found[f"through {name}: heads move sinks more than MLPs"] = part.sel(sender="head") - part.sel(sender="mlp")
    for where, name in {"nearby": "those nearby", "again": "those of earlier tokens masked again"}.items():
        beyond = local.sel(where="decided") - local.sel(where=where)
        found[f"queries of just decided positions move sinks more than {name}"] = beyond
    return {claim: values.reset_coords(drop=True) for claim, values in found.items()}
