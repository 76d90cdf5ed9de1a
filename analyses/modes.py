"""With the same weights and text, do sinks move more under denoising than in causal passes, and matter more?

    sinklens analyse modes tiny-two-modes --limit 20

Models that only diffuse and models that only decode from left to right differ in their training too. A model that does
both (docs/concepts/modes.md) has one set of weights, so what differs between its passes is the mode. The text of one
run, the prompt and the finished answer, is cut into the complete blocks that follow the prompt and read by both kinds
of pass. In both modes, attention within the text before the block is causal, so only the block's queries differ:

- ``motion``: how often the strongest key of a head changes if one token of a block changes, the same edits in both
  modes (`canvases`, `MATCHING`). ``decoding`` is the motion of a run in each mode, in which nothing is matched.
- ``costs`` and ``sets``: likelihood lost if a head's sinks are hidden from the block, beside random keys and keys of
  the same mass (`costs`); also with the keys that the other mode chose.
- ``answers``: word problems answered right in a run of each mode, with sinks or controls masked at every step.
- ``heads`` and ``similarity``: strength of every head in both modes, and whether they are the same heads, beside heads
  shuffled within layers (`heads`).
- ``claims``: differences, paired by prompt.

The text is that of a run with diffusion; ``settings={"mode": "autoregressive"}`` takes the other.

Caveat: ``answers`` compares what masking costs two ways of decoding, whose steps differ in number and kind. Only
``costs`` compares the modes at equal text and information. An answer that ends within its first block has no complete
block, and nothing is measured on it. With one head per layer, the null of ``similarity`` is the measurement.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.analyses.answers import each_prompt, free_effects
from sinklens.analyses.estimates.ranks import rank_correlation
from sinklens.analyses.estimates.tables import interval_table, judged
from sinklens.analyses.mass import hidden_keys
from sinklens.analyses.nulls import rates
from sinklens.analyses.runs import noise_of
from sinklens.analyses.study import Study, dot_panels
from sinklens.families.samplers import settings_for
from sinklens.interventions import MaskSinks
from sinklens.interventions.controls import largest, rest_of, same_mass
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import EpsilonOverMean, SinkTrack
from sinklens.utils.arguments import NonNegative

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

    from sinklens.model import Model
    from sinklens.runs.result import Generation

MODES = {"causal": "causal pass", "denoise": "denoising pass"}
RUNS = {"causal": "autoregressive", "denoise": "diffusion"}
"""The mode of a run whose steps are passes of each kind of `MODES`."""
EDITS = {"fill": "a masked position is decided", "swap": "a token of the finished block is replaced"}
MATCHING = {
    "all": "all queries and keys",
    "seeing": "queries that see the edit",
    "matched": "the same queries and keys",
}
"""What a comparison of two canvases sums over: all queries of the block, and all keys; the queries from the edited
position on, which see the edit in both modes, and all keys; the same queries, and the keys up to the edited position,
which they all see in both modes."""
CHOICES = {"sink": "sinks", "random": "as many random keys", "same_mass": "random keys with as much attention"}
CONTROLS = ("random", "same_mass")
SOURCES = {"measured": "same heads", "shuffled": "heads shuffled within layers", "difference": "difference"}
SHUFFLES = 200
MOTION = {
    "jump_share": "share of edits at which the strongest key changes",
    "sink_jump_share": "the same over heads and edits where it is a sink before and after",
    "moved": "share of the attention that moves to other keys",
}
DECODING = {
    "decoding_jump_share": "share of steps of a run at which the strongest key changes; nothing is matched",
    "decoding_sink_jump_share": "the same over steps where it is a sink before and after",
}
COSTS = {
    "nll": "log-likelihood of the text lost, nats per token",
    "kl": "KL divergence from the unchanged prediction, nats per token",
}
SETS = {"number": "keys per head", "mass": "share of a predicting query's attention to the text before the block"}
LOGPROB = {"logprob": "log-likelihood of the text, nats per token"}
ANSWERS = {"right": "share of word problems answered right", "lost": "share of word problems lost by masking"}
ANSWER_RANGES = {"lost": (-1, 1)}
SIMILARITY = {
    "correlation": "rank correlation over heads of the strongest key's share of attention",
    "overlap": "overlap of the sets of sink heads (Jaccard)",
    "same_key": "share of heads with the same strongest key",
}
HEADS = ("strength", "has_sink")
TABLES = {
    "motion": MOTION, "decoding": DECODING, "costs": COSTS, "sets": SETS, "likelihood": LOGPROB, "answers": ANSWERS,
    "similarity": SIMILARITY,
}  # fmt: skip
AXES = {
    **dict.fromkeys(MOTION, ("mode", "edit", "matching")), **dict.fromkeys(COSTS, ("mode", "keys", "choice")),
    **dict.fromkeys(SETS, ("keys", "choice")), **dict.fromkeys((*LOGPROB, *DECODING), ("mode",)),
    **dict.fromkeys(ANSWERS, ("mode", "masked")), **dict.fromkeys(SIMILARITY, ("source",)),
    **dict.fromkeys(HEADS, ("mode", "layer", "head")),
}  # fmt: skip

Keys = Bool[Tensor, "layer head key"]


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
        labels: dict[str, Sequence[Any]] = {
            "mode": list(MODES), "edit": list(EDITS), "matching": list(MATCHING), "keys": list(MODES),
            "choice": list(CHOICES), "source": list(SOURCES), "masked": ["nothing", *CHOICES],
            "layer": range(model.cfg.n_layers), "head": range(model.cfg.n_heads),
        }  # fmt: skip
        nothing = {name: (axes, np.full([len(labels[axis]) for axis in axes], np.nan)) for name, axes in AXES.items()}
        data = xr.Dataset(nothing, coords={axis: list(entries) for axis, entries in labels.items()})
        text = BlockText.of(self.generate(model, [prompt], settings).run)
        for measured in (motion, costs, heads) if text.blocks else ():
            data = data.assign(measured(model, text, self.epsilon, self.seed))
        return data.assign(self._decoded(model, prompt, settings))

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
            right = free_effects(self, model, prompt, given, self.masking(run.run.sinks))["right"].to_numpy()
            rows["right"].append(right)
            rows["lost"].append(right[0] - right)
        return {name: (AXES[name], value) for name, value in rows.items()}

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
        tables = {
            name: interval_table(measured, list(meanings), self.seed, ANSWER_RANGES)
            for name, meanings in TABLES.items()
        }
        named = {name: table.assign(meaning=table["measure"].map(TABLES[name])) for name, table in tables.items()}
        claims = judged(interval_table(measured, ["difference"], self.seed, null=0.0))
        return {**named, "heads": interval_table(measured, HEADS, self.seed), "claims": claims}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``motion``: a panel per measure; ``costs``: a panel per mode; ``heads``: strength in both modes."""
        order = [*EDITS, *MATCHING]
        moved = interval_table(measured, list(MOTION), self.seed)
        moved["passes"] = moved["edit"] + ", " + moved["matching"].map(MATCHING) + ": " + moved["mode"].map(MODES)
        moved = moved.sort_values(["edit", "matching"], kind="stable", key=lambda column: column.map(order.index))
        lost = interval_table(measured, ["nll"], self.seed)
        lost["hidden"] = lost["choice"].map(CHOICES) + ", of the " + lost["keys"].map(MODES)
        titles = {mode: f"predictions of the {meaning}" for mode, meaning in MODES.items()}
        label = f"{COSTS['nll']}; 95 % intervals over prompts"
        return {
            "motion": dot_panels(moved, "measure", MOTION, "passes", (7, 5)),
            "costs": dot_panels(lost, "mode", titles, "hidden", (6.5, 4), label, line=0.0),
            "heads": _head_panels(measured),
        }  # fmt: skip


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
        lost = more["lost"].sel(masked="sink") - more["lost"].sel(masked=control)
        yield f"masking sinks loses more answers than {name}, more so under denoising", lost
    for measure, meaning in (
        ("correlation", "sinks are strong in the same heads"),
        ("same_key", "heads keep their key"),
    ):
        yield f"{meaning} in both modes", data[measure].sel(source="difference")


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


