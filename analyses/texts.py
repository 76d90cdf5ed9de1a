"""What does hiding sinks cost the likelihood of a text, and do sinks move when one token of it is edited?

    python -m training.text_scores windows.jsonl
    sinklens analyse texts tiny-text tiny-text-causal --prompts windows.jsonl --group document

No answer is generated: each prompt is a text, read in single passes. A masked model predicts random
masked tokens, as many as a uniformly drawn count or as each of `shares` says, and an autoregressive model every next
token. The loss is in nats per predicted token, so it varies continuously, and texts need neither operands nor
templates.

*Sinks* are the keys of a head that receive more attention than uniform attention would give them, by more than
`epsilon`: Σ_i A[i, j] − Σ_i 1 / (keys that query i sees) > ε. In a bidirectional model this is nearly the paper's Eq. 3
(Rulli et al., 2510.15731); in an autoregressive one, the first keys are not sinks merely because all queries see them.
Sinks of one kind of token are hidden in all layers and heads at once, in another pass over the same canvas. Controls
hide as many weaker keys of each head, drawn at random, or keys that are no sinks until they hold together as much
attention as the hidden sinks of their layer (*same mass*).

Sinks are also left *stale*, as a cache would leave them: with the keys and values of a canvas that has `age` more
masks. An autoregressive model has no stale keys, because later tokens do not change earlier ones.

The strongest key of a head *jumps* if an edit of one token changes it: an *edited* token is replaced by another of its
kind; a *revealed* one takes the place of a mask. In an autoregressive model only queries after an edit can move, so
``edited, later`` sums over these in every model.

If the study runs on masked and causal models, ``pairs`` compares each masked one with each causal one, text by text.

Caveat: ``write_ratio``, ``key_ratio`` and ``alignment`` average keys of all kinds; a difference need not be due to
their being sinks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import each_prompt
from sinklens.analyses.edits import LEADS, Jumps, compared, edited, measures
from sinklens.analyses.estimates.strata import groups_of, mean_rows
from sinklens.analyses.estimates.tables import judged
from sinklens.analyses.mass import hidden_keys, of_mass
from sinklens.analyses.runs import noise_of
from sinklens.analyses.study import Study, dot_panels
from sinklens.errors import SettingError, nearest
from sinklens.experiments.nll.noise import by_count
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.interventions.controls import largest, rest_of
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
STALE = {**CHOICES, "all": "all keys that are not masked on the earlier canvas"}
NO_OP = 0.2  # a value that writes less, in medians of its head, writes next to nothing
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
    "no_op_share": "share of the sinks whose value writes less than a fifth of the head's median",
    "key_ratio": "log2 of the norm of a sink's key over that of other keys",
    "alignment": "mean cosine of queries with a sink's key, minus that with other keys",
    "sink_heads": "heads with a sink, of 1",
    "first_mass": "share of the attention that the first position receives",
    "first_strongest": "heads whose strongest key is the first position, of 1",
    "stale_cost": "loss added by stale keys and values, nats per predicted token",
    "stale_mass": "share of all attention that the stale keys receive",
    "jump_share": "share of heads and edits at which the strongest key changes with at least this lead",
}


OF_LAYERS = ("sink_heads", "first_mass", "first_strongest")

Keys = Bool[Tensor, "layer head key"]
Sums = Float[Tensor, "layer head key"]
Hooks = list[tuple[str, Callable[..., Any]]]


class Difference(NamedTuple):
    """What a claim compares.

    Attributes:
        measure: of `MEASURES`.
        more, less: where it is larger, and where smaller, if the claim holds; None for 0.
    """

    measure: str
    more: Mapping[str, Any] | None = None
    less: Mapping[str, Any] | None = None

    def of(self, data: xr.Dataset) -> xr.DataArray:
        """The difference of each text, [prompt]."""
        values = data[self.measure].mean("layer") if "layer" in data[self.measure].dims else data[self.measure]
        more, less = (xr.DataArray(0.0) if at is None else values.sel(dict(at)) for at in (self.more, self.less))
        return (more - less).drop_vars(["kind", "choice", "stale", "edit", "lead"], errors="ignore")


def _beyond_mass(kind: str) -> Difference:
    """What sinks of a kind cost beyond as much attention."""
    return Difference("cost", {"kind": kind, "choice": "sink"}, {"kind": kind, "choice": "same_mass"})


def _jumps(edit: str) -> dict[str, Any]:
    """Every jump after an edit."""
    return {"edit": edit, "lead": LEADS[0]}


CLAIMS = {
    **{f"hiding {kind} sinks costs more than hiding as much attention": _beyond_mass(kind) for kind in KINDS},
    **{
        f"a {kind} is a sink more often than a word": Difference("per_place", {"kind": kind}, {"kind": "word"})
        for kind in ("start", "mask", "delimiter")
    },
    "a revealed token moves sinks more than an edited one": Difference(
        "jump_share", _jumps("revealed"), _jumps("edited")
    ),
    "sinks write less than other keys": Difference("write_ratio", less={}),
    "stale sinks cost more than as much stale attention": Difference(
        "stale_cost", {"stale": "sink"}, {"stale": "same_mass"}
    ),
}
PAIRS = {
    **{f"hiding {kind} sinks, beyond as much attention": _beyond_mass(kind) for kind in KINDS if kind != "mask"},
    **{
        f"heads with a sink at a {kind}": Difference("per_place", {"kind": kind})
        for kind in ("start", "delimiter", "word")
    },
    **{MEASURES[name]: Difference(name, {}) for name in OF_LAYERS},
    "log2 of what sinks write": Difference("write_ratio", {}),
    "sinks that are no-ops": Difference("no_op_share", {}),
    "jumps, a token replaced, later queries": Difference("jump_share", _jumps("edited, later")),
}
"""What `paired` compares: the masked model minus the causal one."""


@dataclass
class Texts(Study):
    """See the module.

    Attributes:
        draws: random masks per text; an autoregressive model reads the text once.
        edits: number of edits of each sort for each text.
        epsilon: a sink receives more than this above uniform attention, in column sums.
        longest: tokens read of a text; the rest is left out.
        age: tokens decided since stale keys were computed; 0 measures no stale keys.
        shares: shares of a text that are masked, each with measures of its own (axis ``share``), whose masks contain
            those of smaller shares; empty for the counts that a likelihood draws. An autoregressive model has the same
            values at each.
        kinds: of `KINDS`, the sinks that are hidden.
    """

    name: ClassVar[str] = "texts"
    together: ClassVar[bool] = False
    draws: Count = 2
    edits: Count = 4
    epsilon: float = 3.0
    longest: Count = 512
    age: Annotated[int, Ge(0)] = 8
    shares: tuple[Annotated[float, Gt(0), Le(1)], ...] = ()
    kinds: tuple[str, ...] = tuple(KINDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.kinds:
            if kind not in KINDS:
                raise SettingError(f"kinds has {kind!r}; known: {', '.join(KINDS)}.{nearest(kind, KINDS)}")

    def refusal(self, model: "Model") -> str:
        if model.tree.timed:
            return "a network that reads a noise level, which the passes of this study do not have. Leave it out."
        if model.tree.changes_attention or model.checkpoint.blocks is not None:
            return "a model whose attention depends on blocks or passes: a text has none. Leave it out."
        if not model.causal and model.mask_token_id is None:
            return "a model without a mask token: nothing in its canvas says which tokens to predict. Leave it out."
        return ""

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """``nats``, ``write_ratio``, ``no_op_share``, ``key_ratio``, ``alignment`` and ``causal`` [prompt];
        ``sink_heads``, ``first_mass`` and ``first_strongest`` [prompt, layer]; ``cost`` and ``removed`` [prompt, kind,
        choice]; ``stale_cost`` and ``stale_mass`` [prompt, stale]; ``per_place`` [prompt, kind]; ``jump_share``
        [prompt, edit, lead]. Means over the draws, NaN where there is nothing.
        """

        def one(prompt: SinglePrompt) -> xr.Dataset:
            ids = model.encode(prompt, self.chat_template).ids[0].cpu()[: self.longest]
            if len(ids) < 3:
                raise SettingError(f"the study texts needs at least three tokens per text; got {prompt!r}.")
            noise = noise_of(ids, self.seed)
            found, jumps = list[xr.Dataset](), list[Jumps | None]([None])
            for canvases in self._masks(model, ids):
                of_draw = [self._of_canvas(model, TextCanvas(ids, masked), noise) for masked in canvases]
                data: xr.Dataset = xr.concat(of_draw, dim="draw").mean("draw", skipna=True)
                jumps = self._jumps(model, ids, canvases[0], noise, jumps[0])
                shares = np.array([measures(one)[0] for one in jumps])
                found.append(data.assign(jump_share=(("edit", "lead"), shares)))
            if not self.shares:
                return found[0].assign(causal=float(model.causal))
            every: xr.Dataset = xr.concat(found * (len(self.shares) // len(found)), dim="share")
            return every.assign(causal=float(model.causal)).assign_coords(share=list(self.shares))

        places = {
            "kind": list(KINDS), "choice": list(CHOICES), "stale": list(STALE), "edit": list(EDITS),
            "lead": list(LEADS),
        }  # fmt: skip
        return each_prompt(prompts, one).assign_coords(places)

    def _masks(self, model: "Model", ids: Int[Tensor, " pos"]) -> list[Bool[Tensor, "draw pos"]]:
        """Masked positions of every share and draw, never the first; none in an autoregressive model."""
        if model.causal:
            return [torch.zeros(1, len(ids), dtype=torch.bool)]
        generator = torch.Generator().manual_seed(int(noise_of(ids, self.seed).integers(2**62)))
        if not self.shares:
            masks = [by_count(len(ids) - 1, self.draws, generator)[0]]
        else:
            ranks = torch.rand(self.draws, len(ids) - 1, generator=generator).argsort(dim=1).argsort(dim=1)
            masks = [ranks < max(1, round(share * (len(ids) - 1))) for share in self.shares]
        return [torch.nn.functional.pad(masked, (1, 0), value=False) for masked in masks]

    def _of_canvas(self, model: "Model", canvas: "TextCanvas", noise: np.random.Generator) -> xr.Dataset:
        """The measurements of one canvas, without jumps."""
        plain, tokens = read(model, canvas), canvas.tokens(model)
        kinds = torch.from_numpy(kinds_of_vocabulary(model)[tokens.numpy()].astype(np.int64))
        sinks = plain.sums - uniform(len(tokens), model.causal) > self.epsilon
        order, every = torch.from_numpy(noise.random(sinks.shape)), torch.ones(len(tokens), dtype=torch.bool)
        cost, removed = np.full((2, len(KINDS), len(CHOICES)), np.nan)
        per_place, mass, hidden = np.full(len(KINDS), np.nan), plain.from_others, [KINDS[kind] for kind in self.kinds]
        for row, wanted in enumerate(KINDS.values()):
            of_kind = torch.isin(kinds, torch.tensor([int(kind) for kind in wanted]))
            if of_kind.any():
                per_place[row] = float(sinks[..., of_kind].double().mean())
            treated = sinks & of_kind
            if not treated.any() or wanted not in hidden:
                continue
            for column, keys in enumerate(key_choices(treated, sinks, plain, order, every).values()):
                cost[row, column] = loss(model, canvas, hiding(keys)) - plain.loss
                removed[row, column] = float((mass * keys).sum() / mass.sum())
        earlier = None if model.causal or not self.age else earlier_canvas(canvas, self.age, noise)
        stale = np.full((2, len(STALE)), np.nan)
        if earlier is not None:
            stale = np.array(list(stale_costs(model, canvas, plain, earlier, self.epsilon, order).values())).T
        axes, writes, first = ("kind", "choice"), written(model, plain), plain.sums.argmax(dim=-1) == 0
        received = (plain.sums[..., 0] / plain.sums.sum(dim=-1)).mean(dim=-1)
        return xr.Dataset(
            {"nats": plain.loss, "write_ratio": write_ratio(writes, sinks), "no_op_share": no_ops(writes, sinks),
             "key_ratio": write_ratio(plain.key_norms, sinks), "alignment": alignment(plain, sinks),
             "sink_heads": ("layer", sinks.any(dim=-1).double().mean(dim=-1)), "first_mass": ("layer", received),
             "first_strongest": ("layer", first.double().mean(dim=-1)),
             "cost": (axes, cost), "removed": (axes, removed), "per_place": (axes[:1], per_place),
             "stale_cost": ("stale", stale[0]), "stale_mass": ("stale", stale[1])}
        )  # fmt: skip

    def _jumps(
        self,
        model: "Model",
        ids: Int[Tensor, " pos"],
        masked: Bool[Tensor, " pos"],
        noise: np.random.Generator,
        later: Jumps | None,
    ) -> list[Jumps | None]:
        """Jumps after edits of the text, which are `later` if they are known, and of a canvas."""
        kinds, content = kinds_of_vocabulary(model), [Kind.WORD, Kind.DIGIT, Kind.PUNCTUATION, Kind.NEWLINE, Kind.SPACE]
        free = np.isin(kinds[ids.numpy()], content)
        free[[0, -1]] = False
        jumps = [later or edited(model, ids, _drawn(free, self.edits, noise), kinds, noise)]
        if not model.causal:
            canvas = TextCanvas(ids, masked).tokens(model)
            visible, hidden = free & ~masked.numpy(), masked.numpy()
            jumps.append(edited(model, canvas, _drawn(visible, self.edits, noise), kinds, noise, later=False))
            jumps.append(_revealed(model, canvas, ids, _drawn(hidden, self.edits, noise)))
        return jumps + [None] * (len(EDITS) - len(jumps))

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """The differences that `CLAIMS` names, above 0 where they hold."""
        return xr.Dataset({claim: difference.of(data) for claim, difference in CLAIMS.items()})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``texts``: `MEASURES`; ``layers``: `OF_LAYERS` by layer; ``claims``: `CLAIMS`, one family on each model;
        ``pairs``: `PAIRS`, one family on each pair of a masked and a causal model. Intervals resample groups of texts
        if there are several.
        """
        from pandas import DataFrame

        rows, layers, claims = [], [], []
        for model, data in measured.items():
            group = groups_of(data)
            for measure in MEASURES:
                values = data[measure].mean("layer") if "layer" in data[measure].dims else data[measure]
                rows += mean_rows(model, measure, values, self.seed, group)
            for measure in OF_LAYERS:
                layers += mean_rows(model, measure, data[measure], self.seed, group)
            for claim, values in self.contrasts(data).items():
                claims += mean_rows(model, str(claim), values, self.seed, group, claim=True)
        table = DataFrame(rows).dropna(subset="estimate")
        table, by_layer = (
            one.assign(meaning=one["measure"].map(MEASURES)).drop(columns="p") for one in (table, DataFrame(layers))
        )
        pairs = [
            row
            for pair, data in paired(measured).items()
            for name, values in data.items()
            if values.notnull().any()
            for row in mean_rows(pair, str(name), values, self.seed, groups_of(data), claim=True)
        ]
        tables = {"texts": table, "layers": by_layer, "claims": judged(DataFrame(claims))}
        return {**tables, "pairs": judged(DataFrame(pairs), "more", "less")} if pairs else tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: loss added by hiding keys of each kind."""
        table = self.tables(measured)["texts"].query("measure == 'cost'")
        return {"costs": dot_panels(table, "choice", CHOICES, "kind", (4, 3), "loss added, nats per token", line=0.0)}


def paired(measured: Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """`PAIRS` [prompt] of every masked model minus every causal one, as "MASKED − CAUSAL"."""
    return {
        f"{one} − {other}": xr.Dataset({name: pair.of(masked) - pair.of(causal) for name, pair in PAIRS.items()})
        for one, masked in measured.items()
        for other, causal in measured.items()
        if causal["causal"].all() and not masked["causal"].any()
    }


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


# --- single passes over a text, with keys hidden or out of date -------------------------------------------------------


class TextCanvas(NamedTuple):
    """A text as a model reads it.

    Attributes:
        ids: the text.
        masked: where the canvas has a mask; nowhere in an autoregressive model.
    """

    ids: Int[Tensor, " pos"]
    masked: Bool[Tensor, " pos"]

    def tokens(self, model: "Model") -> Int[Tensor, " pos"]:
        """What the model reads."""
        return self.ids if model.causal else self.ids.masked_fill(self.masked, int(model.mask_token_id or 0))


class Read(NamedTuple):
    """One pass over a canvas, with nothing hidden.

    Attributes:
        loss: nats per predicted token.
        pattern, score: attention of every query, and its logarithm before it is normalized; −∞ where it sees nothing.
        query, key, value: of every position, before rotation.
    """

    loss: float
    pattern: Float[Tensor, "layer head query pos"]
    score: Float[Tensor, "layer head query pos"]
    query: Float[Tensor, "layer pos head d_head"]
    key: Float[Tensor, "layer pos kv_head d_head"]
    value: Float[Tensor, "layer pos kv_head d_head"]

    @property
    def sums(self) -> Sums:
        """Column sums."""
        return self.pattern.sum(dim=-2)

    @property
    def key_norms(self) -> Sums:
        """Norm of the key that each head reads."""
        return self._of_heads(self.key.norm(dim=-1))

    def _of_heads(self, values: Float[Tensor, "layer pos kv_head"]) -> Sums:
        return values.mT.repeat_interleave(self.query.shape[2] // values.shape[2], dim=1)

    @property
    def from_others(self) -> Sums:
        """Column sums without the query of the key's own position: what hiding the key takes away."""
        return self.sums - self.pattern.diagonal(dim1=-2, dim2=-1)


