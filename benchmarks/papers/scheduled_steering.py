"""Does steering work better when it acts only while an attribute is decided? (docs/papers/scheduled-steering.md)

    python benchmarks/papers/scheduled_steering.py [MODEL ...]

The attribute is the thing that an answer counts ("… = 12 apples"); the direction is the unembedding of " kites" minus
that of the mean token, added to the last stream at undecided positions. Schedules of equal total strength are compared:
all steps, the half of the noise levels in which most things are decided, and the other half; then uniform steering with
the dose per step of these halves. It took 11 seconds of CPU time on one core for tiny-llada,
for which the doses were chosen.
"""

import sys

import numpy as np
from templates import call, loaded

import sinklens
from sinklens.interventions import AtNoise, Steer
from sinklens.tasks.word_problems import ITEMS, Problem, held_out, read_answer
from sinklens.utils.estimates import proportion

TARGET, DOSES = " kites", (40.0, 50.0)


def main() -> None:
    """Print the tables."""
    for name in call(sys.argv[1:], ("tiny-llada",)).models:
        tell(loaded(name, masks=True, words=[TARGET, *(f" {item}" for item in ITEMS)]))


def tell(model: sinklens.Model) -> None:
    """Print when a model decides things, and its table."""
    things = [model.to_single_token(f" {item}") for item in ITEMS]
    problems = [
        one for one in held_out(60) if one.kind in ("more", "fewer", "groups", "share") and TARGET not in one.prompt
    ][:12]
    prompts = [one.prompt for one in problems]
    base = sinklens.generate(model, prompts, record_sinks=False)
    place = np.isin(base.tokens.numpy(), things) & (base.unmask_step >= 0).numpy()
    print("decided at step", np.sort(base.unmask_step.numpy()[place]), "of", base.steps_run)
    share = 1 - np.median(base.unmask_step.numpy()[place]) / base.steps_run
    halves = {"matched": AtNoise(0.0, 0.5), "missed": AtNoise(0.501)}
    if share > 0.5:
        halves = {"matched": AtNoise(0.501), "missed": AtNoise(0.0, 0.5)}
    weight = model.hf.get_output_embeddings().weight.detach().float()
    direction = weight[model.to_single_token(TARGET)] - weight.mean(dim=0)
    direction = direction / direction.norm()
    layer = model.cfg.n_layers - 1
    at = {"layers": [layer], "point": "hook_resid_post"}
    print("unchanged: target", sum(TARGET in text for text in base.text), "right", _right(base.text, problems).sum())
    for dose in DOSES:
        schedules = {
            "uniform": Steer(direction, dose, where="masked", **at),
            "uniform, twice the dose": Steer(direction, 2 * dose, where="masked", **at),
        } | {name: Steer(direction, 2 * dose, where=half & "masked", **at) for name, half in halves.items()}
        for name, hooks in schedules.items():
            texts = sinklens.generate(model, prompts, hooks=hooks, record_sinks=False).text
            hit = [TARGET in text for text in texts]
            right = _right(texts, problems)
            both = proportion(int((np.array(hit) & right).sum()), len(texts))
            print(dose, name, "target", sum(hit), "right", right.sum(), "both", both, repr(texts[0]))


def _right(texts: list[str], problems: list[Problem]) -> np.ndarray:
    return np.array([read_answer(text) == one.result for text, one in zip(texts, problems, strict=True)])


if __name__ == "__main__":
    main()
