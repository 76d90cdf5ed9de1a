"""Does steering work better when it acts only while an attribute is decided? (docs/papers/scheduled-steering.md)

    python benchmarks/papers/scheduled_steering.py [MODEL ...]

The attribute is the thing that an answer counts ("… = 12 apples"); the direction is the unembedding of " kites" minus
that of the mean token, added to the last stream where undecided tokens are predicted. Where " kites" is not a single
token, the target is " cups". Schedules of equal total strength are compared: all steps, the half of the noise levels in
which most things are decided, and the other half; then uniform steering with the dose per step of these halves. It took
11 seconds of CPU time on one core for tiny-llada, for which the doses were chosen; `PLANS` has doses for other models.
"""

import sys
from typing import Any

import numpy as np
from jaxtyping import Bool
from templates import call, loaded
from torch import Tensor

import sinklens
from sinklens.interventions import AtNoise, Steer
from sinklens.interventions.rules import Moment, OfKind
from sinklens.tasks.word_problems import ITEMS, Problem, held_out, read_answer
from sinklens.utils.estimates import proportion

TARGETS, DOSES = (" kites", " cups"), (40.0, 50.0)
PLANS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "smollm2-135m-masked": ((110.0,), {"gen_length": 24, "steps": 24}),
}
"""Doses and sampler settings of models that need others."""


class Predicting(OfKind):
    """Positions whose logits predict an undecided token: with shifted logits, those before the undecided ones."""

    def at(self, now: Moment) -> Bool[Tensor, "batch layer head pos"]:
        """See `Rule.at`."""
        masked = super().at(now)
        return masked.roll(-1, dims=-1) if now.model.family_record.shift else masked


def main() -> None:
    """Print the tables."""
    for name in call(sys.argv[1:], ("tiny-llada",)).models:
        model = loaded(name, masks=True, words=[TARGETS[-1]])
        tell(model, *PLANS.get(name, (DOSES, {})))


def tell(model: sinklens.Model, doses: tuple[float, ...], settings: dict[str, Any]) -> None:
    """Print when a model decides things, and its table."""
    ids = {f" {item}": model.encode(f" {item}", prepend_bos=False).ids[0].tolist() for item in ITEMS}
    things = {item: parts[0] for item, parts in ids.items() if len(parts) == 1}
    target = next(one for one in TARGETS if one in things)
    problems = [
        one for one in held_out(60) if one.kind in ("more", "fewer", "groups", "share") and target not in one.prompt
    ][:12]
    prompts = [one.prompt for one in problems]
    base = sinklens.generate(model, prompts, record_sinks=False, **settings)
    place = np.isin(base.tokens.numpy(), list(things.values())) & (base.unmask_step >= 0).numpy()
    print("decided at step", np.sort(base.unmask_step.numpy()[place]), "of", base.steps_run)
    share = 1 - np.median(base.unmask_step.numpy()[place]) / base.steps_run
    halves = {"matched": AtNoise(0.0, 0.5), "missed": AtNoise(0.501)}
    if share > 0.5:
        halves = {"matched": AtNoise(0.501), "missed": AtNoise(0.0, 0.5)}
    weight = model.hf.get_output_embeddings().weight.detach().float()
    direction = weight[things[target]] - weight.mean(dim=0)
    direction = direction / direction.norm()
    layer = model.cfg.n_layers - 1
    at = {"layers": [layer], "point": "hook_resid_post"}
    undecided = Predicting("masked")
    print("unchanged: target", sum(target in text for text in base.text), "right", _right(base.text, problems).sum())
    for dose in doses:
        schedules = {
            "uniform": Steer(direction, dose, where=undecided, **at),
            "uniform, twice the dose": Steer(direction, 2 * dose, where=undecided, **at),
        } | {name: Steer(direction, 2 * dose, where=half & undecided, **at) for name, half in halves.items()}
        for name, hooks in schedules.items():
            texts = sinklens.generate(model, prompts, hooks=hooks, record_sinks=False, **settings).text
            hit = [target in text for text in texts]
            right = _right(texts, problems)
            both = proportion(int((np.array(hit) & right).sum()), len(texts))
            print(dose, name, "target", sum(hit), "right", right.sum(), "both", both, repr(texts[0]))


def _right(texts: list[str], problems: list[Problem]) -> np.ndarray:
    return np.array([read_answer(text) == one.result for text, one in zip(texts, problems, strict=True)])


if __name__ == "__main__":
    main()