@torch.no_grad()
def loss(model: "Model", canvas: TextCanvas, hooks: Hooks) -> float:
    """Nats per predicted token of a pass with these hooks."""
    with model.tree.hooks(fwd_hooks=hooks):
        logits = model.tree(canvas.tokens(model)[None].to(model.cfg.device))[0].double().cpu()
    at = slice(1, None) if model.causal else canvas.masked
    late = model.causal or model.family_record.shift  # logits at a position predict the next
    rows = (logits.roll(1, dims=0) if late else logits)[at]
    return float(torch.nn.functional.cross_entropy(rows, canvas.ids[at]))


def read(model: "Model", canvas: TextCanvas) -> Read:
    """A pass that changes nothing."""
    kept: dict[str, list[Tensor]] = {"pattern": [], "attn_scores": [], "q": [], "k": [], "v": []}

    def keep(value: Tensor, hook: "Point") -> None:
        kept[str(hook.name).rpartition("hook_")[2]].append(value[0].float().cpu())

    names = [f"blocks.{layer}.attn.hook_{point}" for layer in range(model.cfg.n_layers) for point in kept]
    found = loss(model, canvas, [(name, keep) for name in names])
    return Read(found, *(torch.stack(kept[point]) for point in kept))


def uniform(length: int, causal: bool) -> Float[Tensor, " key"]:
    """The column sums of uniform attention: 1 in a bidirectional model, and less for later keys in a causal one."""
    sees = torch.ones(length, length).tril() if causal else torch.ones(length, length)
    return (sees / sees.sum(dim=-1, keepdim=True)).sum(dim=0)


