"""Measure the tables of docs/papers/sink-aware-pruning.md: do dominant sinks wander, and can pruning ignore them?

    python benchmarks/papers/sink_aware_pruning.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Variances over 14 held-out word problems, two of each template: of the run, of a pattern that does not change
(analyses/nulls.py), and of canvases that decide the same tokens in random order. Then three quarters of the weights
of every row are removed at random, by |W|, and by Wanda's score |W|·‖X‖ (2306.11695). X is from the canvases of steps
4, 12 and 20 of seven training problems, one of each template, with the activations of sinks scaled down by 1 − their
strength (Sink-Aware Pruning, 2602.17664), or not, or with the same strengths at random positions. Took 10 minutes for
each model on a fraction of a core.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from templates import answers, call, geometric, mean, middle, row

import sinklens
from sinklens.analyses.edits import revealed
from sinklens.analyses.nulls import null_of
from sinklens.experiments import compare, input_norms
from sinklens.experiments.swaps import column_sums
from sinklens.interventions import MaskedLogits, PruneWeights
from sinklens.sinks import MeanPlusStd, SinkTrack, build_track, motion
from sinklens.tasks.word_problems import PROBLEM_KINDS, Problem, read_answer, training

MODELS = ("tiny-llada", "tiny-dream", "tiny-llama")
STEPS = (4, 12, 20)
SHARE = 0.75


def calibration() -> list[Problem]:
    """One training problem of each template."""
    found = {problem.kind: problem for problem in training(7, 100)}
    return [found[kind] for kind in PROBLEM_KINDS]


def cost(
    asked: Sequence[Problem], base: Any, logits: MaskedLogits, hooks: list[Any], settings: dict[str, Any]
) -> Float[np.ndarray, "2 prompt"]:
    """KL divergence on the canvases of `base`, and right answers, under `hooks`."""
    prompts, after, quiet = [one.prompt for one in asked], MaskedLogits(), {"record_sinks": False, "progress": False}
    replayed = sinklens.generate(base.model, prompts, replay=base, hooks=[*hooks, after], **quiet, **settings)
    kl = compare(base, replayed, logits.kept, after.kept)["kl"].mean("step").to_numpy()
    run = sinklens.generate(base.model, prompts, hooks=hooks, **quiet, **settings)
    right = [read_answer(text or "") == one.result for text, one in zip(run.text, asked, strict=True)]
    return np.stack([kl, np.array(right, float)])


def in_random_order(model: Any, run: Any) -> SinkTrack:
    """The track of canvases that decide the same tokens in random order."""
    order = np.random.default_rng(run.prompt_length).permutation(run.unmask_step[0, run.prompt_length :].numpy())
    canvases = revealed(run.tokens[0], run.prompt_length, order, model.mask_token_id)
    score = column_sums(model, canvases).swapaxes(0, 1)  # [1, step, layer, head, pos]
    none, ids = np.zeros((1, *canvases.shape), dtype=bool), canvases.numpy()[None]
    attrs = {"model": model.name, "prompt_length": run.prompt_length}
    return build_track(score, ids, none, none, np.ones_like(none[:, 0]), np.full(none[:, 0].shape, -1), attrs)


def variances(model: Any, asked: Sequence[Problem], settings: dict[str, Any]) -> None:
    """Print the variances of the positions of sinks, and how those of the run compare with a random order."""
    runs = [sinklens.generate(model, one.prompt, progress=False, **settings) for one in asked]
    tracks_of = {"run": [run.sinks for run in runs], "static null": [null_of(run, 0) for run in runs]}
    if not model.causal:
        tracks_of["random order"] = [in_random_order(model, run) for run in runs]
    temporal = {}
    for label, tracks in tracks_of.items():
        spatial = np.array([float(motion.spatial_variance(track)[0]) for track in tracks])
        temporal[label] = np.array([float(motion.temporal_variance(track)[0]) for track in tracks])
        print(row(model.name, label, mean(spatial, asked, ".2f"), middle(temporal[label])), flush=True)
    if not model.causal:
        with np.errstate(invalid="ignore", divide="ignore"):  # sinks that never move
            ratio = temporal["run"] / temporal["random order"]
        print(row(model.name, "run / random order", geometric(ratio, asked)), flush=True)


def pruning(model: Any, asked: Sequence[Problem], settings: dict[str, Any]) -> None:
    """Print what pruning by each score costs."""
    known = [sinklens.generate(model, one.prompt, progress=False, **settings) for one in calibration()]
    logits, costs = MaskedLogits(), {}
    prompts = [one.prompt for one in asked]
    base = sinklens.generate(model, prompts, hooks=[logits], progress=False, **settings)
    norms = {
        "Wanda": input_norms(known, steps=STEPS),
        "without sinks": input_norms(known, steps=STEPS, without=MeanPlusStd()),
        "without random": input_norms(known, steps=STEPS, without=MeanPlusStd(), shuffled=0),
    }
    choices: dict[str, list[Any]] = {"none": [], "random": [PruneWeights(SHARE, "random")]}
    choices |= {"magnitude": [PruneWeights(SHARE)]}
    choices |= {label: [PruneWeights(SHARE, "wanda", norms=found)] for label, found in norms.items()}
    for label, hooks in choices.items():
        costs[label] = cost(asked, base, logits, hooks, settings)
        print(row(model.name, label, mean(costs[label][0], asked, ".2f"), answers(costs[label][1])), flush=True)
    for other in ("Wanda", "without random"):
        difference = costs["without sinks"][0] - costs[other][0]
        print(row(model.name, f"without sinks − {other}", mean(difference, asked, ".3f")), flush=True)


def main() -> None:
    """Print the tables."""
    names, asked, settings = call(sys.argv[1:], MODELS, 2)
    for name in names:
        model = sinklens.load(name)
        variances(model, asked, settings)
        pruning(model, asked, settings)


if __name__ == "__main__":
    main()
