"""The same weights in two modes: attention and predictions of causal and of denoising passes over one text.

A model whose attention changes from pass to pass can decode a text from left to right and by diffusion in blocks.
`modes_compared` feeds a finished text to both kinds of pass and compares them position by position. *Attention* is
compared on the same tokens: the queries of a finished block see the same text before it, and in a denoising pass also
the rest of their block. *Predictions* are compared on the same information: token i is predicted from the tokens before
it, causally by the logits at i − 1, and by a denoising pass in which position i and the rest of its block are masked.
`commits_compared` compares the passes of a run, whose blocks are denoised step by step before a causal pass commits
them. `mode_patching` puts a head's output from a pass of one mode into a pass of the other.

Pitfall: a denoising pass over a finished block has no mask to fill, so its logits repeat the block. They are not
compared; the masked passes are.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.families.samplers import settings_for
from sinklens.hooks.forward_pass import CAUSAL, IN_BLOCK
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation, require_run
from sinklens.utils.integers import as_integer

if TYPE_CHECKING:
    from sinklens.model import Model


class _Text:
    """The finished text of a run, cut into the blocks that follow its prompt.

    Attributes:
        ids, real: as in a run, up to the end of the answer; undecided positions hold the mask token.
        known: positions of the answer before each row's first undecided one.
        blocks: the columns of each block.
    """

    def __init__(self, run: Generation, block_length: int | None) -> None:
        self.model, start = run.model, run.prompt_length
        mask, end, device = run.model.mask_token_id, start + run.settings.gen_length, run.model.cfg.device
        assert mask is not None, "models that change their attention have a mask token"
        undecided = run.undecided[:, -1, :end]
        self.ids = run.tokens[:, :end].masked_fill(undecided, mask).to(device)
        self.real = run.real[:, :end].to(device)
        answer = torch.arange(end) >= start
        self.known = (answer & ((undecided & answer).cumsum(dim=1) == 0)).to(device)
        settings = settings_for(run.model, {}) if run.causal else run.settings
        size = block_length or settings.positions_per_block
        self.blocks = [range(at, min(at + size, end)) for at in range(start, end, size)]
        self.answer = range(start, end)

    def masked_from_each(self, block: range) -> Int[Tensor, "copies_batch pos"]:
        """For each position of a block, the rows up to its end, masked from this position on; copy after copy."""
        text = self.ids[:, : block.stop].repeat(len(block), 1)
        first = torch.tensor(block, device=text.device).repeat_interleave(len(self.ids))[:, None]
        columns = torch.arange(block.stop, device=text.device)
        return text.masked_fill(columns >= first, self.model.mask_token_id)  # type: ignore[arg-type]


def modes_compared(run: Generation, block_length: int | None = None) -> xr.Dataset:
    """Compare causal and denoising passes over the finished text of a run of any mode.

    Per [batch, pos], over the positions of the answer (NaN from the first undecided one on):
        ``logprob_causal``, ``logprob_denoise``: log-probability of the token, from the tokens before it, in nats;
        ``kl``: Σ_v p(v) log(p(v)/q(v)) in nats, p the causal and q the denoising distribution;
        ``top1_agreement``: whether both have the same most likely token.
    Per [batch, layer, head, pos]:
        ``attention_distance``: ½ Σ_j |A[i, j] − B[i, j]| of query i, A the causal and B the denoising attention over
        the finished block; 0 to 1.
    Per [batch, layer, head, block]:
        ``strongest_causal``, ``strongest_denoise``: the key with the largest sum of attention from the block's queries.
    Per [batch, layer, head, block, key]:
        ``score_causal``, ``score_denoise``: these sums.

    Hooks that are set on the model (``with model.hooks(...)``) act in all passes.

    Args:
        block_length: positions per block; by default the run's, or the checkpoint's for a run without blocks.

    Raises:
        SettingError: not a run, or one of a model whose attention does not change from pass to pass.
    """
    _require_modes(run)
    text = _Text(run, block_length)
    with torch.no_grad():
        logits, causal = _pass(text, text.ids, "causal")
        found = _predictions(text, logits[:, text.answer.start - 1 : -1].double().log_softmax(-1))
        return xr.merge([found, _attention(text, causal)])


def _require_modes(run: Generation) -> None:
    require_run(run, "run")
    if not run.model.tree.changes_attention:
        raise SettingError(
            f"{run.model.name} has one attention for all passes, so there are no modes to compare; pass a run of a "
            f"model that changes its attention from pass to pass, such as nemotron-diffusion."
        )


def _pass(
    text: _Text, ids: Int[Tensor, "row pos"], mode: str, block: range | None = None
) -> tuple[Float[Tensor, "row pos vocab"], list[Float[Tensor, "row head pos pos"]]]:
    """The logits and patterns of one pass."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(text.model.cfg.n_layers)]
    real = text.real[:, : ids.shape[1]]
    start = None if block is None else block.start
    logits, cache = text.model.tree.run_with_cache(
        ids, attention_mask=real, names_filter=names, mode=mode, block_start=start
    )
    return logits, [cache[name].float() for name in names]


