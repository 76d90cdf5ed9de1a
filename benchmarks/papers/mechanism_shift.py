"""Does adaptation to diffusion rewire an autoregressive model? (docs/papers/mechanism-shift.md)

    python benchmarks/papers/mechanism_shift.py [MODEL ...] [each=N] [SETTING=VALUE ...]

tiny-two-modes was initialized from tiny-llama and decodes in both ways. Each head is ablated at every step, on the
canvases of the unchanged run; the effect is the KL divergence of the predictions. The rank correlation of the 24
effects compares two models or modes; its 95 % interval resamples templates, and so does that of the difference of two
correlations with the same model. Controls are a twin that learned diffusion from its first step, and heads shuffled
within layers (median and 97.5 % quantile). It took 25 seconds of CPU time on one core.

Models that are given are compared in pairs, each in its own mode, on one problem of each template unless `each` says
otherwise. They must have equal numbers of layers and heads.
"""

import sys
from itertools import combinations
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from templates import call, having

import sinklens
from sinklens.experiments import sweep
from sinklens.interventions import AblateHeads
from sinklens.tasks.word_problems import held_out

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-llama": ("tiny-llama", {}),
    "two modes, left to right": ("tiny-two-modes", {"mode": "autoregressive"}),
    "two modes, diffusion": ("tiny-two-modes", {"mode": "diffusion"}),
    "tiny-llada": ("tiny-llada", {}),
}  # fmt: skip
PAIRS = [
    ("tiny-llama", "two modes, left to right"),
    ("tiny-llama", "two modes, diffusion"),
    ("two modes, left to right", "two modes, diffusion"),
    ("tiny-llama", "tiny-llada"),
    ("two modes, diffusion", "tiny-llada"),
]
PROMPTS, LENGTH, RESAMPLES = 10, 8, 2000


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation of the mean effects of two arrays [prompt, head]."""
    return float(spearmanr(first.mean(axis=0), second.mean(axis=0)).statistic)


def main() -> None:
    """Print the table."""
    names, given, asked = call(sys.argv[1:], (), 1)
    problems = given if names else held_out(PROMPTS)
    runs = {name: (name, dict[str, Any]()) for name in names} or RUNS
    models = {checkpoint: sinklens.load(checkpoint) for checkpoint, _ in runs.values()}
    sizes = {(model.cfg.n_layers, model.cfg.n_heads) for model in models.values()}
    if len(sizes) > 1:
        sys.exit(f"heads are compared one by one, but the models have different numbers of (layers, heads): {sizes}.")
    effects = {}
    for name, (checkpoint, settings) in runs.items():
        model = models[checkpoint]
        layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
        ablations = {f"{layer}.{head}": AblateHeads(layers=[layer], heads=[head]) for layer in layers for head in heads}
        prompts = [problem.prompt for problem in problems]
        settings = {"gen_length": LENGTH} | having(model, asked) | settings
        swept = sweep(model, prompts, ablations, replay=True, **settings)
        effects[name] = swept["kl"].mean("step").transpose("prompt", "intervention").to_numpy()
        by_layer = effects[name].mean(axis=0).reshape(len(layers), -1).sum(axis=1)
        print(name, "share of the effect by layer", (by_layer / by_layer.sum()).round(2))
        strongest = effects[name].mean(axis=0).argsort()[::-1][:5]
        print(name, "strongest", [list(ablations)[one] for one in strongest])
    rng = np.random.default_rng(0)
    kinds = np.unique([problem.kind for problem in problems], return_inverse=True)[1]
    draws = [
        np.concatenate([np.flatnonzero(kinds == kind) for kind in rng.choice(kinds.max() + 1, kinds.max() + 1)])
        for _ in range(RESAMPLES)
    ]
    found = {}
    for pair in combinations(runs, 2) if names else PAIRS:
        one, two = (effects[name] for name in pair)
        found[pair] = np.array([correlation(one[rows], two[rows]) for rows in [slice(None), *draws]])
        low, high = np.percentile(found[pair][1:], [2.5, 97.5])
        starts = range(0, one.shape[1], len(heads))
        turns = [np.concatenate([start + rng.permutation(len(heads)) for start in starts]) for _ in range(1000)]
        shuffled = [correlation(one, two[:, turn]) for turn in turns]
        middle, most = np.percentile(shuffled, [50, 97.5])
        print(
            list(pair),
            f"{found[pair][0]:.2f} [{low:.2f}, {high:.2f}]",
            f"shuffled {middle:.2f}, up to {most:.2f}",
        )
    for first, second in combinations(found, 2):
        if first[0] == second[0]:
            gap = found[second] - found[first]
            low, high = np.percentile(gap[1:], [2.5, 97.5])
            print(f"with {first[0]}: {second[1]} − {first[1]}", f"{gap[0]:.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
