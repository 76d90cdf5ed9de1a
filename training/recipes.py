"""The training recipes of the tiny checkpoints: one record per run.

tiny-llada and tiny-llama are twins: they differ only in the objective and are trained only on word problems. The
``-skills`` recipes continue from the end of these with small functions and the four skills in addition to the problems,
so their checkpoints answer every generated task. tiny-dream and tiny-sdar start from tiny-llama, and tiny-mmada from
tiny-llada. tiny-two-modes starts from tiny-llama, and one network keeps decoding from left to right while it learns to
fill blocks. tiny-llada-moe has experts, tiny-canvas has noise instead of a mask token, and tiny-mdlm and tiny-duo are
twins with the network of the families MDLM and Duo, which differ only in their noise; all four start from scratch. The
``-seed-`` recipes repeat tiny-llada, tiny-llama, tiny-dream, tiny-mmada and tiny-two-modes with another seed. The
``tiny-text`` recipes are twins, masked and causal, trained on English text (text.py) instead of problems. Each
remaining recipe changes one setting of tiny-llada's first cycle. Compare it with tiny-llada's weights at the end of
that cycle, ``weights-2800.pt``: batches, masks and learning rates are the same up to there.

Pitfall: `Recipe.start_from` names a checkpoint, so retraining that checkpoint changes the recipes that start from it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

Objective = Literal["masked", "shifted", "causal", "blocks", "uniform", "modes", "mdlm", "duo"]
StartToken = Literal["kept", "maskable", "absent"]
Attention = Literal["softmax", "sigmoid", "off-by-one"]
Setting = str | int | float | tuple[int, ...] | tuple[float, ...] | None


@dataclass(frozen=True)
class Recipe:
    """All settings that determine the result of a run.

    Attributes:
        name: name of the folder and the model.
        objective: "masked" trains a diffusion model, "causal" its autoregressive twin; "shifted" is "masked" with the
            prediction of the token at position i read at position i − 1, as in Dream; "blocks" trains a block-causal
            diffusion model, as SDAR (block_loss.py); "uniform" replaces tokens by random ones instead of a mask, in
            DiffusionGemma's format (canvas_loss.py); "modes" trains one network for next tokens and for masked blocks,
            in Nemotron-Labs-Diffusion's format (mode_loss.py); "mdlm" and "duo" train the network of these families,
            with masks and with random tokens, on answers alone (noise_losses.py).
        seed: seed of the weights, the data and every batch.
        cycles: optimizer steps of each cosine cycle of the learning rate.
        peaks: peak learning rate of each cycle, as a fraction of `learning_rate`; () means 1, 1/2, 1/4 and so on.
        batch: rows per step.
        problems: size of the training set of word problems; held-out problems are excluded.
        prompt_weight: weight of the loss on prompt tokens, relative to answer tokens.
        start_from: checkpoint that provides the initial weights, by shipped name or folder; None draws them randomly.
        start_token: whether prompts begin with a start token that is never masked ("kept"), with one that is masked
            like any prompt token ("maskable"), or with none ("absent").
        attention: the attention normalizer, a name in `sinklens.hooks.attention.normalizers`.
        pictures: size of a second training set, captioned pictures (`pictures.training`). Each makes two rows, one per
            direction, and steps draw from these and the problems in proportion to their numbers. 0 means none.
        code: size of a training set of small functions (`tiny_code.training`). 0 means none.
        skills: size of the training set of each skill (`skills.training`). 0 means none.
        problems_first: number of initial cycles whose steps draw only from the problems. Later steps draw from all
            rows, including pictures, functions and skills.
        block_length: positions per block of "blocks" and "modes", and per canvas of "uniform".
        d_cond: width of the vector that "mdlm" and "duo" make from the noise level.
        experts: experts per layer; 0 for a dense MLP. "uniform" has both in every layer.
        experts_per_token: how many of them a token uses.
        d_expert: hidden size of an expert.
        balance_weight: weight of the load-balancing loss of "masked" models with experts (Switch Transformers,
            2101.03961), which counts the tokens of all layers together.
        windows: tokens per row of English text (text_windows.py), which replaces the word problems. 0 means none.
        vocabulary: size of the tokenizer of English text; 0 for the tokenizer of the word problems.
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
    block_length: int = 0
    d_cond: int = 0
    experts: int = 0
    experts_per_token: int = 0
    d_expert: int = 0
    balance_weight: float = 0.0
    windows: int = 0
    vocabulary: int = 0

    @property
    def steps(self) -> int:
        """Total number of optimizer steps."""
        return sum(self.cycles)

    @property
    def family(self) -> str:
        """The family, in `sinklens.families.base`, in whose file format the run is saved."""
        masked = "llada-moe" if self.experts else "mmada" if self.pictures else "llada"
        named = {"causal": "llama", "shifted": "dream", "blocks": "sdar", "uniform": "diffusion-gemma"}
        named |= {"modes": "nemotron-diffusion", "mdlm": "mdlm", "duo": "duo"}
        return {**named, "masked": masked}[self.objective]

    def cycle(self, step: int) -> int:
        """The index of the cycle that contains `step`; for steps after the end, that of the last cycle."""
        ends = [sum(self.cycles[: number + 1]) for number in range(len(self.cycles) - 1)]
        return sum(step >= end for end in ends)

    def peak(self, cycle: int) -> float:
        """The peak learning rate of a cycle."""
        return self.learning_rate * (self.peaks[cycle] if self.peaks else 0.5**cycle)

    def until(self, step: int) -> "Recipe":
        """The part of the recipe that the first `step` steps depend on: their cycles, and the data these draw from.

        Two runs are equal up to a step if this is equal for both, so one can resume from the state of the other.
        """
        count = self.cycle(max(0, step - 1)) + 1
        halved = tuple(0.5**number for number in range(count))
        kept = replace(
            self, cycles=self.cycles[:count], peaks=() if self.peaks[:count] == halved else self.peaks[:count]
        )
        mixed = count > self.problems_first
        return kept if mixed else replace(kept, pictures=0, code=0, skills=0, problems_first=0)

    def changes(self) -> dict[str, Setting]:
        """Settings that differ from the defaults, except the name: setting -> value."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.default is not MISSING}
        return {name: value for name, value in given.items() if value != DEFAULTS[name]}


DEFAULTS: Mapping[str, Setting] = {f.name: f.default for f in fields(Recipe) if f.default is not MISSING}

_FIRST_CYCLE = (2800,)
_SKILLS: dict[str, Any] = {
    "cycles": (2800, 1400, 1800, 2400, 2400),
    "peaks": (1.0, 0.5, 0.5, 0.5, 0.5),
    "code": 250_000,
    "skills": 110_000,
    "problems_first": 2,
}
_DREAM: dict[str, Any] = {"cycles": (2000,), "learning_rate": 1e-3}
_MMADA: dict[str, Any] = {"cycles": (2000, 4000), "peaks": (1.0, 1.0), "learning_rate": 1e-3, "pictures": 150_000}
_NOISE_LEVELS: dict[str, Any] = {"cycles": (3600, 1800), "batch": 64, "d_mlp": 768, "d_cond": 32}
_FIRST_FOUR: dict[str, Any] = {"cycles": _SKILLS["cycles"][:4], "peaks": _SKILLS["peaks"][:4]}


def _of_seed(seed: int) -> tuple[Recipe, ...]:
    """tiny-llada, tiny-llama, and tiny-dream and tiny-mmada, which start from them, with another seed."""
    masked, causal = (
        Recipe(f"tiny-llada-seed-{seed}", "masked", seed=seed),
        Recipe(f"tiny-llama-seed-{seed}", "causal", seed=seed),
    )
    return (
        masked,
        causal,
        Recipe(f"tiny-dream-seed-{seed}", "shifted", seed=seed, start_from=f"runs/{causal.name}/checkpoint", **_DREAM),
        Recipe(f"tiny-mmada-seed-{seed}", "masked", seed=seed, start_from=f"runs/{masked.name}/checkpoint", **_MMADA),
    )


def _two_modes(seed: int) -> Recipe:
    """One network that decodes from left to right and by diffusion, which starts from the causal one of its seed."""
    ending, start = ("", "tiny-llama") if seed == 1 else (f"-seed-{seed}", f"runs/tiny-llama-seed-{seed}/checkpoint")
    return Recipe(
        f"tiny-two-modes{ending}",
        "modes",
        seed=seed,
        start_from=start,
        block_length=8,
        cycles=(800,),
        learning_rate=1e-3,
    )


_TEXT: dict[str, Any] = {
    "cycles": (1200,),
    "batch": 64,
    "problems": 0,
    "prompt_weight": 1.0,
    "windows": 128,
    "vocabulary": 4096,
}


def _text_pair(seed: int) -> tuple[Recipe, Recipe]:
    """A masked and a causal model of English with the same network, data order and initial weights."""
    ending = "" if seed == 1 else f"-seed-{seed}"
    return (
        Recipe(f"tiny-text{ending}", "masked", seed=seed, **_TEXT),
        Recipe(f"tiny-text-causal{ending}", "causal", seed=seed, **_TEXT),
    )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("tiny-llada", "masked"),
        Recipe("tiny-llama", "causal"),
        Recipe("tiny-llada-skills", "masked", **_SKILLS),
        Recipe("tiny-llama-skills", "causal", **_SKILLS | _FIRST_FOUR),
        Recipe("tiny-dream", "shifted", start_from="tiny-llama", **_DREAM),
        Recipe("tiny-mmada", "masked", start_from="tiny-llada", **_MMADA),
        Recipe("tiny-sdar", "blocks", cycles=(800,), start_from="tiny-llama", learning_rate=1e-3, block_length=8),
        Recipe(
            "tiny-llada-moe",
            "masked",
            cycles=(3300,),
            experts=8,
            experts_per_token=2,
            d_expert=160,
            balance_weight=0.01,
        ),
        Recipe(
            "tiny-canvas",
            "uniform",
            cycles=(5000,),
            batch=64,
            d_mlp=192,
            block_length=24,
            experts=8,
            experts_per_token=2,
            d_expert=32,
        ),
        Recipe("tiny-mdlm", "mdlm", **_NOISE_LEVELS),
        Recipe("tiny-duo", "duo", **_NOISE_LEVELS),
        *(_two_modes(seed) for seed in (1, 2, 3)),
        Recipe("no-start", "masked", cycles=_FIRST_CYCLE, start_token="absent"),
        Recipe("masked-start", "masked", cycles=_FIRST_CYCLE, start_token="maskable"),
        Recipe("weight-decay-0", "masked", cycles=_FIRST_CYCLE, weight_decay=0.0),
        Recipe("weight-decay-0.5", "masked", cycles=_FIRST_CYCLE, weight_decay=0.5),
        Recipe("sigmoid", "masked", cycles=_FIRST_CYCLE, attention="sigmoid"),
        Recipe("off-by-one", "masked", cycles=_FIRST_CYCLE, attention="off-by-one"),
        Recipe("seed-2", "masked", cycles=_FIRST_CYCLE, seed=2),
        Recipe("seed-3", "masked", cycles=_FIRST_CYCLE, seed=3),
        *(recipe for seed in (2, 3) for recipe in _of_seed(seed)),
        *(recipe for seed in (1, 2, 3) for recipe in _text_pair(seed)),
    )
}
