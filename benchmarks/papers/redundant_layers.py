"""Are early layers redundant in diffusion models? (docs/papers/redundant-layers.md)

    python benchmarks/papers/redundant_layers.py [MODEL ...] [each=N] [SETTING=VALUE ...]

For each layer: 1 − cosine of the streams that enter and leave it at prompt positions, and the KL divergence of the
predictions when it is skipped, at every step on the canvases of the unchanged run. It took 35 seconds of CPU time on
one core.
"""

import sys

import torch
from templates import call, mean

import sinklens
from sinklens.experiments import of_step, sweep
from sinklens.interventions import SkipLayers

MODELS = {
    "tiny-llada": {"steps": 8},
    "tiny-dream": {"steps": 8},
    "tiny-mdlm": {"steps": 8},
    "tiny-two-modes": {"mode": "diffusion", "gen_length": 8},
    "tiny-llama": {"gen_length": 8},
}


def prompt_cosine(run: sinklens.Generation, layer: int) -> float:
    """The mean cosine of the streams that enter and leave a layer at prompt positions, over steps 0 and 4."""
    found = []
    for step in (0, 4):
        ids, real, time = of_step(run, step)
        names = [f"blocks.{layer}.hook_resid_{at}" for at in ("pre", "post")]
        seen = run.model.tree.peek(ids, real, names, time)
        prompt = run.real[:, : run.prompt_length]
        streams = (seen[name].float().cpu()[:, : run.prompt_length][prompt] for name in names)
        found.append(float(torch.cosine_similarity(*streams, dim=-1).mean()))
    return sum(found) / len(found)


def main() -> None:
    """Print a row for each model and layer."""
    names, problems, given = call(sys.argv[1:], list(MODELS), 5)
    prompts = [problem.prompt for problem in problems]
    for name in names:
        settings = MODELS.get(name, {}) | given
        model = sinklens.load(name)
        layers = range(model.cfg.n_layers)
        skips = {f"{layer}": SkipLayers(layers=[layer]) for layer in layers}
        kl = sweep(model, prompts, skips, replay=True, **settings)["kl"].mean("step")
        alike = None  # the streams of a model of two modes depend on the mode of the pass
        if "mode" not in settings:
            run = sinklens.generate(model, prompts, record_sinks=False, **settings)
            alike = [prompt_cosine(run, layer) for layer in layers]
        for layer in layers:
            influence = "" if alike is None else f"influence {1 - alike[layer]:.2f}"
            print(name, layer, influence, "kl", mean(kl.sel(intervention=f"{layer}"), problems, ".3g"))


if __name__ == "__main__":
    main()
