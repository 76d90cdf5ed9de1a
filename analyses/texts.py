"""What does hiding sinks cost the likelihood of a text, and do sinks move when one token of it is edited?

    python -m training.text_scores windows.jsonl
    sinklens analyse texts tiny-text tiny-text-causal --prompts windows.jsonl --group document

No answer is generated: each prompt is a text, read in single passes. A masked model predicts random
masked tokens, as many as a uniformly drawn count or as each of `shares` says, and an autoregressive model every next
token. The loss is in nats per predicted token, so it varies continuously, and texts need neither operands nor
templates.

Sinks (passes.py) of one kind of token are hidden in all layers and heads at once, in another pass over the same canvas.
Controls hide as many weaker keys of each head, drawn at random, or keys that are not sinks until they hold together as
much attention as the hidden sinks of their layer (*same mass*). Where sinks hold more than half of a layer's attention,
no keys do, and the study makes no claim.

Sinks are also left *stale*, as a cache would leave them: with the keys and values of a canvas that has `age` more
masks. An autoregressive model has no stale keys, because later tokens do not change earlier ones.

The strongest key of a head *jumps* if an edit of one token changes it: an *edited* token is replaced by another of its
kind; a *revealed* one takes the place of a mask. In an autoregressive model only queries after an edit can move, so
``edited, later`` sums over these in every model.

If the study runs on masked and causal models, ``pairs`` compares each masked one with each causal one, text by text.

Caveat: ``write_ratio``, ``key_ratio`` and ``alignment`` average keys of all kinds; a difference need not be due to
their being sinks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from annotated_types import Ge, Gt, Le
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.analyses.edits import LEADS, Jumps, by_layer, compared, edited, places_drawn
from sinklens.analyses.estimates.strata import groups_of, mean_rows
from sinklens.analyses.estimates.tables import judged
from sinklens.analyses.passes import (
    Keys,
    Read,
    Sums,
    TextCanvas,
    difference,
    earlier_canvas,
    ids_of,
    log_ratio,
    loss,
    losses,
    no_ops,
    outdating,
    read,
    written,
)
from sinklens.analyses.runs import noise_of
from sinklens.analyses.study import Study, dot_panels
from sinklens.errors import SettingError, nearest, require
from sinklens.experiments.nll.noise import by_count
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.interventions.controls import largest, of_mass, rest_of
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks.kinds import Kind
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

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
EQUAL = 0.9
"""The smallest share of the sinks' attention, on average over texts, that keys with as much attention must hold."""