def key_choices(treated: Keys, sinks: Keys, read: Read, order: Sums, allowed: Bool[Tensor, " key"]) -> dict[str, Keys]:
    """The keys of `CHOICES` for some of the sinks.

    Args:
        treated: the sinks in question.
        sinks: keys that no control may contain.
        read: the pass whose attention the controls match.
        order: the order in which they are drawn.
        allowed: keys that can be chosen.
    """
    rest = rest_of(read.sums, treated, allowed.expand_as(treated)) & ~sinks
    mass = read.from_others.flatten(1)
    taken = of_mass(
        mass.double().numpy(), (~sinks & allowed).flatten(1).numpy(),
        (mass * treated.flatten(1)).sum(dim=1, keepdim=True).double().numpy(), order.flatten(1).argsort(dim=-1).numpy(),
    )  # fmt: skip
    return {
        "sink": treated,
        "random": largest(order, rest, treated.sum(dim=-1, keepdim=True)),
        "same_mass": torch.from_numpy(taken).reshape(treated.shape),
    }


def hiding(hidden: Keys) -> Hooks:
    """Hooks that hide keys from every query but that of their own position."""
    return hidden_keys(hidden[:, :, None] & ~torch.eye(hidden.shape[-1], dtype=torch.bool))


def outdating(stale: Keys, earlier: Read) -> Hooks:
    """Hooks that replace keys and values by those of an earlier canvas; a key that several query heads share is stale
    for all of them.
    """
    layers, _, heads, _ = earlier.key.shape
    of_kv_head = stale.reshape(layers, heads, -1, stale.shape[-1]).any(dim=2)  # [layer, kv head, key]

    def hook_of(keys: Bool[Tensor, "kv_head key"], old: Tensor) -> Callable[..., Tensor]:
        return lambda value, hook: torch.where(keys.T[None, :, :, None].to(value.device), old.to(value), value)

    return [
        (f"blocks.{layer}.attn.hook_{point}", hook_of(keys, old[layer]))
        for layer, keys in enumerate(of_kv_head)
        for point, old in (("k", earlier.key), ("v", earlier.value))
    ]