# --- one text, read by passes of both modes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockText:
    """The finished text of a run of one prompt.

    Attributes:
        ids: prompt and answer, without padding.
        blocks: the complete blocks of the answer.
        decided: the step that decided each position, -1 in the prompt; where several were decided together, the same.
    """

    ids: Int[Tensor, " pos"]
    blocks: tuple[range, ...]
    decided: Int[np.ndarray, " pos"]

    @classmethod
    def of(cls, run: "Generation") -> "BlockText":
        """The text of a run of one prompt, in the blocks of the run, or of the checkpoint if it has none."""
        assert run.sinks is not None, "runs of a study record sinks"
        real, start = run.real[0], int(run.real[0, : run.prompt_length].sum())
        undecided = run.undecided[0, -1][real]
        length = int(undecided.long().argmax()) if bool(undecided.any()) else len(undecided)
        size = (settings_for(run.model, {}) if run.causal else run.settings).positions_per_block
        stop = start + (length - start) // size * size
        ids, decided = run.tokens[0][real][:stop], run.sinks["unmask_step"].to_numpy()[0][real.numpy()[: len(real)]]
        return cls(ids, tuple(range(at, at + size) for at in range(start, stop, size)), decided[:stop])


def in_pass(mode: str, block: range) -> dict[str, Any]:
    """The arguments of a pass of `mode` over the text up to the end of a block."""
    return {"mode": mode, "block_start": block.start if mode == "denoise" else None}


