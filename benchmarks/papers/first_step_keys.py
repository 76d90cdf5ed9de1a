"""Measure the tables of docs/papers/first-step-keys.md: does a block's first step name the keys that later steps use?

    python benchmarks/papers/first_step_keys.py [MODEL ...] [each=N]

14 held-out word problems, two of each template; blocks of 8 positions, one token per step, and the 8 keys per head
before the block that its queries attend to most, from the second block on. Took 7
minutes for each model on a fraction of a core.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from templates import answers, call, loaded, mean, row
from torch import Tensor

import sinklens
from sinklens.interventions import KeepKeys
from sinklens.sinks import Record

BLOCK = KEYS = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny-sdar": {"remasking_strategy": "low_confidence_static", "denoising_steps": BLOCK, "use_cache": True},
    "tiny-llada": {"block_length": BLOCK},
}
GUESSES = ("first step", "step before", "block before", "another prompt", "last keys", "random keys")
Keys = Bool[np.ndarray, "layer head key"]
Scores = Float[np.ndarray, "step layer head pos"]


def starts(run: Any) -> Int[np.ndarray, " step"]:
    """First position of the block that each step works on."""
    first = run.undecided[0, : run.steps_run].int().argmax(dim=1).numpy()
    before = 0 if run.settings.name == "sdar" else run.prompt_length
    return before + (first - before) // BLOCK * BLOCK


def block_scores(model: Any, prompt: str, settings: dict[str, Any]) -> tuple[Any, Scores]:
    """A run, and its column sums over the queries of the current block."""
    if "use_cache" in settings:
        return cached_scores(model, prompt, settings)
    run = sinklens.generate(model, prompt, progress=False, **settings)
    place, start = np.arange(run.canvas.shape[2]), starts(run)[:, None]
    queries = ((place >= start) & (place < start + BLOCK))[None]
    run = sinklens.generate(model, prompt, progress=False, record_sinks=Record(queries=queries), **settings)
    return run, run.sinks.scores().isel(batch=0).fillna(0).to_numpy()


def cached_scores(model: Any, prompt: str, settings: dict[str, Any]) -> tuple[Any, Scores]:
    """`block_scores` of a run with a cache, whose first step of a block also computes the finished block before it."""
    kept: dict[int, list[Float[np.ndarray, "head key"]]] = {}

    def keep(pattern: Float[Tensor, "batch head query key"], hook: Any) -> None:
        kept.setdefault(hook.step, []).append(pattern[0, :, -BLOCK:].sum(dim=1).numpy())

    hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(model.cfg.n_layers)]
    run = sinklens.generate(model, prompt, hooks=hooks, record_sinks=False, progress=False, **settings)
    scores = np.zeros((run.steps_run, model.cfg.n_layers, model.cfg.n_heads, run.canvas.shape[2]))
    for step, layers in kept.items():
        scores[step, ..., : layers[0].shape[-1]] = np.stack(layers)
    return run, scores


def strongest(scores: Float[np.ndarray, "layer head key"]) -> Keys:
    """The `KEYS` largest of each head."""
    order = scores.argsort(axis=-1).argsort(axis=-1)
    return order >= scores.shape[-1] - KEYS


def guessed(
    scores: Scores,
    other: Float[np.ndarray, "layer head pos"],
    step: int,
    first: int,
    start: int,
    earlier: int,
    rng: np.random.Generator,
) -> dict[str, Keys]:
    """The keys of `GUESSES` at a step.

    Args:
        other: scores of another prompt's first step, up to its block.
        step, first, start: the step, the first step of its block, and the first position of that block.
        earlier: the first step of the block before.
    """
    before = scores[step, ..., :start]
    aligned, shared = np.zeros_like(before), min(start, other.shape[-1])
    aligned[..., start - shared :] = other[..., other.shape[-1] - shared :]
    guesses = (
        scores[first, ..., :start], scores[step - 1, ..., :start], scores[earlier, ..., :start], aligned,
        np.broadcast_to(np.arange(start), before.shape), rng.random(before.shape),
    )  # fmt: skip
    return {name: strongest(guess) for name, guess in zip(GUESSES, guesses, strict=True)}


def of_prompt(
    runs: Sequence[tuple[Any, Scores]], number: int
) -> tuple[dict[str, Float[np.ndarray, "2"]], dict[str, Bool[np.ndarray, "1 step layer head pos"]]]:
    """By guess: recall and share of the attention, in percent; and the keys that the steps of later blocks may see."""
    (run, scores), (twin, of_twin) = runs[number], runs[number ^ 1]  # the other prompt of the template
    start, there, rng = starts(run), starts(twin), np.random.default_rng(number)
    parts: dict[str, list[tuple[float, float]]] = {guess: [] for guess in GUESSES}
    kept = {guess: np.ones((1, *scores.shape), dtype=bool) for guess in GUESSES}
    for step in range(run.steps_run):
        first = int((start == start[step]).argmax())
        if step == first or first == 0:
            continue
        earlier = int((start == start[first - 1]).argmax())
        blocks = np.unique(there)
        begins = blocks[min(int(np.unique(start).searchsorted(start[step])), len(blocks) - 1)]
        other = of_twin[int((there == begins).argmax()), ..., :begins]
        before = scores[step, ..., : start[step]]
        own = strongest(before)
        for guess, keys in guessed(scores, other, step, first, int(start[step]), earlier, rng).items():
            received = (before * keys).sum(-1) / (before * own).sum(-1)
            parts[guess].append(((keys & own).sum(-1).mean() / KEYS, received.mean()))
            kept[guess][0, step, ..., : start[step]] = keys
    return {guess: 100 * np.mean(found, axis=0) for guess, found in parts.items()}, kept


def same_answer(
    run: Any, prompt: str, kept: Bool[np.ndarray, "1 step layer head pos"], settings: dict[str, Any]
) -> bool:
    """Whether a run that sees only these keys gives the same answer."""
    axes = ("batch", "step", "layer", "head", "pos")
    where = xr.DataArray(kept, dims=axes, coords={"step": np.arange(kept.shape[1])})
    hook = KeepKeys(top_k=None, where=where)
    only = sinklens.generate(run.model, prompt, hooks=hook, record_sinks=False, progress=False, **settings)
    return bool(only.text == run.text)


def main() -> None:
    """Print the tables."""
    names, asked, _ = call(sys.argv[1:], list(SETTINGS), 2)
    for name in names:
        model = loaded(name, masks=True)
        settings = SETTINGS.get(name, SETTINGS["tiny-sdar" if model.block_length else "tiny-llada"])
        runs = [block_scores(model, one.prompt, settings) for one in asked]
        found = [of_prompt(runs, number) for number in range(len(asked))]
        shares = {guess: np.array([part[guess] for part, _ in found]).T for guess in GUESSES}
        for guess in GUESSES:
            cells = [mean(part, asked, ".0f") for part in shares[guess]]
            if guess != "step before":
                same = [
                    same_answer(run, one.prompt, kept[guess], settings)
                    for (run, _), one, (_, kept) in zip(runs, asked, found, strict=True)
                ]
                cells.append(answers(np.array(same, float)))
            print(row(name, guess, *cells), flush=True)
        for guess in ("block before", "another prompt"):
            cells = [mean(part, asked, ".0f") for part in shares["first step"] - shares[guess]]
            print(row(name, f"first step − {guess}", *cells), flush=True)


if __name__ == "__main__":
    main()