def earlier_canvas(canvas: TextCanvas, age: int, noise: np.random.Generator) -> TextCanvas | None:
    """The canvas with `age` more masks, none of them at the first position; None if too few tokens are left to mask."""
    visible = np.flatnonzero(~canvas.masked.numpy())[1:]
    if len(visible) <= age:
        return None
    masked = canvas.masked.clone()
    masked[torch.from_numpy(noise.choice(visible, age, replace=False))] = True
    return canvas._replace(masked=masked)


def stale_costs(
    model: "Model", canvas: TextCanvas, now: Read, earlier: TextCanvas, epsilon: float, order: Sums
) -> Mapping[str, tuple[float, float]]:
    """Loss added when the keys of `STALE` are stale, and their share of the attention; NaN without sinks.

    The sinks are those of the earlier canvas, as a cache would find them, among the tokens visible there. The controls
    are sinks of neither canvas, and hold as much attention of the present one.
    """
    before = read(model, earlier)
    least = uniform(len(canvas.ids), causal=False) + epsilon
    candidates = ~earlier.masked
    sinks = (before.sums > least) & candidates
    chosen = key_choices(sinks, sinks | (now.sums > least), now, order, candidates)
    chosen["all"] = candidates.expand_as(sinks)
    mass, found = now.from_others, dict[str, tuple[float, float]]()
    for name, keys in chosen.items():
        added = loss(model, canvas, outdating(keys, before)) - now.loss if sinks.any() else float("nan")
        found[name] = added, float((mass * keys).sum() / mass.sum())
    return found


