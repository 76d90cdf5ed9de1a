"""What each tiny checkpoint is made of: one record per training run.

tiny-llada and tiny-llama are twins that differ in the objective alone, and know word problems alone. Their recipes with
``-skills`` go on from where they ended with small functions and the four skills beside the problems, so these
checkpoints answer every generated task. tiny-dream begins where tiny-llama ended and tiny-mmada where tiny-llada ended.
The remaining recipes change one thing of tiny-llada's
first cycle, so what they are compared with is tiny-llada's weights at the end of that cycle, ``weights-2800.pt``: the
batches, the masks and the learning rates up to there are the same.

One way this fails: `Recipe.start_from` names a shipped checkpoint, so retraining that one changes what starts from it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

Objective = Literal["masked", "shifted", "causal"]
StartToken = Literal["kept", "maskable", "absent"]
Attention = Literal["softmax", "sigmoid", "off-by-one"]


@dataclass(frozen=True)
class Recipe:
    """All that decides what a run produces.

    Attributes:
        name: folder and model name.
        objective: "masked" trains a diffusion model, "causal" its autoregressive twin; "shifted" is "masked" with the
            prediction of the token at position i read at position i − 1, as Dream does.
        seed: of the weights, the problems and every batch.
        cycles: optimizer steps of each cosine cycle of the learning rate.
        peaks: the greatest learning rate of each cycle, as a share of `learning_rate`; () for 1, 1/2, 1/4 and so on.
        batch: rows per step.
        problems: size of the training set; none of them is held out.
        prompt_weight: weight of the loss on prompt tokens, relative to the answer's.
        start_from: the checkpoint whose weights the run begins with, by shipped name or folder; None draws them.
        start_token: before every prompt stands a start token that is never masked ("kept"), one that is masked like
            any prompt token ("maskable"), or none ("absent").
        attention: how scores become attention weights, a name in `sinklens.hooks.normalizers`.
        pictures: size of a second training set, captioned pictures (`pictures.training`); each is two rows, one per
            direction, and a step draws its rows from all of them and the problems' alike. 0 for none.
        code: size of a training set of small functions (`tiny_code.training`). 0 for none.
        skills: size of the training set of each skill (`skills.training`). 0 for none.
        problems_first: in this many cycles, the first ones, a step draws from the problems alone; afterwards from all
            rows alike, pictures, functions and skills included.
    """

    name: str
    objective: Objective
    seed: int = 1
    cycles: tuple[int, ...] = (2800, 1400)
    batch: int = 128
    problems: int = 300_000
    learning_rate: float = 2e-3
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.1
    prompt_weight: float = 0.3
    d_model: int = 192
    n_layers: int = 4
    n_heads: int = 6
    d_mlp: int = 512
    context: int = 128
    start_from: str | None = None
    start_token: StartToken = "kept"
    attention: Attention = "softmax"
    pictures: int = 0
    code: int = 0
    skills: int = 0
    problems_first: int = 0
    peaks: tuple[float, ...] = ()

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(self.cycles)

    @property
    def family(self) -> str:
        """The family, in `sinklens.checkpoints.families`, whose file format the run is saved in."""
        return {"causal": "llama", "shifted": "dream", "masked": "mmada" if self.pictures else "llada"}[self.objective]

    def cycle(self, step: int) -> int:
        """The number of the cycle that `step` belongs to, from 0; the last for all later steps."""
        ends = [sum(self.cycles[: number + 1]) for number in range(len(self.cycles) - 1)]
        return sum(step >= end for end in ends)

    def peak(self, cycle: int) -> float:
        """The greatest learning rate of a cycle."""
        return self.learning_rate * (self.peaks[cycle] if self.peaks else 0.5**cycle)

    def until(self, step: int) -> "Recipe":
        """What the first `step` steps depend on: the cycles up to there, and the data that these draw from.

        Two runs are the same up to a step if this is the same for both, so one may go on from the state of the other.
        """
        count = self.cycle(max(0, step - 1)) + 1
        halved = tuple(0.5**number for number in range(count))
        kept = replace(
            self, cycles=self.cycles[:count], peaks=() if self.peaks[:count] == halved else self.peaks[:count]
        )
        mixed = count > self.problems_first
        return kept if mixed else replace(kept, pictures=0, code=0, skills=0, problems_first=0)

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults, name aside: setting -> value."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in given.items() if value != DEFAULTS[name]}


DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Recipe) if f.default is not MISSING}

_FIRST_CYCLE = (2800,)
_SKILLS: dict[str, Any] = {
    "cycles": (2800, 1400, 1800, 2400, 2400),
    "peaks": (1.0, 0.5, 0.5, 0.5, 0.5),
    "code": 250_000,
    "skills": 110_000,
    "problems_first": 2,
}
_FIRST_FOUR: dict[str, Any] = {"cycles": _SKILLS["cycles"][:4], "peaks": _SKILLS["peaks"][:4]}


def _of_seed(seed: int) -> tuple[Recipe, ...]:
    """tiny-llada, tiny-llama and tiny-dream, trained completely from another seed; the last starts from the second."""
    causal = Recipe(f"tiny-llama-seed-{seed}", "causal", seed=seed)
    start = f"runs/{causal.name}/checkpoint"
    return (
        Recipe(f"tiny-llada-seed-{seed}", "masked", seed=seed),
        causal,
        Recipe(f"tiny-dream-seed-{seed}", "shifted", seed=seed, cycles=(2000,), start_from=start, learning_rate=1e-3),
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny-llada", "masked"),
        Recipe("tiny-llama", "causal"),
        Recipe("tiny-llada-skills", "masked", **_SKILLS),
        Recipe("tiny-llama-skills", "causal", **_SKILLS | _FIRST_FOUR),
        Recipe("tiny-dream", "shifted", cycles=(2000,), start_from="tiny-llama", learning_rate=1e-3),
        Recipe(
            "tiny-mmada",
            "masked",
            cycles=(2000, 4000),
            peaks=(1.0, 1.0),
            start_from="tiny-llada",
            learning_rate=1e-3,
            pictures=150_000,
        ),
        Recipe("no-start", "masked", cycles=_FIRST_CYCLE, start_token="absent"),
        Recipe("masked-start", "masked", cycles=_FIRST_CYCLE, start_token="maskable"),
        Recipe("weight-decay-0", "masked", cycles=_FIRST_CYCLE, weight_decay=0.0),
        Recipe("weight-decay-0.5", "masked", cycles=_FIRST_CYCLE, weight_decay=0.5),
        Recipe("sigmoid", "masked", cycles=_FIRST_CYCLE, attention="sigmoid"),
        Recipe("off-by-one", "masked", cycles=_FIRST_CYCLE, attention="off-by-one"),
        Recipe("seed-2", "masked", cycles=_FIRST_CYCLE, seed=2),
        Recipe("seed-3", "masked", cycles=_FIRST_CYCLE, seed=3),
        *(recipe for seed in (2, 3) for recipe in _of_seed(seed)),
    )
}