def patterns(
    model: "Model", ids: Int[Tensor, "row pos"], mode: str, block: range, queries: range | None = None
) -> Float[Tensor, "row layer head query pos"]:
    """The attention of some queries, by default those of the block, in one pass."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    _, cache = model.tree.run_with_cache(ids.to(model.cfg.device), names_filter=names, **in_pass(mode, block))
    chosen = queries or block
    return torch.stack([cache[name][:, :, chosen.start : chosen.stop].float().cpu() for name in names], dim=1)


def sinks(sums: Float[Tensor, "... key"], epsilon: float) -> Bool[Tensor, "... key"]:
    """True where a sum of attention, scaled to a mean of 1 over the keys so that the threshold has one meaning for all
    passes, is more than epsilon above the mean of the other keys.
    """
    score = sums / sums.mean(dim=-1, keepdim=True).clamp_min(1e-12)
    others = (score.sum(dim=-1, keepdim=True) - score) / max(1, score.shape[-1] - 1)
    return score - others > epsilon


def _means(rows: list[dict[str, Any]], *axes: str) -> xr.Dataset:
    """Means of the measures of `rows` by their labels."""
    from pandas import DataFrame

    return xr.Dataset.from_dataframe(DataFrame(rows).groupby(list(axes)).mean())


# --- motion: how far the strongest keys move if one token of a block changes -----------------------------------------


class Pair(NamedTuple):
    """Two canvases that differ in one token.

    Attributes:
        edit: of `EDITS`.
        before, after: their rows.
        position: the position of the token.
    """

    edit: str
    before: int
    after: int
    position: int


def canvases(
    text: BlockText, block: range, mask_id: int, rng: np.random.Generator
) -> tuple[Int[Tensor, "row pos"], list[Pair]]:
    """The canvases of a block and the pairs that differ in one token; their number is the same in both modes.

    ``fill`` decides one masked position of the block, in the order of the run, as a denoise step does; ``swap``
    replaces one token of the finished block by another token of the text, so that neither mode reads a mask. Without
    masks in the text, a causal pass never sees one in training: ``fill`` asks what the same canvases do to both modes,
    ``swap`` what they do on text that both know.
    """
    finished = text.ids[: block.stop]
    order = block.start + np.argsort(text.decided[block.start : block.stop], kind="stable")
    canvas = finished.clone()
    canvas[block.start :] = mask_id
    rows, pairs = [canvas], []
    for position in order.tolist():
        canvas = canvas.clone()
        canvas[position] = finished[position]
        pairs.append(Pair("fill", len(rows) - 1, len(rows), position))
        rows.append(canvas)
    for position in block:
        others = finished[finished != finished[position]]
        if len(others):
            swapped = finished.clone()
            swapped[position] = others[int(rng.integers(len(others)))]
            pairs.append(Pair("swap", len(block), len(rows), position))
            rows.append(swapped)
    return torch.stack(rows), pairs


def moves(
    pattern: Float[Tensor, "row layer head query key"], pair: Pair, first: int, matching: str, epsilon: float
) -> tuple[Bool[Tensor, "layer head"], Bool[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """What a pair does to the attention of a pass of one mode: whether the strongest key changes, whether it is a sink
    before and after, and ½ Σ_j |a_j − b_j| of the two distributions of attention over keys.

    Args:
        pattern: attention of the block's queries over every canvas.
        first: position of the first query.
        epsilon: as in `sinks`.
    """
    queries = slice(0 if matching == "all" else pair.position - first, None)
    keys = slice(pair.position + 1 if matching == "matched" else None)
    sums = torch.stack([pattern[row, :, :, queries, keys].sum(dim=-2) for row in (pair.before, pair.after)])
    strongest = sums.argmax(dim=-1, keepdim=True)
    is_sink = sinks(sums, epsilon).gather(-1, strongest)[..., 0].all(dim=0)
    share = sums / sums.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return (strongest[0] != strongest[1])[..., 0], is_sink, (share[0] - share[1]).abs().sum(dim=-1) / 2


def motion(model: "Model", text: BlockText, epsilon: float, seed: int) -> xr.Dataset:
    """`MOTION` [mode, edit, matching] of one text; means over the layers, heads, edits and blocks."""
    rng, rows = noise_of(text.ids, seed), []
    assert model.mask_token_id is not None, "models that change their attention have a mask token"
    for block in text.blocks:
        ids, pairs = canvases(text, block, model.mask_token_id, rng)
        for mode in MODES:
            pattern = patterns(model, ids, mode, block)
            for pair, matching in product(pairs, MATCHING):
                changes, are_sinks, moved = moves(pattern, pair, block.start, matching, epsilon)
                rows.append({
                    "mode": mode, "edit": pair.edit, "matching": matching, "moved": float(moved.mean()),
                    "jump_share": float(changes.float().mean()), "sinks": float(are_sinks.sum()),
                    "sink_jumps": float((changes & are_sinks).sum()),
                })  # fmt: skip
    found = _means(rows, "mode", "edit", "matching")
    return found.assign(sink_jump_share=found["sink_jumps"] / found["sinks"])[list(MOTION)]


# --- costs: what hiding sinks costs the predictions, with the same text and information -------------------------------


def predicting(model: "Model", text: BlockText, mode: str, block: range) -> Float[Tensor, "layer head key"]:
    """Attention of the predicting queries of a block to each key before it, summed.

    Token i of a block is predicted from the tokens before it: causally by the logits at i − 1, and by a denoising pass
    in which position i and the rest of the block are masked. Both modes have as many predicting queries.
    """
    ids = text.ids[: block.stop][None]
    if mode == "causal":
        before = range(block.start - 1, block.stop - 1)
        return patterns(model, ids, mode, block, before)[0, ..., : block.start].sum(dim=-2)
    pattern = patterns(model, masked_from_each(model, text, block), mode, block)
    return torch.stack([pattern[at, :, :, at, : block.start] for at in range(len(block))]).sum(dim=0)


def masked_from_each(model: "Model", text: BlockText, block: range) -> Tensor:
    """For each position of a block, the text up to its end, masked from this position on."""
    rows = text.ids[: block.stop].repeat(len(block), 1)
    first = torch.tensor(block)[:, None]
    return rows.masked_fill(torch.arange(block.stop) >= first, model.mask_token_id)  # type: ignore[arg-type]


def chosen_keys(score: Float[Tensor, "layer head key"], order: Tensor, epsilon: float) -> dict[str, Keys]:
    """The keys of `CHOICES`; controls are weaker keys than every sink, taken in descending `order`."""
    found = sinks(score, epsilon)
    rest = rest_of(score, found, torch.ones_like(found))
    return {
        "sink": found,
        "random": largest(order, rest, found.sum(dim=-1, keepdim=True)),
        "same_mass": same_mass(order, score, found, rest),
    }


def log_probabilities(
    model: "Model", text: BlockText, mode: str, block: range, hidden: Keys | None = None
) -> Float[Tensor, "token vocab"]:
    """Log-probabilities of the tokens of a block, each from the tokens before it, with keys hidden from its queries."""
    causal = mode == "causal"
    first = block.start - 1 if causal else block.start
    ids = text.ids[: block.stop][None] if causal else masked_from_each(model, text, block)
    hooks = []
    if hidden is not None:
        places = torch.zeros(*hidden.shape[:2], block.stop, block.stop, dtype=torch.bool)
        places[:, :, first:, : hidden.shape[-1]] = hidden[:, :, None]
        hooks = hidden_keys(places)
    with torch.no_grad():
        logits = model.tree.run_with_hooks(ids.to(model.cfg.device), fwd_hooks=hooks, **in_pass(mode, block))
    rows = logits[0, first : block.stop - 1] if causal else logits[:, block.start :].diagonal(dim1=0, dim2=1).T
    return rows.double().cpu().log_softmax(dim=-1)


def costs(model: "Model", text: BlockText, epsilon: float, seed: int) -> xr.Dataset:
    """`COSTS` [mode, keys, choice], `SETS` [keys, choice] and ``logprob`` [mode] of one text; means over its blocks.

    Keys are chosen among the text before the block, whose keys and values are the same in both modes. ``keys`` is the
    mode whose sinks were chosen, ``mode`` that of the passes: the modes may differ in what is chosen or in what it
    costs. A head whose sinks hold nearly all of its attention has no other keys with as much; ``mass`` shows it.
    """
    rng, shape = noise_of(text.ids, seed), (model.cfg.n_layers, model.cfg.n_heads)
    logprob, sets, lost = [], [], []
    for block in text.blocks:
        tokens = text.ids[block.start : block.stop, None]
        order = torch.from_numpy(rng.random((*shape, block.start))).float()
        plain = {mode: log_probabilities(model, text, mode, block) for mode in MODES}
        logprob += [{"mode": mode, "logprob": float(p.gather(1, tokens).mean())} for mode, p in plain.items()]
        for source in MODES:
            score = predicting(model, text, source, block)
            for choice, keys in chosen_keys(score, order, epsilon).items():
                share = (score * keys).sum(dim=-1) / score.sum(dim=-1).clamp_min(1e-12)
                number = float(keys.sum(dim=-1).float().mean())
                sets.append({"keys": source, "choice": choice, "number": number, "mass": float(share.mean())})
                for mode, p in plain.items():
                    change = p - log_probabilities(model, text, mode, block, keys)
                    nll, kl = change.gather(1, tokens).mean(), (p.exp() * change).sum(dim=-1).mean()
                    lost.append({"mode": mode, "keys": source, "choice": choice, "nll": float(nll), "kl": float(kl)})
    return xr.merge([_means(logprob, "mode"), _means(sets, "keys", "choice"), _means(lost, "mode", "keys", "choice")])


# --- heads: are the sink heads of causal and of denoising passes over one text the same? ------------------------------


def heads(model: "Model", text: BlockText, epsilon: float, seed: int) -> dict[str, Any]:
    """``strength`` and ``has_sink`` [mode, layer, head], and `SIMILARITY` [source], of one text.

    A head's *strength* is the share of the attention of a block's queries that its strongest key before the block
    receives, and it is a sink head if it has a sink in at least half of the blocks. Both modes read the finished block,
    so they see the same tokens; keys before it are the same in both.
    """
    strength, found, key = [], [], []
    for block in text.blocks:
        ids = text.ids[: block.stop][None]
        sums = torch.stack([patterns(model, ids, mode, block)[0, ..., : block.start].sum(dim=-2) for mode in MODES])
        strength.append(sums.amax(dim=-1).numpy() / len(block))
        found.append(sinks(sums, epsilon).any(dim=-1).numpy())
        key.append(sums.argmax(dim=-1).numpy())
    strong, has_sink = (np.mean(of_block, axis=0) for of_block in (strength, found))
    values = {"strength": strong, "has_sink": has_sink, **similarity(strong, has_sink >= 0.5, np.stack(key), seed)}
    return {name: (AXES[name], value) for name, value in values.items()}


def similarity(
    strength: Float[np.ndarray, "mode layer head"],
    is_sink: Bool[np.ndarray, "mode layer head"],
    key: Int[np.ndarray, "block mode layer head"],
    seed: int = 0,
) -> dict[str, Float[np.ndarray, " source"]]:
    """`SIMILARITY` of two modes: measured, the mean over shuffles, and the difference.

    Heads of one layer resemble each other, and layers differ, so heads would seem alike that have nothing in common but
    their layer. The null therefore gives the heads of the second mode to others of the same layer, at random
    (`SHUFFLES` times).

    Args:
        strength: of every head in both modes.
        is_sink: the sink heads of both modes.
        key: the strongest key in every block.
    """
    rng, (layers, number) = np.random.default_rng(seed), strength.shape[1:]
    same = np.broadcast_to(np.arange(number), (1, layers, number))
    shuffled = rng.permuted(np.broadcast_to(np.arange(number), (SHUFFLES, layers, number)), axis=-1)
    values = []
    for order in (same, shuffled):
        at = (np.arange(layers)[:, None], order)
        found = {
            "correlation": rank_correlation(strength[0].ravel(), strength[1][at].reshape(len(order), -1)),
            "overlap": _jaccard(is_sink[0].ravel(), is_sink[1][at].reshape(len(order), -1)),
            "same_key": np.stack([(a == b[at]).mean(axis=(1, 2)) for a, b in key]).mean(axis=0),
        }
        values.append({name: float(value.mean()) for name, value in found.items()})
    measured, null = values
    return {name: np.array([measured[name], null[name], measured[name] - null[name]]) for name in SIMILARITY}


def _jaccard(one: Bool[np.ndarray, " head"], other: Bool[np.ndarray, "row head"]) -> Float[np.ndarray, " row"]:
    """|A ∩ B| / |A ∪ B|; NaN where both are empty."""
    both, either = (one & other).sum(axis=-1), (one | other).sum(axis=-1)
    return np.divide(both, either, out=np.full(len(other), np.nan), where=either > 0)
