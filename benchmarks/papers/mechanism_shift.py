"""Does adaptation to diffusion rewire an autoregressive model? (docs/papers/mechanism-shift.md)

tiny-two-modes was initialized from tiny-llama and decodes in both ways. Each head is ablated at every step, on the
canvases of the unchanged run; the effect is the KL divergence of the predictions. The rank correlation of the 24
effects compares two models or modes; its 95 % interval resamples templates. Controls are a twin that learned diffusion
from its first step, and heads shuffled within layers (median and 97.5 % quantile). It took 25 seconds of CPU time on
one core.
"""

import numpy as np
from scipy.stats import spearmanr

import sinklens
from sinklens.experiments import sweep
from sinklens.interventions import AblateHeads
from sinklens.tasks.word_problems import held_out

RUNS = {
    "tiny-llama": ("tiny-llama", {}),
    "two modes, left to right": ("tiny-two-modes", {"mode": "autoregressive"}),
    "two modes, diffusion": ("tiny-two-modes", {"mode": "diffusion"}),
    "tiny-llada": ("tiny-llada", {}),
}  # fmt: skip
PAIRS = [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)]
PROMPTS, LENGTH, RESAMPLES = 10, 8, 2000


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation of the mean effects of two arrays [prompt, head]."""
    return float(spearmanr(first.mean(axis=0), second.mean(axis=0)).statistic)


def main() -> None:
    """Print the table."""
    problems = held_out(PROMPTS)
    effects = {}
    for name, (checkpoint, settings) in RUNS.items():
        model = sinklens.load(checkpoint)
        layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
        ablations = {f"{layer}.{head}": AblateHeads(layers=[layer], heads=[head]) for layer in layers for head in heads}
        prompts = [problem.prompt for problem in problems]
        found = sweep(model, prompts, ablations, replay=True, gen_length=LENGTH, **settings)
        effects[name] = found["kl"].mean("step").transpose("prompt", "intervention").to_numpy()
        by_layer = effects[name].mean(axis=0).reshape(len(layers), -1).sum(axis=1)
        print(name, "share of the effect by layer", (by_layer / by_layer.sum()).round(2))
        strongest = effects[name].mean(axis=0).argsort()[::-1][:5]
        print(name, "strongest", [list(ablations)[one] for one in strongest])
    rng = np.random.default_rng(0)
    kinds = np.unique([problem.kind for problem in problems], return_inverse=True)[1]
    for first, second in PAIRS:
        names = [list(RUNS)[number] for number in (first, second)]
        one, two = (effects[name] for name in names)
        drawn = []
        for _ in range(RESAMPLES):
            rows = np.concatenate(
                [np.flatnonzero(kinds == kind) for kind in rng.choice(kinds.max() + 1, kinds.max() + 1)]
            )
            drawn.append(correlation(one[rows], two[rows]))
        low, high = np.percentile(drawn, [2.5, 97.5])
        turns = [np.concatenate([6 * layer + rng.permutation(6) for layer in range(4)]) for _ in range(1000)]
        shuffled = [correlation(one, two[:, turn]) for turn in turns]
        middle, most = np.percentile(shuffled, [50, 97.5])
        print(names, f"{correlation(one, two):.2f} [{low:.2f}, {high:.2f}]", f"shuffled {middle:.2f}, up to {most:.2f}")


if __name__ == "__main__":
    main()