def _predictions(text: _Text, causal: Float[Tensor, "batch answer vocab"]) -> xr.Dataset:
    """Log-probabilities of the answer's tokens, from the tokens before them, and how the distributions differ."""
    parts = []
    for block in text.blocks:
        ids, real = text.masked_from_each(block), text.real[:, : block.stop].repeat(len(block), 1)
        logits = text.model.tree(ids, real, mode="denoise", block_start=block.start)
        copies = logits[:, block.start :].unflatten(0, (len(block), -1))
        parts.append(copies.diagonal(dim1=0, dim2=2).movedim(-1, 1))  # copy i holds the logits of position i
    denoise = torch.cat(parts, dim=1).double().log_softmax(-1)
    tokens = text.ids[:, text.answer.start :, None]
    values = {
        "logprob_causal": causal.gather(-1, tokens)[..., 0],
        "logprob_denoise": denoise.gather(-1, tokens)[..., 0],
        "kl": (causal.exp() * (causal - denoise)).sum(-1),
        "top1_agreement": (causal.argmax(-1) == denoise.argmax(-1)).double(),
    }
    known = text.known[:, text.answer.start :]
    found = {
        name: (["batch", "pos"], value.masked_fill(~known, torch.nan).cpu().numpy()) for name, value in values.items()
    }
    return xr.Dataset(found, coords={"pos": np.array(text.answer)})


def _attention(text: _Text, causal: list[Float[Tensor, "batch head pos pos"]]) -> xr.Dataset:
    """How the attention of the block's queries differs between the modes."""
    distances: list[Tensor] = []
    sums: dict[str, list[Tensor]] = {"causal": [], "denoise": []}
    for block in text.blocks:
        _, denoise = _pass(text, text.ids[:, : block.stop], "denoise", block)
        rows = slice(block.start, block.stop)
        pairs = [(a[:, :, rows, : block.stop], b[:, :, rows]) for a, b in zip(causal, denoise, strict=True)]
        distances.append(torch.stack([(a - b).abs().sum(-1) / 2 for a, b in pairs], dim=1))
        known = text.known[:, None, rows, None]
        for name, number in (("causal", 0), ("denoise", 1)):
            stacked = torch.stack([(pair[number] * known).sum(2) for pair in pairs], dim=1)
            sums[name].append(torch.nn.functional.pad(stacked, (0, text.answer.stop - block.stop)))
    distance = torch.cat(distances, dim=-1).masked_fill(~text.known[:, None, None, text.answer.start :], torch.nan)
    axes = ["batch", "layer", "head"]
    found = {"attention_distance": ([*axes, "pos"], distance.cpu().numpy())}
    for name, parts in sums.items():
        score = torch.stack(parts, dim=3)
        found[f"score_{name}"] = ([*axes, "block", "key"], score.cpu().numpy())
        found[f"strongest_{name}"] = ([*axes, "block"], score.argmax(-1).cpu().numpy())
    return xr.Dataset(found, coords={"pos": np.array(text.answer)})


