"""Do decisions follow one another in space, and does the first one bind the rest? (docs/papers/early-decisions.md)

    python benchmarks/papers/early_decisions.py [MODEL ...] [each=N]

Held-out problems, equally many of each template; one token is decided per step, in one block. In the forced runs, one
token stands on the canvas from the beginning, at a place drawn from those that the answer fills, three or more after
the prompt: the token that the model's own run puts there, or the one that it predicts there at step 0. Intervals: t
over templates, Tango's for paired answers.

The default models need `sinklens fetch smollm2-135m`. 40 seconds of processor time for a tiny model, 15 minutes for
the other.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch
from templates import answers, call, mean, row

import sinklens
from sinklens.experiments import logit_lens
from sinklens.interventions import ForceTokens
from sinklens.tasks.word_problems import Problem, read_answer

LENGTH, NEAR, FIRST = 32, 2, 4  # answers in tokens; what is near, in positions; decisions looked at after the first
HEADER = (
    "model", "run", "next to a decided token − at random", "near the place", "… − by confidence", "right, %",
    "gained, %",
)  # fmt: skip
RANDOM = {"llada": {"remasking": "random"}, "dream": {"alg": "origin"}, "diffullama": {"order": "random"}}
MODELS = ("tiny-llada", "tiny-dream", "smollm2-135m-masked")


def generated(
    model: sinklens.Model, problems: Sequence[Problem], hooks: Sequence[ForceTokens] = (), **settings: str
) -> sinklens.Generation:
    """Answers to all problems, one token per step."""
    lengths = {"gen_length": LENGTH, "steps": LENGTH} | ({"block_length": LENGTH} if model.family == "llada" else {})
    prompts = [problem.prompt for problem in problems]
    return sinklens.generate(model, prompts, hooks=hooks, record_sinks=False, **lengths, **settings)


def orders(run: sinklens.Generation) -> list[tuple[np.ndarray, int]]:
    """Of each row: the places of the answer as they were decided, and how many of them come before the end token."""
    steps, tokens = (part[:, run.prompt_length :].numpy() for part in (run.unmask_step, run.tokens))
    ends = np.isin(tokens, run.model.eos_token_ids)
    filled = [int(end.argmax()) if end.any() else LENGTH for end in ends]
    return [(np.argsort(step, kind="stable"), count) for step, count in zip(steps, filled, strict=True)]


def beside(order: np.ndarray, filled: int) -> float:
    """How much more often a decision is next to a decided token than a masked place drawn at random would be."""
    decided, found = np.zeros(LENGTH + 2, dtype=bool), []
    decided[0] = True  # the prompt
    for place in order:
        near = (decided[:-2] | decided[2:])[:filled]
        if place < filled and near.any():
            found.append(near[place] - near[~decided[1 : filled + 1]].mean())
        decided[place + 1] = True
    return float(np.mean(found))


def near(order: np.ndarray, filled: int, place: int) -> float:
    """Of the first decisions before the end token, the share that is near a place."""
    others = order[(order != place) & (order < filled)][:FIRST]
    return float((abs(others - place) <= NEAR).mean())


def right(run: sinklens.Generation, problems: Sequence[Problem]) -> np.ndarray:
    """Which answers are right."""
    texts = [answer.text or "" for answer in run.answers]
    return np.array([read_answer(text) == one.result for text, one in zip(texts, problems, strict=True)], dtype=float)


def first_guess(run: sinklens.Generation, number: int, place: int) -> int:
    """The token that step 0 of a row predicts at a place of the answer."""
    at = {"steps": [0], "layers": [run.model.cfg.n_layers - 1], "positions": [start_of(run, number) + place]}
    return int(logit_lens(run.model, run, row=number, top_k=1, **at)["token"].item())


def start_of(run: sinklens.Generation, number: int) -> int:
    """Where the answer of a row begins, not counting padding."""
    return int(run.real[number, : run.prompt_length].sum())


def forced(run: sinklens.Generation, places: list[int], ids: list[int]) -> list[ForceTokens]:
    """One token on the canvas of each row, from step 0."""
    found = []
    for number, (place, token) in enumerate(zip(places, ids, strict=True)):
        tokens = [token if other == number else None for other in range(len(ids))]
        found.append(ForceTokens(tokens={start_of(run, number) + place: tokens}, steps=[0]))
    return found


def main() -> None:
    """Print the table."""
    names, problems, _ = call(sys.argv[1:], MODELS, 4)
    print(row(*HEADER))
    for name in names:
        model, drawn = sinklens.load(name), np.random.default_rng(0)
        usual = generated(model, problems)
        own, judged = orders(usual), right(usual, problems)
        places = [int(drawn.integers(min(3, filled - 1), filled)) for _, filled in own]
        free = np.array([near(*one, place) for one, place in zip(own, places, strict=True)])
        columns = torch.tensor(places) + usual.prompt_length
        final = usual.tokens[torch.arange(len(places)), columns].tolist()
        guesses = [first_guess(usual, number, place) for number, place in enumerate(places)]
        runs = {
            "by confidence": usual,
            "at random": generated(model, problems, **RANDOM[model.family]),
            "final token first": generated(model, problems, forced(usual, places, final)),
            "first guess first": generated(model, problems, forced(usual, places, guesses)),
        }
        for label, run in runs.items():
            found = orders(run)
            share = mean([beside(*one) for one in found], problems, ".2f")
            pulled = np.array([near(*one, place) for one, place in zip(found, places, strict=True)])
            cells = [mean(values, problems, ".2f") for values in (pulled, pulled - free)]
            correct = right(run, problems)
            print(row(name, label, share, *cells, answers(correct), answers(correct - judged, -1)), flush=True)
        kept = [guess == last for guess, last in zip(guesses, final, strict=True)]
        print(f"{name}: the first guess is the final token in {np.mean(kept):.2f}")


if __name__ == "__main__":
    main()