class Difference(NamedTuple):
    """What a claim compares.

    A difference is NaN if its control keys hold less than `EQUAL`.

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
        found = more - less
        if self.measure == "cost" and self.more and self.less:
            sinks, control = (data["removed"].sel(dict(at)).mean("prompt") for at in (self.more, self.less))
            found = found.where(control >= EQUAL * sinks)
        return found.drop_vars(["kind", "choice", "stale", "edit", "lead"], errors="ignore")


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
"""The masked model minus the causal one: one family of claims."""


@dataclass
class Texts(Study):
    """See the module.

    Attributes:
        pairs: what `paired` compares.
        draws: random masks per text; an autoregressive model reads the text once.
        edits: number of edits of each sort for each text; 0 measures no jumps.
        epsilon: a sink receives more than this above uniform attention, in column sums.
        longest: tokens read of a text; the rest is left out.
        age: tokens decided since stale keys were computed; 0 measures no stale keys.
        shares: shares of a text that are masked, each with measures of its own (axis ``share``), whose masks contain
            those of smaller shares; empty for the counts that a likelihood draws. An autoregressive model has the same
            values at each.
        kinds: of `KINDS`, the sinks that are hidden.
        after: what a text is predicted after, such as "Answer:"; only tokens behind its first occurrence are masked,
            and `shares` are of these. Empty for everything but the first token.
    """

    name: ClassVar[str] = "texts"
    pairs: ClassVar[Mapping[str, Difference]] = PAIRS
    together: ClassVar[bool] = False
    draws: Count = 2
    edits: Annotated[int, Ge(0)] = 4
    epsilon: float = 3.0
    longest: Count = 512
    age: Annotated[int, Ge(0)] = 8
    shares: tuple[Annotated[float, Gt(0), Le(1)], ...] = ()
    kinds: tuple[str, ...] = tuple(KINDS)
    after: str = ""

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

    def of_prompt(self, model: "Model", prompt: SinglePrompt, settings: Settings) -> xr.Dataset:
        """``nats``, ``write_ratio``, ``no_op_share``, ``key_ratio``, ``alignment`` and ``causal``; ``sink_heads``,
        ``first_mass`` and ``first_strongest`` [layer]; ``cost`` and ``removed`` [kind, choice]; ``stale_cost`` and
        ``stale_mass`` [stale]; ``per_place`` [kind]; ``jump_share`` [edit, lead, layer]. Means over the draws, NaN
        where there is nothing.
        """
        ids = ids_of(model, prompt, self.chat_template, self.longest)
        noise, start = noise_of(ids, self.seed), self._start(model, prompt, ids)
        found, jumps = list[xr.Dataset](), list[Jumps | None]([None])
        for canvases in self._masks(model, ids, start):
            texts = [TextCanvas(ids, masked, start) for masked in canvases]
            of_draw = [self._of_canvas(model, canvas, read(model, canvas), noise) for canvas in texts]
            data: xr.Dataset = xr.concat(of_draw, dim="draw").mean("draw", skipna=True)
            jumps = self._jumps(model, ids, canvases[0], noise, jumps[0])
            none = np.full((len(LEADS), model.cfg.n_layers), np.nan)
            of_edits = np.stack([none if one is None else by_layer(one) for one in jumps])
            found.append(data.assign(jump_share=(("edit", "lead", "layer"), of_edits)))
        places: dict[str, Any] = {
            "kind": list(KINDS), "choice": list(CHOICES), "stale": list(STALE), "edit": list(EDITS),
            "lead": list(LEADS),
        }  # fmt: skip
        if not self.shares:
            return found[0].assign(causal=float(model.causal)).assign_coords(places)
        every: xr.Dataset = xr.concat(found * (len(self.shares) // len(found)), dim="share")
        return every.assign(causal=float(model.causal)).assign_coords(places | {"share": list(self.shares)})

    def _start(self, model: "Model", prompt: SinglePrompt, ids: Int[Tensor, " pos"]) -> int:
        """The first position that is predicted.

        Raises:
            SettingError: `after` is not in the text, or not followed by a token that is read.
        """
        if not self.after:
            return 1
        before, found, _ = prompt.partition(self.after) if isinstance(prompt, str) else ("", "", "")
        known = model.encode(before + found, self.chat_template).ids[0].cpu()
        follows = found and len(known) < len(ids) and known.equal(ids[: len(known)])
        require(follows, f"no token that is read follows {self.after!r} in the text {prompt!r:.60}; omit after.")
        return len(known)

    def _masks(self, model: "Model", ids: Int[Tensor, " pos"], start: int) -> list[Bool[Tensor, "draw pos"]]:
        """Masked positions of every share and draw, from `start` on; none in an autoregressive model."""
        if model.causal:
            return [torch.zeros(1, len(ids), dtype=torch.bool)]
        generator = torch.Generator().manual_seed(int(noise_of(ids, self.seed).integers(2**62)))
        length = len(ids) - start
        if not self.shares:
            masks = [by_count(length, self.draws, generator)[0]]
        else:
            ranks = torch.rand(self.draws, length, generator=generator).argsort(dim=1).argsort(dim=1)
            masks = [ranks < max(1, round(share * length)) for share in self.shares]
        return [torch.nn.functional.pad(masked, (start, 0), value=False) for masked in masks]

    def _of_canvas(self, model: "Model", canvas: TextCanvas, plain: Read, noise: np.random.Generator) -> xr.Dataset:
        """The measurements of one canvas, without jumps."""
        tokens, sinks = canvas.tokens(model), plain.sinks(model.causal, self.epsilon)
        kinds = torch.from_numpy(kinds_of_vocabulary(model)[tokens.numpy()].astype(np.int64))
        order, every = torch.from_numpy(noise.random(sinks.shape)), torch.ones(len(tokens), dtype=torch.bool)
        cost, removed = np.full((2, len(KINDS), len(CHOICES)), np.nan)
        per_place, hidden = np.full(len(KINDS), np.nan), [KINDS[kind] for kind in self.kinds]
        for row, wanted in enumerate(KINDS.values()):
            of_kind = torch.isin(kinds, torch.tensor([int(kind) for kind in wanted]))
            if of_kind.any():
                per_place[row] = float(sinks[..., of_kind].double().mean())
            treated = sinks & of_kind
            if not treated.any() or wanted not in hidden:
                continue
            chosen = torch.stack(list(key_choices(treated, sinks, plain, order, every).values()))
            cost[row] = np.array(losses(model, canvas, plain, chosen)) - plain.loss
            removed[row] = [plain.share(keys) for keys in chosen]
        earlier = None if model.causal or not self.age else earlier_canvas(canvas, self.age, noise)
        stale = np.full((2, len(STALE)), np.nan)
        if earlier is not None:
            stale = np.array(list(stale_costs(model, canvas, plain, earlier, self.epsilon, order).values())).T
        axes, writes, first = ("kind", "choice"), written(model, plain), plain.sums.argmax(dim=-1) == 0
        received = (plain.sums[..., 0] / plain.sums.sum(dim=-1)).mean(dim=-1)
        return xr.Dataset(
            {"nats": plain.loss, "no_op_share": no_ops(writes, sinks),
             "write_ratio": float(log_ratio(writes, sinks).nanmean()),
             "key_ratio": float(log_ratio(plain.key_norms, sinks).nanmean()),
             "alignment": float(difference(plain.cosines, sinks).nanmean()),
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
        jumps = [later or edited(model, ids, places_drawn(free, self.edits, noise), kinds, noise)]
        if not model.causal:
            canvas = TextCanvas(ids, masked).tokens(model)
            visible, hidden = free & ~masked.numpy(), masked.numpy()
            jumps.append(edited(model, canvas, places_drawn(visible, self.edits, noise), kinds, noise, later=False))
            jumps.append(_revealed(model, canvas, ids, places_drawn(hidden, self.edits, noise)))
        return jumps + [None] * (len(EDITS) - len(jumps))

    def contrasts(self, data: xr.Dataset) -> xr.Dataset:
        """The differences that `CLAIMS` names, above 0 where they hold."""
        return xr.Dataset({claim: difference.of(data) for claim, difference in CLAIMS.items()})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``texts``: `MEASURES`; ``layers``: `OF_LAYERS` by layer; ``claims``: `CLAIMS`, one family on each model;
        ``pairs``: those of the study, one family on each pair of a masked and a causal model. A claim whose values are
        the same at every share is one row, without a share. Intervals resample groups of texts if there are several.
        """
        from pandas import DataFrame

        rows, layers, claims = [], [], []
        for model, data in measured.items():
            group = groups_of(data)
            for measure in MEASURES:
                values = data[measure].mean("layer") if "layer" in data[measure].dims else data[measure]
                rows += mean_rows(model, measure, values, self.seed, group)
            for measure in (*OF_LAYERS, "jump_share"):
                layers += mean_rows(model, measure, data[measure], self.seed, group)
            for claim, values in self.contrasts(data).items():
                claims += mean_rows(model, str(claim), _once(values), self.seed, group, claim=True)
        pairs = [
            row
            for pair, data in paired(measured, self.pairs).items()
            for name, values in data.items()
            if values.notnull().any()
            for row in mean_rows(pair, str(name), _once(values), self.seed, groups_of(data), claim=True)
        ]
        tables = {name: described(found, MEASURES) for name, found in (("texts", rows), ("layers", layers))}
        tables["claims"] = judged(DataFrame(claims))
        return {**tables, "pairs": judged(DataFrame(pairs), "more", "less")} if pairs else tables

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``costs``: loss added by hiding keys of each kind."""
        costs = self.tables(measured)["texts"].query("measure == 'cost'")
        return {"costs": dot_panels(costs, "choice", CHOICES, "kind", (4, 3), "loss added, nats per token", line=0.0)}


def described(rows: Sequence[Mapping[str, Any]], meanings: Mapping[str, str]) -> "DataFrame":
    """The rows that have an estimate, with what each measures."""
    from pandas import DataFrame

    table = DataFrame(rows).dropna(subset="estimate")
    return table.assign(meaning=table["measure"].map(meanings)).drop(columns="p")


def paired(measured: Mapping[str, xr.Dataset], pairs: Mapping[str, Difference]) -> dict[str, xr.Dataset]:
    """`pairs` [prompt] of every masked model minus every causal one, as "MASKED − CAUSAL"."""
    return {
        f"{one} − {other}": xr.Dataset({name: pair.of(masked) - pair.of(causal) for name, pair in pairs.items()})
        for one, masked in measured.items()
        for other, causal in measured.items()
        if causal["causal"].all() and not masked["causal"].any()
    }


def _once(values: xr.DataArray) -> xr.DataArray:
    """Without the axis ``share`` if the values are the same at every share: one claim, which counts once."""
    if values.sizes.get("share", 1) == 1:
        return values
    first = values.isel(share=0, drop=True)
    return first if values.variable.broadcast_equals(first.variable) else values


def _revealed(
    model: "Model", canvas: Int[Tensor, " pos"], text: Int[Tensor, " pos"], places: Sequence[int]
) -> Jumps | None:
    """Jumps after the mask at each place is replaced by the token of the text."""
    if not places:
        return None
    canvases = canvas.repeat(len(places) + 1, 1)
    canvases[range(1, len(canvases)), places] = text[places]
    sums = column_sums(model, canvases)[:, 0]
    return compared(sums[:1], sums[1:])


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
    of_layer = (part.flatten(1) for part in (-order, read.from_others.double(), treated, ~sinks & allowed))
    return {
        "sink": treated,
        "random": largest(order, rest, treated.sum(dim=-1, keepdim=True)),
        "same_mass": of_mass(*of_layer).view_as(treated),
    }


def stale_costs(
    model: "Model", canvas: TextCanvas, now: Read, earlier: TextCanvas, epsilon: float, order: Sums
) -> Mapping[str, tuple[float, float]]:
    """Loss added when the keys of `STALE` are stale, and their share of the attention; NaN without sinks.

    The sinks are those of the earlier canvas, as a cache would find them, among the tokens visible there. The controls
    are sinks of neither canvas, and hold as much attention of the present one.
    """
    before = read(model, earlier)
    candidates = ~earlier.masked
    sinks = before.sinks(causal=False, epsilon=epsilon) & candidates
    chosen = key_choices(sinks, sinks | now.sinks(causal=False, epsilon=epsilon), now, order, candidates)
    chosen["all"] = candidates.expand_as(sinks)
    return {
        name: (
            loss(model, canvas, outdating(keys, before)) - now.loss if sinks.any() else float("nan"), now.share(keys)
        )
        for name, keys in chosen.items()
    }  # fmt: skip
