"""What each tiny checkpoint is made of: one record per training run.

tiny-llada and tiny-llama are twins that differ in the objective alone. tiny-dream begins where tiny-llama ended and
tiny-mmada where tiny-llada ended. The remaining recipes change one thing of tiny-llada's first cycle, so what they are
compared with is tiny-llada's weights at the end of that cycle, ``weights-2800.pt``: the batches, the masks and the
learning rates up to there are the same.

One way this fails: `Recipe.start_from` names a shipped checkpoint, so retraining that one changes what starts from it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

Objective = Literal["masked", "shifted", "causal"]
StartToken = Literal["kept", "maskable", "absent"]


@dataclass(frozen=True)
class Recipe:
    """All that decides what a run produces.

    Attributes:
        name: folder and model name.
        objective: "masked" trains a diffusion model, "causal" its autoregressive twin; "shifted" is "masked" with the
            prediction of the token at position i read at position i − 1, as Dream does.
        seed: of the weights, the problems and every batch.
        cycles: optimizer steps of each cosine cycle of the learning rate; every cycle peaks at half the one before.
        batch: rows per step.
        problems: size of the training set; none of them is held out.
        prompt_weight: weight of the loss on prompt tokens, relative to the answer's.
        start_from: the checkpoint whose weights the run begins with, by shipped name or folder; None draws them.
        start_token: before every prompt stands a start token that is never masked ("kept"), one that is masked like
            any prompt token ("maskable"), or none ("absent").
        pictures: size of a second training set, captioned pictures (`pictures.training`); each is two rows, one per
            direction, and a step draws its rows from all of them and the problems' alike. 0 for none.
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
    pictures: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(self.cycles)

    @property
    def family(self) -> str:
        """The family, in `sinklens.checkpoints.families`, whose file format the run is saved in."""
        return {"causal": "llama", "shifted": "dream", "masked": "mmada" if self.pictures else "llada"}[self.objective]

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults, name aside: setting -> value."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in given.items() if value != DEFAULTS[name]}


DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(Recipe) if f.default is not MISSING}

_FIRST_CYCLE = (2800,)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny-llada", "masked"),
        Recipe("tiny-llama", "causal"),
        Recipe("tiny-dream", "shifted", cycles=(2000, 1000), start_from="tiny-llama", learning_rate=1e-3),
        Recipe(
            "tiny-mmada", "masked", cycles=(2000, 1000), start_from="tiny-llada", learning_rate=1e-3, pictures=150_000
        ),
        Recipe("no-start", "masked", cycles=_FIRST_CYCLE, start_token="absent"),
        Recipe("masked-start", "masked", cycles=_FIRST_CYCLE, start_token="maskable"),
        Recipe("weight-decay-0", "masked", cycles=_FIRST_CYCLE, weight_decay=0.0),
        Recipe("weight-decay-0.5", "masked", cycles=_FIRST_CYCLE, weight_decay=0.5),
        Recipe("seed-2", "masked", cycles=_FIRST_CYCLE, seed=2),
        Recipe("seed-3", "masked", cycles=_FIRST_CYCLE, seed=3),
    )
}
