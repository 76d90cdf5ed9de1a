"""Is the denoising step encoded in the residual stream? (docs/papers/subliminal-clocks.md)

    python benchmarks/papers/subliminal_clocks.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Ridge probes of the step, at undecided positions, on runs of the model's own decoding order, on runs of random order,
and from one to the other; then the entropy at undecided positions under steering along "late minus early". It took
30 seconds of CPU time on one core for the default models.
"""

import sys

import numpy as np
from templates import RANDOM, Call, call, having, loaded, mean

import sinklens
from sinklens.experiments import StepOutput, sweep
from sinklens.features import Probe, ProbeData, fit_probe, probe_data, probe_table

NAMES = ("tiny-llada", "tiny-mmada")
EACH, FITTED = 5, 3  # problems of every template, and how many of them give the direction of steering
PENALTY = 1000.0
DOSE = 3.0  # in differences of the two class means


def transferred(probe: Probe, data: ProbeData) -> float:
    """R² of a probe on other runs."""
    truth = data.column("step").astype(float)
    return 1 - float(((truth - probe.predict(data.at(probe.point))) ** 2).sum() / ((truth - truth.mean()) ** 2).sum())


def entropy(output: StepOutput) -> np.ndarray:
    """Mean entropy of the predictions at undecided positions, in nats [prompt]."""
    logs = output.logits.float().log_softmax(dim=-1)
    nats = -(logs.exp() * logs).sum(dim=-1)
    return (nats * output.undecided).sum(dim=1) / output.undecided.sum(dim=1)


def main() -> None:
    """Print both tables."""
    asked = call(sys.argv[1:], NAMES, EACH)
    prompts = [problem.prompt for problem in asked.problems]
    kinds = [problem.kind for problem in asked.problems]
    for name in asked.models:
        model = loaded(name, masks=True, shuffles=True)
        points = ["hook_embed", "blocks.0.hook_resid_post", f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
        runs = {
            order: sinklens.generate(model, prompts, record_sinks=False, **asked.settings | given)
            for order, given in {"own": {}, "random": having(model, RANDOM)}.items()
        }
        parts = {}
        for order, run in runs.items():
            parts[order] = probe_data(run, points, scope="masked", steps=range(0, run.steps_run, 3))
            parts[order] = parts[order].with_label("template", kinds)
            table = probe_table(parts[order], "step", kind="ridge", penalty=PENALTY, units="template", repeats=1)
            print(name, order, len(parts[order]), "places")
            print(table[["point", "score", "low", "high", "shuffled", "bag", "place"]].round(2).to_string())
        for point in points:
            probes = {order: fit_probe(data, point, "step", "ridge", penalty=PENALTY) for order, data in parts.items()}
            print(name, point, "own to random", round(transferred(probes["own"], parts["random"]), 3))
            print(name, point, "random to own", round(transferred(probes["random"], parts["own"]), 3))
        steer(model, parts["own"], points[1], asked)


def steer(model: sinklens.Model, data: ProbeData, point: str, asked: Call) -> None:
    """Print the entropy under steering toward late minus that under steering toward early, and of random directions."""
    each = len(asked.problems) // len({problem.kind for problem in asked.problems})
    problems = [one for number, one in enumerate(asked.problems) if number % each >= FITTED]
    data = data.chosen(data.column("prompt") % each < FITTED)
    last = int(data.column("step").max()) + 3  # every third step has data
    steps = [last // 6, last // 2]
    probe = fit_probe(data.with_label("late", data.column("step") >= last // 2), point, "late", "difference")
    directions = {"late − early": probe} | {f"random {seed}": probe.random(seed) for seed in range(3)}
    changes = {
        f"{name} {sign}": one.steer(sign, where="masked", steps=steps)
        for name, one in directions.items()
        for sign in (-DOSE, DOSE)
    }
    prompts = [problem.prompt for problem in problems]
    found = sweep(model, prompts, changes, metric=entropy, replay=True, **asked.settings)
    value = found["metric"].mean("step")  # of the steps that were steered
    print(model.name, "unchanged", mean(found["metric_base"].sel(step=steps).mean("step"), problems, ".2f"))
    for name in directions:
        contrast = value.sel(intervention=f"{name} {DOSE}") - value.sel(intervention=f"{name} {-DOSE}")
        print(model.name, name, mean(contrast, problems, ".2f"))


if __name__ == "__main__":
    main()