def written(model: "Model", read: Read) -> Sums:
    """Norm of every value after the output matrix of every head that reads it, in medians of the head."""
    norms = []
    for layer, value in enumerate(read.value):
        weight = model.blocks[layer].attn.W_O.detach().float().cpu()
        of_head = value.transpose(0, 1).repeat_interleave(len(weight) // value.shape[1], dim=0)
        norms.append(torch.einsum("hpd,hdm->hpm", of_head, weight).norm(dim=-1))
    sizes = torch.stack(norms)
    return sizes / sizes.median(dim=-1, keepdim=True).values


def at_and_off(values: Sums, sinks: Keys) -> tuple[Float[Tensor, " both"], Float[Tensor, " both"]]:
    """The mean at sinks and at other keys, of each of the heads that have both."""
    some = sinks.any(dim=-1) & (~sinks).any(dim=-1)
    at, off = ((values * keys).sum(dim=-1) / keys.sum(dim=-1).clamp_min(1) for keys in (sinks, ~sinks))
    return at[some], off[some]


def write_ratio(written: Sums, sinks: Keys) -> float:
    """log2 of the mean of `written` at sinks over that at other keys, mean over the heads that have both."""
    at, off = at_and_off(written, sinks)
    return float((at / off).log2().mean())


def alignment(read: Read, sinks: Keys) -> float:
    """Mean cosine of the queries that see a sink's key with it, minus that with other keys, mean over the heads.

    A score is the product of both norms, the cosine and a factor that all keys share.
    """
    norms = read.query.norm(dim=-1).mT[..., None] * read.key_norms[:, :, None]
    cosine = read.score * read.query.shape[-1] ** 0.5 / norms
    seen = torch.isfinite(read.score)
    at, off = at_and_off(torch.where(seen, cosine, 0).sum(dim=-2) / seen.sum(dim=-2), sinks)
    return float((at - off).mean())


def no_ops(written: Sums, sinks: Keys) -> float:
    """Share of the sinks whose value writes less than `NO_OP` medians; NaN without sinks."""
    return float((written[sinks] < NO_OP).double().mean()) if sinks.any() else float("nan")
