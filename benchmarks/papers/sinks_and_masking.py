"""Measure the tables of docs/papers/sinks-and-masking.md: how many heads have a sink, and what masking keys costs.

    python benchmarks/papers/sinks_and_masking.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Every model answers 21 held-out word problems, three of each template. It is masked as in Rulli et al. (2510.15731,
Sec. 4.3), with one and five keys per head; and *steadily*, the strongest key of the unmasked run at the step before,
beside as many random keys and random keys that are not sinks and hold as much attention (sinklens.analyses.mass). Took
12 minutes on a fraction of a core.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from templates import answers, call, mean, row

import sinklens
from sinklens.analyses.mass import attended, masks, with_same_mass
from sinklens.analyses.necessity import Necessity
from sinklens.interventions import MaskKeys, MaskSinks
from sinklens.sinks import EpsilonOverMean, StrongestKeys
from sinklens.tasks.word_problems import Problem, read_answer

MODELS = ("tiny-llada", "tiny-dream", "tiny-llama")
PAPER = {f"top {number}": MaskSinks(top_k=number) for number in (1, 5)}


def right(model: Any, asked: Sequence[Problem], hooks: Any, settings: dict[str, Any]) -> Float[np.ndarray, " prompt"]:
    """1 for every right answer, else 0."""
    prompts, quiet = [one.prompt for one in asked], {"record_sinks": False, "progress": False}
    run = sinklens.generate(model, prompts, hooks=hooks, **quiet, **settings)
    return np.array([read_answer(text or "") == one.result for text, one in zip(run.text, asked, strict=True)], float)


def steady(model: Any, one: Problem, settings: dict[str, Any]) -> tuple[dict[str, MaskKeys], float]:
    """The steady masks of one prompt, and the share of heads and steps with a sink."""
    study = Necessity()
    track = study.generate(model, [one.prompt], settings).run.sinks
    assert track is not None
    sinks = EpsilonOverMean().detect(track)
    mass = attended(study, model, one.prompt, settings, track)
    marked = with_same_mass(track, {"key": StrongestKeys().detect(track)}, sinks, mass)
    return masks(marked, "key"), float(sinks.any("pos").mean())


def main() -> None:
    """Print the tables."""
    names, asked, settings = call(sys.argv[1:], MODELS, 3)
    for name in names:
        model = sinklens.load(name)
        base = right(model, asked, [], settings)
        lost = {label: base - right(model, asked, hook, settings) for label, hook in PAPER.items()}
        found = [steady(model, one, settings) for one in asked]
        for label in ("strongest", "random", "same_mass"):
            one_by_one = [
                right(model, [one], hooks[label], settings) for one, (hooks, _) in zip(asked, found, strict=True)
            ]
            lost[label] = base - np.concatenate(one_by_one)
        lost["strongest − same_mass"] = lost["strongest"] - lost["same_mass"]
        print(list(lost))
        share = 100 * np.array([share for _, share in found])
        print(row(name, mean(share, asked), answers(base), *(answers(cost, -1) for cost in lost.values())), flush=True)


if __name__ == "__main__":
    main()
