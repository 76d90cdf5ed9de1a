"""Does one channel of the residual stream carry a diffusion model? (docs/papers/super-outlier.md)

The channel with the largest mean magnitude is set to 0, or to its mean, in every layer; the control does the same to
random channels, and to the channel after it in size. It took 47 seconds of
CPU time on one core.
"""

import numpy as np
from templates import balanced, mean

import sinklens
from sinklens.experiments import sweep
from sinklens.features import probe_data
from sinklens.interventions import Ablate
from sinklens.tasks.word_problems import Problem, read_answer
from sinklens.utils.estimates import Estimate, proportion

MODELS = {"tiny-llada": {"steps": 8}, "tiny-mmada": {"steps": 8}, "tiny-llama": {"gen_length": 24}}
RANDOM = 4
STREAM = {"point": "hook_resid_pre"}
POSITIVE = (0, np.inf)


def main() -> None:
    """Print a table for each model."""
    problems = balanced(6)
    prompts = [problem.prompt for problem in problems]
    for name, settings in MODELS.items():
        model = sinklens.load(name)
        run = sinklens.generate(model, prompts, record_sinks=False, **settings)
        layers = range(model.cfg.n_layers)
        points = [f"blocks.{layer}.hook_resid_pre" for layer in layers]
        streams = probe_data(run, points, steps=[0, 4]).values
        size = np.stack([np.abs(values).mean(axis=0) for values in streams.values()])  # [layer, channel]
        order = size.mean(axis=0).argsort()[::-1]
        top, second = int(order[0]), int(order[1])
        print(name, "top", top, "second", second)
        print(name, "size over median, by layer", (size[:, top] / np.median(size, axis=1)).round(1))
        others = np.random.default_rng(0).choice(order[2:], RANDOM, replace=False).tolist()
        means = {layer: float(streams[points[layer]][:, top].mean()) for layer in layers}
        changes = {
            "top to 0": [Ablate(**STREAM, dims=[top])],
            "top to its mean": [Ablate(**STREAM, layers=[layer], dims=[top], by=means[layer]) for layer in layers],
            "second to 0": [Ablate(**STREAM, dims=[second])],
        } | {f"random {dim}": [Ablate(**STREAM, dims=[dim])] for dim in others}
        kl = sweep(model, prompts, changes, replay=True, **settings)["kl"].mean("step")
        for label in list(changes)[:3]:
            print(name, label, "kl", mean(kl.sel(intervention=label), problems, ".2g", POSITIVE))
        random = kl.sel(intervention=[f"random {dim}" for dim in others])
        print(
            name,
            "random to 0, kl",
            mean(random.mean("intervention"), problems, ".2g", POSITIVE),
            "largest",
            float(random.mean("prompt").max()),
        )
        print(name, "right", _right(run.text, problems))
        texts = sinklens.generate(model, prompts, hooks=changes["top to 0"], record_sinks=False, **settings).text
        print(name, "top to 0 right", _right(texts, problems), repr(texts[0]))


def _right(texts: list[str], problems: list[Problem]) -> Estimate:
    verdicts = [read_answer(text) == one.result for text, one in zip(texts, problems, strict=True)]
    return proportion(sum(verdicts), len(verdicts))


if __name__ == "__main__":
    main()
