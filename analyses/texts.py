"""What does hiding sinks cost the likelihood of a text, and do sinks move when one token of it is edited?

    python -m sinklens.zoo.text_scores windows.jsonl
    sinklens analyse texts tiny-text tiny-text-causal --prompts windows.jsonl --group document

No answer is generated: each prompt is a text, read in single passes. A masked model predicts random masked tokens, as
many as a uniformly drawn count, and an autoregressive model every next token. The loss is in nats per predicted token,
so it varies continuously, and texts need neither operands nor templates.

*Sinks* are the keys of a head that receive more attention than uniform attention would give them, by more than
`epsilon`: Σ_i A[i, j] − Σ_i 1 / (keys that query i sees) > ε. In a bidirectional model this is nearly the paper's Eq. 3
(Rulli et al., 2510.15731); in an autoregressive one, the first keys are not sinks merely because all queries see them.
Sinks of one kind of token are hidden in all layers and heads at once, in another pass over the same canvas: no query
but that of their own position sees them. Controls hide as many weaker keys of each head, drawn at random, or keys that
are no sinks until they hold together as much attention as the hidden sinks of their layer (*same mass*).

The strongest key of a head *jumps* if an edit of one token changes it: an *edited* token is replaced by another of its
kind; a *revealed* one takes the place of a mask. In an autoregressive model only queries after an edit can move, so
``edited, later`` sums over these in every model.

Caveat: ``write_ratio`` averages keys of all kinds; a difference need not be due to their being sinks.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import each_prompt
from sinklens.analyses.edits import LEADS, Jumps, compared, edited, measures
from sinklens.analyses.intervals import judged
from sinklens.analyses.mass import of_mass
from sinklens.analyses.strata import groups_of, mean_rows
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.interventions.controls import largest, rest_of
from sinklens.likelihood.draws import by_count
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks.kinds import Kind
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.hooks.points import Point
    from sinklens.model import Model

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "any": tuple(kind for kind in Kind if kind is not Kind.MISSING),
    "start": (Kind.START,),
    "mask": (Kind.MASK,),
    "delimiter": (Kind.NEWLINE, Kind.SPACE, Kind.PUNCTUATION),
    "digit": (Kind.DIGIT,),
    "word": (Kind.WORD,),
}
CHOICES = {
    "sink": "the sinks",
    "random": "as many weaker keys of each head, drawn at random",
    "same_mass": "random keys that are no sinks, with as much attention",
}
EDITS = {
    "edited, later": "a visible token replaced by one of its kind, later queries",
    "edited": "a visible token replaced by one of its kind, all queries",
    "revealed": "a mask replaced by the token of the text, all queries",
}
MEASURES = {
    "nats": "loss with nothing hidden, nats per predicted token",
    "cost": "loss added by hiding keys, nats per predicted token",
    "removed": "share of all attention that the hidden keys receive",
    "per_place": "heads with a sink at a place of this kind, of 1",
    "write_ratio": "log2 of what a sink's value writes (norm after W_O) over what other keys' values write",
    "jump_share": "share of heads and edits at which the strongest key changes with at least this lead",
}
CLAIMS = {
    **{f"hiding {kind} sinks costs more than hiding as much attention": ("cost", kind) for kind in KINDS},
    **{f"a {kind} is a sink more often than a word": ("per_place", kind) for kind in ("start", "mask", "delimiter")},
    "a revealed token moves sinks more than an edited one": ("jump_share", "revealed"),
    "sinks write less than other keys": ("write_ratio", ""),
}

Keys = Bool[Tensor, "layer head key"]
Sums = Float[Tensor, "layer head key"]


class Read(NamedTuple):
    """One pass over a canvas.

    Attributes:
        loss: nats per predicted token.
        pattern: attention of every query.
        writes: norm of each key's value after the head's output matrix.
    """

    loss: float
    pattern: Float[Tensor, "layer head query key"]
    writes: Sums


@dataclass
class Texts(Study):
    """See the module.

    Attributes:
        draws: random masks per text; an autoregressive model reads the text once.
        edits: number of edits of each sort for each text.
        epsilon: a sink receives more than this above uniform attention, in column sums.
        longest: tokens read of a text; the rest is left out.
    """

    name: ClassVar[str] = "texts"
    together: ClassVar[bool] = False
    draws: Count = 2
    edits: Count = 4
    epsilon: float = 3.0
    longest: Count = 512

    def refusal(self, model: "Model") -> str:
        """See `Study.refusal`."""
        if model.tree.timed:
            return "a network that reads a noise level, which the passes of this study do not have. Leave it out."
        if model.tree.changes_attention or model.checkpoint.blocks is not None:
            return "a model whose attention depends on blocks or passes: a text has none. Leave it out."
        if not model.causal and model.mask_token_id is None:
            return "a model without a mask token: nothing in its canvas says which tokens to predict. Leave it out."
        return ""

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """``nats`` and ``write_ratio`` [prompt], ``cost`` and ``removed`` [prompt, kind, choice], ``per_place``
        [prompt, kind], ``jump_share`` [prompt, edit, lead]; means over the draws, NaN where there is nothing.
        """

        def one(prompt: SinglePrompt) -> xr.Dataset:
            ids = model.encode(prompt, self.chat_template).ids[0].cpu()[: self.longest]
            if len(ids) < 3:
                raise SettingError(f"the study texts needs at least three tokens per text; got {prompt!r}.")
            noise = _noise(ids, self.seed)
            found = [_of_canvas(model, ids, masked, self.epsilon, noise) for masked in self._masks(model, ids)]
            data: xr.Dataset = xr.concat(found, dim="draw").mean("draw", skipna=True)
            return data.assign(jump_share=(("edit", "lead"), self._jumps(model, ids, noise)))

        places = {"kind": list(KINDS), "choice": list(CHOICES), "edit": list(EDITS), "lead": list(LEADS)}
        return each_prompt(prompts, one).assign_coords(places)

    def _masks(self, model: "Model", ids: Int[Tensor, " pos"]) -> Bool[Tensor, "draw pos"]:
        """Masked positions of every draw, never the first; none in an autoregressive model."""
        if model.causal:
            return torch.zeros(1, len(ids), dtype=torch.bool)
        generator = torch.Generator().manual_seed(int(_noise(ids, self.seed).integers(2**62)))
        masked, _ = by_count(len(ids) - 1, self.draws, generator)
        return torch.nn.functional.pad(masked, (1, 0), value=False)

    def _jumps(
        self, model: "Model", ids: Int[Tensor, " pos"], noise: np.random.Generator
    ) -> Float[np.ndarray, "edit lead"]:
        """Shares of jumps after edits of the text, and of the canvas of the first draw."""
        masked = self._masks(model, ids)[0]
        kinds, content = kinds_of_vocabulary(model), [Kind.WORD, Kind.DIGIT, Kind.PUNCTUATION, Kind.NEWLINE, Kind.SPACE]
        free = np.isin(kinds[ids.numpy()], content)
        free[[0, -1]] = False
        jumps: list[Jumps | None] = [edited(model, ids, _drawn(free, self.edits, noise), kinds, noise)]
        if not model.causal:
            canvas = ids.masked_fill(masked, int(model.mask_token_id or 0))
            visible, hidden = free & ~masked.numpy(), masked.numpy()
            jumps.append(edited(model, canvas, _drawn(visible, self.edits, noise), kinds, noise, later=False))
            jumps.append(_revealed(model, canvas, ids, _drawn(hidden, self.edits, noise)))
        jumps += [None] * (len(EDITS) - len(jumps))
        return np.array([measures(one)[0] for one in jumps])

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """The differences that `CLAIMS` names, above 0 where they hold."""
        cost, place = data["cost"], data["per_place"]
        jumps = data["jump_share"].isel(lead=0)
        found = {}
        for claim, (measure, what) in CLAIMS.items():
            if measure == "cost":
                found[claim] = cost.sel(kind=what, choice="sink") - cost.sel(kind=what, choice="same_mass")
            elif measure == "per_place":
                found[claim] = place.sel(kind=what) - place.sel(kind="word")
            elif measure == "jump_share":
                found[claim] = jumps.sel(edit=what) - jumps.sel(edit="edited")
            else:
                found[claim] = -data[measure]
        return xr.Dataset({claim: values.reset_coords(drop=True) for claim, values in found.items()})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``texts``: `MEASURES`; ``claims``: `CLAIMS`, one family on each model. Intervals resample groups of texts if
        there are several.
        """
        from pandas import DataFrame

        rows, claims = [], []
        for model, data in measured.items():
            group = groups_of(data)
            for measure in MEASURES:
                rows += mean_rows(model, measure, data[measure], self.seed, group)
            for claim, values in self.contrasts(data).items():
                claims += mean_rows(model, str(claim), values, self.seed, group, claim=True)
        table = DataFrame(rows).dropna(subset="estimate")
        table = table.assign(meaning=table["measure"].map(MEASURES)).drop(columns="p")
        return {"texts": table, "claims": judged(DataFrame(claims))}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: loss added by hiding keys of each kind."""
        from sinklens.views.charts import interval_dots
        from sinklens.views.figures import panels

        table = self.tables(measured)["texts"].query("measure == 'cost'")
        figure, axes = panels(len(CHOICES), columns=3, size=(4, 3))
        for (choice, meaning), ax in zip(CHOICES.items(), axes, strict=True):
            interval_dots(table[table["choice"] == choice], "kind", ax, line=0.0)
            ax.set(xlabel="loss added, nats per token", title=meaning)
        return {"costs": figure}


def _noise(ids: Int[Tensor, " pos"], seed: int) -> np.random.Generator:
    """Random numbers that depend on the seed and the text alone."""
    digest = hashlib.sha256(repr(ids.tolist()).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def _drawn(allowed: Bool[np.ndarray, " pos"], number: int, noise: np.random.Generator) -> list[int]:
    """`number` allowed places, with replacement; none if there are none."""
    places = np.flatnonzero(allowed)
    return noise.choice(places, number).tolist() if len(places) else []


def _revealed(
    model: "Model", canvas: Int[Tensor, " pos"], text: Int[Tensor, " pos"], places: Sequence[int]
) -> Jumps | None:
    """Jumps after the mask at each place is replaced by the token of the text."""
    if not places:
        return None
    after = canvas.repeat(len(places), 1)
    for row, place in enumerate(places):
        after[row, place] = text[place]
    return compared(column_sums(model, canvas[None])[:, 0], column_sums(model, after)[:, 0])


def _of_canvas(
    model: "Model",
    ids: Int[Tensor, " pos"],
    masked: Bool[Tensor, " pos"],
    epsilon: float,
    noise: np.random.Generator,
) -> xr.Dataset:
    """The measurements of one canvas, without jumps."""
    canvas = ids if model.causal else ids.masked_fill(masked, int(model.mask_token_id or 0))
    plain = read(model, ids, canvas, masked)
    kinds = torch.from_numpy(kinds_of_vocabulary(model)[canvas.numpy()].astype(np.int64))
    sums = plain.pattern.sum(dim=-2)
    sinks = sums - uniform(len(ids), model.causal) > epsilon
    seen = sums - plain.pattern.diagonal(dim1=-2, dim2=-1)  # what hiding takes away
    order = torch.from_numpy(noise.random(sums.shape))
    cost, removed = np.full((2, len(KINDS), len(CHOICES)), np.nan)
    per_place = np.full(len(KINDS), np.nan)
    for row, wanted in enumerate(KINDS.values()):
        of_kind = torch.isin(kinds, torch.tensor([int(kind) for kind in wanted]))
        if of_kind.any():
            per_place[row] = float(sinks[..., of_kind].double().mean())
        treated = sinks & of_kind
        if not treated.any():
            continue
        for column, keys in enumerate(_choices(treated, sinks, sums, seen, order).values()):
            cost[row, column] = read(model, ids, canvas, masked, keys).loss - plain.loss
            removed[row, column] = float((seen * keys).sum() / seen.sum())
    axes = ("kind", "choice")
    written = _write_ratio(plain.writes, sinks)
    return xr.Dataset(
        {"nats": plain.loss, "write_ratio": written, "cost": (axes, cost), "removed": (axes, removed),
         "per_place": (axes[:1], per_place)}
    )  # fmt: skip


def uniform(length: int, causal: bool) -> Float[Tensor, " key"]:
    """The column sums of uniform attention: 1 in a bidirectional model, and less for later keys in a causal one."""
    sees = torch.ones(length, length).tril() if causal else torch.ones(length, length)
    return (sees / sees.sum(dim=-1, keepdim=True)).sum(dim=0)


def _choices(treated: Keys, sinks: Keys, sums: Sums, seen: Sums, order: Sums) -> dict[str, Keys]:
    """The keys of `CHOICES` for some of the sinks."""
    rest = rest_of(sums, treated, torch.ones_like(treated)) & ~sinks
    layers, heads, keys = sums.shape
    flat = (layers, heads * keys)
    mass = of_mass(
        seen.reshape(flat).double().numpy(), (~sinks).reshape(flat).numpy(),
        (seen * treated).sum(dim=(1, 2)).double().numpy()[:, None], order.reshape(flat).argsort(dim=-1).numpy(),
    )  # fmt: skip
    return {
        "sink": treated,
        "random": largest(order, rest, treated.sum(dim=-1, keepdim=True)),
        "same_mass": torch.from_numpy(mass).reshape(layers, heads, keys),
    }


def _write_ratio(writes: Sums, sinks: Keys) -> float:
    """log2 of the mean norm at sinks over that at the other keys, mean over the heads that have both."""
    some = sinks.any(dim=-1) & (~sinks).any(dim=-1)
    if not some.any():
        return float("nan")
    at, off = ((writes * keys).sum(dim=-1) / keys.sum(dim=-1).clamp_min(1) for keys in (sinks, ~sinks))
    return float((at[some] / off[some]).log2().mean())


@torch.no_grad()
def read(
    model: "Model",
    ids: Int[Tensor, " pos"],
    canvas: Int[Tensor, " pos"],
    masked: Bool[Tensor, " pos"],
    hidden: Keys | None = None,
) -> Read:
    """One pass over a canvas of the text `ids`, with the loss at masked positions, or of every next token.

    Args:
        hidden: keys that no query but their own position sees.
    """
    layers, kept = range(model.cfg.n_layers), dict[str, Tensor]()

    def keep(value: Tensor, hook: "Point") -> None:
        kept[str(hook.name)] = value.float().cpu()

    names = [f"blocks.{layer}.attn.{point}" for layer in layers for point in ("hook_pattern", "hook_v")]
    watched: list[Any] = [(name, keep) for name in names] if hidden is None else _hiding(hidden)
    with model.tree.hooks(fwd_hooks=watched):
        logits = model.tree(canvas[None].to(model.cfg.device))[0].double().cpu()
    rows, tokens = (logits[:-1], ids[1:]) if model.causal else (logits[masked], ids[masked])
    loss = float(torch.nn.functional.cross_entropy(rows, tokens))
    if hidden is not None:
        return Read(loss, torch.empty(0), torch.empty(0))
    pattern = torch.stack([kept[f"blocks.{layer}.attn.hook_pattern"][0] for layer in layers])
    writes = torch.stack([_writes(model, layer, kept[f"blocks.{layer}.attn.hook_v"][0]) for layer in layers])
    return Read(loss, pattern, writes)


def _writes(model: "Model", layer: int, value: Float[Tensor, "pos kv_head d_head"]) -> Float[Tensor, "head pos"]:
    """Norm of every value after the output matrix of every head that reads it."""
    weight = model.blocks[layer].attn.W_O.float().cpu()
    of_head = value.transpose(0, 1).repeat_interleave(len(weight) // value.shape[1], dim=0)
    return torch.einsum("hpd,hdm->hpm", of_head, weight).norm(dim=-1)


def _hiding(hidden: Keys) -> list[tuple[str, Callable[..., Tensor]]]:
    """Hooks that hide keys from every query but that of their own position."""
    own = torch.eye(hidden.shape[-1], dtype=torch.bool)

    def hook_of(keys: Bool[Tensor, "head key"]) -> Callable[..., Tensor]:
        def hide(value: Tensor, hook: "Point") -> Tensor:
            return value.masked_fill((keys[:, None] & ~own).to(value.device), -torch.inf)

        return hide

    return [(f"blocks.{layer}.attn.hook_attn_mask", hook_of(keys)) for layer, keys in enumerate(hidden)]
