"""Measure what each layer of the shipped models contributes, and what rounding their weights costs.

    python benchmarks/layers.py

Runs of held-out problems under replay: mean KL divergence at undecided positions from the unchanged run (nats), and the
share of answers that stay the same in free runs.
"""

import numpy as np

import sinklens
from sinklens.experiments import effect, layer_similarity, massive_activations, outlier_dimensions
from sinklens.interventions import LayerOrder, RoundActivations, RoundWeights, SkipLayers
from sinklens.tasks.word_problems import held_out


def main() -> None:
    prompts = [problem.prompt for problem in held_out(8)]
    for name in ("tiny-llada", "tiny-dream"):
        model = sinklens.load(name)
        run = sinklens.generate(model, prompts, record_sinks=False, progress=False)
        for measure in ("cosine", "cka"):
            found = layer_similarity(run, measure, state="masked").mean("step").to_numpy()
            print(name, measure, "of the streams before and after each layer:", np.diagonal(found, 1).round(3))
        print(name, "massive activations:", len(massive_activations(run)))
        print(name, "outlier dimensions:", [one.dim for one in outlier_dimensions(run)])
        layers = range(model.cfg.n_layers)
        changes = {f"skip {layer}": SkipLayers(layers=[layer]) for layer in layers}
        changes |= {f"repeat {layer}": LayerOrder([*range(layer + 1), *range(layer, layers.stop)]) for layer in layers}
        swapped = [[*range(at), at + 1, at, *range(at + 2, layers.stop)] for at in layers[:-1]]
        changes |= {f"swap {at} and {at + 1}": LayerOrder(order) for at, order in enumerate(swapped)}
        changes |= {f"{bits} bits, group {group}": RoundWeights(bits, group) for bits in (4, 3) for group in (None, 32)}
        changes |= {f"activations {bits} bits": RoundActivations(bits) for bits in (8, 4)}
        for label, hooks in changes.items():
            found = effect(model, prompts, hooks, record_sinks=False)
            same = int(found.free_running["same_answer"].sum())
            kl = float(found.under_replay["kl"].mean())
            print(f"{name}, {label}: KL {kl:.3g}, {same} of {len(prompts)} answers the same", flush=True)


if __name__ == "__main__":
    main()