def commits_compared(run: Generation) -> xr.Dataset:
    """The strongest keys of the denoise steps of each block, compared with those of the pass that commits it.

    Per [batch, block, layer, head], by the recorded column sums, over the queries of these passes:
        ``strongest_commit``: the strongest key of the commit;
        ``same_strongest``: share of the block's denoise steps with the same strongest key;
        ``moves``: how often the strongest key changes from one denoise step of the block to the next.
    Per [block]: ``denoise_steps``, their number; a row that has ended counts steps in which it waits.

    Raises:
        SettingError: not a run in the mode "diffusion", or its sinks were not recorded.
    """
    _require_modes(run)
    commits = [step for step, mode in enumerate(run.modes) if mode == "commit"]
    if run.sinks is None or not commits:
        raise SettingError(
            "commits_compared needs a run whose blocks are committed, with recorded sinks; run it with "
            'mode="diffusion" and without record_sinks=False.'
        )
    top = run.sinks.top(1).isel(rank=0)
    parts, before = [], 0
    for commit in commits:
        steps = [step for step in range(before + 1, commit) if run.modes[step] == "denoise"]
        last, filling = top.isel(step=commit, drop=True), top.isel(step=steps)
        moved = (filling.to_numpy()[:, 1:] != filling.to_numpy()[:, :-1]).sum(axis=1)
        parts.append(
            xr.Dataset(
                {
                    "strongest_commit": last,
                    "same_strongest": (filling == last).mean("step"),
                    "moves": (last.dims, moved),
                    "denoise_steps": len(steps),
                }
            )
        )
        before = commit
    return xr.concat(parts, "block").transpose("batch", "block", "layer", "head")


def mode_patching(
    model: "Model",
    ids: Int[Tensor, "batch pos"],
    block_start: int,
    *,
    source: str = "causal",
    into: str = "denoise",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    attention_mask: Bool[Tensor, "batch pos"] | None = None,
) -> xr.Dataset:
    """What changes if one head's output at the block's positions comes from a pass of another mode over the same ids.

    Per [batch, layer, head, pos], over the positions of the block, each head patched alone:
        ``kl``: Σ_v p(v) log(p(v)/q(v)) in nats, p the distribution of the plain `into` pass and q the patched one's;
        ``top1_agreement``: whether both have the same most likely token.

    Args:
        block_start: first column of the block, which ends with `ids`.
        source, into: modes of the two passes, as in ``model(ids, mode=...)``; one of them sees the complete block.
        layers, heads: which ones; by default all.

    Raises:
        SettingError: the modes attend alike, or a layer, head or column does not exist.
    """
    if (source in CAUSAL) == (into in CAUSAL) or not {source, into} <= {*CAUSAL, *IN_BLOCK}:
        raise SettingError(
            f"source= and into= must be a causal mode ({', '.join(CAUSAL)}) and one that sees the block "
            f"({', '.join(IN_BLOCK)}), in either order; got {source!r} and {into!r}."
        )
    start, cfg = as_integer(block_start), model.cfg
    chosen, numbers = within("layer", layers, cfg.n_layers), within("head", heads, cfg.n_heads)
    names = [f"blocks.{layer}.attn.hook_z" for layer in chosen]
    given: dict[str, dict[str, Any]] = {
        mode: {"mode": mode, "block_start": None if mode in CAUSAL else start} for mode in (source, into)
    }
    with torch.no_grad():
        ids = ids.to(cfg.device)
        _, kept = model.tree.run_with_cache(ids, attention_mask=attention_mask, names_filter=names, **given[source])
        before = model.tree(ids, attention_mask, **given[into])[:, start:].double().log_softmax(-1)
        shape = (len(ids), len(chosen), len(numbers), before.shape[1])
        kl, same = np.full(shape, np.nan), np.full(shape, np.nan)
        for at, name in enumerate(names):
            for place, head in enumerate(numbers):
                hooks = [(name, _replaced(kept[name], start or 0, head))]
                after = model.tree.run_with_hooks(ids, fwd_hooks=hooks, attention_mask=attention_mask, **given[into])
                after = after[:, start:].double().log_softmax(-1)
                kl[:, at, place] = (before.exp() * (before - after)).sum(-1).cpu().numpy()
                same[:, at, place] = (before.argmax(-1) == after.argmax(-1)).cpu().numpy()
    axes = ("batch", "layer", "head", "pos")
    places = {"layer": list(chosen), "head": list(numbers), "pos": np.arange(start or 0, ids.shape[1])}
    return xr.Dataset({"kl": (axes, kl), "top1_agreement": (axes, same)}, coords=places)


def _replaced(source: Float[Tensor, "batch pos head d_head"], start: int, head: int) -> Callable[..., Tensor]:
    """A hook that takes one head's output from `source`, from column `start` on."""

    def replace(value: Float[Tensor, "batch pos head d_head"], hook: object) -> Tensor:
        value = value.clone()
        value[:, start:, head] = source[:, start:, head]
        return value

    return replace
