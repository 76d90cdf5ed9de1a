"""Measure the tables of docs/papers/no-op-or-broadcast.md: what the values of sinks hold, and what removing them costs.

    python benchmarks/papers/no_op_or_broadcast.py [MODEL ...] [each=N] [SETTING=VALUE ...]

21 held-out word problems, three of each template. Value norms and ranks are those of single passes over the canvases of
steps 4, 12 and 20; written norms are those of values after the head's output matrix. Took 10 minutes on a fraction of
a core.
"""

import sys
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from templates import call, mean, row
from torch import Tensor

import sinklens
from sinklens.analyses.mass import acting, with_same_mass
from sinklens.experiments import sweep
from sinklens.interventions import AblateValues
from sinklens.sinks import EpsilonOverMean
from sinklens.sinks.strongest import Marked
from sinklens.sinks.values import NO_OP, written_norms

MODELS = ("tiny-llada", "tiny-dream", "tiny-llama")
STEPS = (4, 12, 20)
MEASURES = (
    "no-op, % of sinks", "broadcast, % of sinks", "value norm at sinks", "at other keys", "rank with sinks",
    "with values of other positions", "without sinks", "written norm at sinks", "at other keys (written)",
    "no-op by written norm, % of sinks",
)  # fmt: skip


def stable_rank(output: Float[Tensor, "head pos d_head"]) -> Float[np.ndarray, " head"]:
    """|O|_F² / σ₁² of every head."""
    squares = torch.linalg.svdvals(output) ** 2
    return (squares.sum(-1) / squares[:, 0]).numpy()


def of_pass(model: Any, ids: Tensor) -> Float[np.ndarray, " measure"]:
    """`MEASURES` of one canvas, over all layers and heads."""
    _, cache = model.run_with_cache(ids)
    drained, sent, at_sinks, elsewhere, ranks, permuted, without, written, beside, unwritten = ([] for _ in MEASURES)
    order = torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))
    for layer in range(model.cfg.n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].float()
        by_position = cache[f"blocks.{layer}.attn.hook_v"][0].float()
        value = by_position.transpose(0, 1)
        value = value.repeat_interleave(len(pattern) // len(value), dim=0)
        score = pattern.sum(dim=1)
        sink: Bool[Tensor, "head pos"] = score - (score.sum(-1, keepdim=True) - score) / (score.shape[1] - 1) > 3
        norm = value.norm(dim=-1)
        ratio, has = norm / norm.mean(-1, keepdim=True), sink.any(-1).numpy()
        writes = written_norms(by_position, model.W_O[layer])
        share = writes / writes.mean(-1, keepdim=True)
        rank, mixed = stable_rank(pattern @ value), stable_rank(pattern @ value[:, order])
        ordinary = (ratio >= 0.5) & (ratio <= 1.5) & torch.from_numpy(rank < 1.5)[:, None]
        drained += (ratio[sink] < NO_OP).tolist()
        sent += ordinary[sink].tolist()
        at_sinks += ratio[sink].tolist()
        elsewhere += ratio[~sink & sink.any(-1, keepdim=True)].tolist()
        written += share[sink].tolist()
        beside += share[~sink & sink.any(-1, keepdim=True)].tolist()
        unwritten += (share[sink] < NO_OP).tolist()
        ranks += rank[has].tolist()
        permuted += mixed[has].tolist()
        without += rank[~has].tolist()
    lists = (drained, sent, at_sinks, elsewhere, ranks, permuted, without, written, beside, unwritten)
    found = np.array([np.mean(part) if part else np.nan for part in lists])
    return found * np.array([100 if "%" in measure else 1 for measure in MEASURES])


def cost(model: Any, prompt: str, settings: dict[str, Any]) -> Float[np.ndarray, "2"]:
    """KL divergence under replay without the values of the sinks, and without those of as much attention elsewhere."""
    track = sinklens.generate(model, prompt, progress=False, **settings).sinks
    sinks = EpsilonOverMean().detect(track)
    marked = with_same_mass(track, {"key": sinks}, sinks, acting(track))
    hooks = {name: AblateValues(detector=Marked(name), source=marked, by="zero") for name in ("key", "key same_mass")}
    found = sweep(model, prompt, hooks, replay=True, progress=False, **settings)
    return found["kl"].mean("step").isel(prompt=0).to_numpy()


def main() -> None:
    """Print the tables."""
    names, asked, settings = call(sys.argv[1:], MODELS, 3)
    print(MEASURES)
    for name in names:
        model = sinklens.load(name)
        parts, costs = [], []
        for one in asked:
            run = sinklens.generate(model, one.prompt, record_sinks=False, progress=False, **settings)
            steps = [step for step in STEPS if step < run.steps_run]
            canvases = [run.canvas[:, step] for step in steps]
            if model.causal:
                canvases = [canvas[:, : run.prompt_length + step] for step, canvas in zip(steps, canvases, strict=True)]
            parts.append(np.nanmean([of_pass(model, canvas) for canvas in canvases], axis=0))
            costs.append([np.nan, np.nan] if model.causal else cost(model, one.prompt, settings))
        values, kl = np.array(parts), np.array(costs)
        cells = [
            mean(values[:, number], asked, ".0f" if "%" in measure else ".2f")
            for number, measure in enumerate(MEASURES)
        ]
        if not model.causal:
            with np.errstate(divide="ignore"):
                cells += [
                    mean(kl[:, 0], asked, ".2f"),
                    mean(kl[:, 1], asked, ".2f"),
                    mean(np.log2(kl[:, 0] / kl[:, 1]), asked),
                ]
        print(row(name, *cells), flush=True)


if __name__ == "__main__":
    main()
