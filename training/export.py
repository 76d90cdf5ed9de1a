"""Writes a trained tiny model as a checkpoint folder in exactly the public layout of its family.

formats.py defines the layouts. All are stored in bfloat16 and read by the ordinary loader. generation_config.json gives
the lengths that the model was trained for, under ``"sinklens"`` where its family has no keys for them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SinklensError
from sinklens.families import family_named
from sinklens.utils.atomic import atomic_write
from sinklens.utils.estimates import proportion
from sinklens.utils.folders import require_writable
from training import pictures
from training.corpus import ANSWER_LENGTH
from training.formats import FORMATS, public_weights
from training.loop import build_model, make_tokenizer
from training.recipes import Recipe
from training.run_files import read_records, read_tensors
from training.scores import Score

LAST_WRITTEN = "generation_config.json"  # a checkpoint that has it is complete


def export(recipe: Recipe, run: Path, folder: Path) -> Path:
    """Write the weights of a finished run as a checkpoint.

    Args:
        run: the folder of `train`, with its state.pt.
        folder: where to write the checkpoint; created if missing.

    Raises:
        SinklensError: the run has no state, its state is truncated or corrupt, or it is not finished.
    """
    state_file = run / "state.pt"
    if not state_file.is_file():
        raise SinklensError(f"{run} has no state.pt; train first: python -m training {recipe.name} --run {run}")
    state = read_tensors(state_file)
    if state["step"] < recipe.steps:
        raise SinklensError(f"{run} is at step {state['step']} of {recipe.steps}; let `python -m training` finish it.")
    return write_checkpoint(recipe, state["model"], folder)


def write_checkpoint(recipe: Recipe, weights: dict[str, Float[Tensor, "..."]], folder: Path) -> Path:
    """Write `weights`, in transformers' naming, as a checkpoint of the recipe's family.

    Args:
        weights: all weights of the model, as in state.pt or in a kept ``weights-<step>.pt``.
        folder: where to write the checkpoint; created if missing.

    Raises:
        SinklensError: the folder cannot be written.
    """
    from safetensors.torch import save

    require_writable(folder)
    tokenizer = make_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    model.load_state_dict(weights)
    folder.mkdir(parents=True, exist_ok=True)
    layout = FORMATS[recipe.family]
    weights = public_weights(model, family_named(recipe.family))
    stored = {name: value.bfloat16().contiguous() for name, value in weights.items()}
    with atomic_write(folder / "model.safetensors") as part:
        part.write_bytes(save(stored, metadata={"format": "pt"}))
    _write_json(folder / "config.json", layout.config(recipe, model.config, tokenizer))
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    _write_json(folder / LAST_WRITTEN, ends | layout.generation(recipe, tokenizer))
    return folder


def write_untrained(recipe: Recipe, folder: Path) -> Path:
    """Write a recipe's model with random weights, to try a format that has no trained checkpoint.

    Its tokenizer is made from at most 500 problems, and nothing is taken from the model that the recipe starts from.
    """
    small = replace(recipe, start_from=None, problems=min(recipe.problems, 500))
    return write_checkpoint(small, build_model(small, make_tokenizer(small)).state_dict(), folder)


DESCRIPTIONS = {
    "llada": "A masked-diffusion (LLaDA format)",
    "mmada": "A masked-diffusion (MMaDA format)",
    "llada-moe": "A masked-diffusion mixture-of-experts (LLaDA-MoE format)",
    "dream": "A masked-diffusion (Dream format, shifted prediction)",
    "sdar": "A block-causal masked-diffusion (SDAR format)",
    "nemotron-diffusion": "An autoregressive and block-diffusion (Nemotron-Labs-Diffusion format)",
    "diffusion-gemma": "A diffusion (DiffusionGemma format: uniform noise instead of a mask token, self-conditioning)",
    "mdlm": "A masked-diffusion (MDLM format, without a noise level)",
    "duo": "A diffusion (Duo format: uniform noise instead of a mask token; it reads the noise level)",
    "llama": "An autoregressive (Llama format)",
}
PARAMETERS = {"llada-moe": "3.8 million parameters, of which a token uses 1.6 million"}
HOW = {
    "diffusion-gemma": "tokens drawn at random with seed 0, accepted by their entropy, in at most 24 steps",
    "mdlm": "tokens drawn at random with seed 0, in 24 steps",
    "duo": "tokens drawn at random with seed 0, in 24 steps and a greedy closing one",
}


def write_card(
    recipe: Recipe,
    run: Path,
    folder: Path,
    scores: Sequence[Score],
    over_training: Mapping[int, Mapping[str, int | float]],
) -> Path:
    """Write the model card: description, recipe, scores and limits of the model.

    Args:
        run: the folder of `train`, whose log provides the loss curve.
        folder: the checkpoint; the card becomes its README.md.
        scores: measured on held-out samples.
        over_training: step -> `training.scores.training_score` of the weights kept at that step.
    """
    table = "\n".join(f"| {s.what} | {s.accuracy} | {s.chance:.2f} |" for s in scores)
    rights = {step: str(proportion(int(one["right"]), int(one["total"]))) for step, one in over_training.items()}
    return _write(
        folder,
        f"""# {recipe.name}

{DESCRIPTIONS[recipe.family]} language model with {PARAMETERS.get(recipe.family, "2 million parameters")}, trained \
by sinklens on \
{"word problems, small functions and exercises" if recipe.code else "word problems"} that it generates.
{_origin(recipe)}

Accuracy on held-out samples ({HOW.get(recipe.family, "greedy, one token per step")}), with 95 % intervals:

| task | accuracy | accuracy of guessing |
|---|---|---|
{table}

Limits: the model knows only these templates and the numbers of its training problems: 1 to 20 in sums and differences,
2 to 9 in products and quotients. With larger numbers the shipped models are almost always wrong
(`python -m sinklens.analyses.accuracy {recipe.name}`). Prompts have the form `Question: …\\nAnswer:`;
answers have at most {ANSWER_LENGTH} tokens.{_other_prompts(recipe)}{_picture_prompts(recipe)}

{_training(recipe, run, "held-out word problems right", rights)}""",
    )


def write_text_card(
    recipe: Recipe, run: Path, folder: Path, over_training: Mapping[int, Mapping[str, int | float]]
) -> Path:
    """Write the card of a model of English text.

    Args:
        run, folder: see `write_card`.
        over_training: step -> the fields of `training.text_scores.score_checkpoint` at that step.
    """
    scores = {step: f"{one['nats']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for step, one in over_training.items()}
    last = over_training[max(over_training)]
    tokens = recipe.steps * recipe.batch * recipe.windows / 1e6
    exact = "exact" if recipe.objective == "causal" else "an estimate of the bound of Nie et al., 2502.09992, Eq. 6"
    return _write(
        folder,
        f"""# {recipe.name}

{DESCRIPTIONS[recipe.family]} language model with 3.3 million parameters, trained by sinklens on {tokens:.1f} million \
tokens of English:
free documentation, dictionaries and books from Debian's packages, which `python -m training.text` gathers.
tiny-text and tiny-text-causal are twins with the same network, tokenizer, initial weights, data and batches but \
different objectives.

Loss on {last["documents"]} documents of five sources that it was not trained on: {scores[max(scores)]} nats per token \
({exact}; 95 % interval over documents).

Limits: the model is far too small to write meaningful text, and it answers no questions. It is meant for studies of
attention in text (`sinklens analyse texts`).

{_training(recipe, run, "held-out loss, nats per token", scores)}""",
    )


def _training(recipe: Recipe, run: Path, measure: str, measured: Mapping[int, str]) -> str:
    """The sections of a card on the settings and the course of the run."""
    records = read_records(run / "log.jsonl")
    ends = [a for a, b in zip(records, [*records[1:], {"seconds": 0.0}], strict=True) if b["seconds"] < a["seconds"]]
    minutes = sum(record["seconds"] for record in ends) / 60
    steps = {record["step"]: record for record in records}  # a resumed run repeats some steps: the later records count
    points = [steps[step] for step in sorted(steps) if step % 400 == 0 or step == max(steps)]
    rows = "\n".join(f"| {r['step']} | {r['loss']:.4f} | {measured.get(int(r['step']), '')} |" for r in points)
    settings = "\n".join(f"- {name}: {value}" for name, value in asdict(recipe).items())
    return f"""## Recipe (`python -m training {recipe.name}`)
{settings}

Training took {minutes:.0f} minutes of wall time on a CPU{"" if len(ends) == 1 else f" in {len(ends)} sessions"}, \
alongside other work.

| step | training loss | {measure}, with 95 % interval |
|---|---|---|
{rows}
"""


def _write(folder: Path, text: str) -> Path:
    file = folder / "README.md"
    with atomic_write(file) as part:
        part.write_text(text)
    return file


def _other_prompts(recipe: Recipe) -> str:
    if not recipe.code:
        return ""
    return " Functions have the form of\n`sinklens.tasks.tiny_code`, exercises those of\n`training.skills`."


def _picture_prompts(recipe: Recipe) -> str:
    if not recipe.pictures:
        return ""
    return (
        f" Pictures are {pictures.SIDE} × {pictures.SIDE} cells of {len(pictures.COLOURS)} colours, drawn after\n"
        f"`{pictures.T2I} red square at 2 3 on white{pictures.IMAGE_START}` and described after "
        f"`{pictures.MMU}{pictures.IMAGE_START}…{pictures.IMAGE_END}`."
    )


def _origin(recipe: Recipe) -> str:
    """How the model is related to the others."""
    if recipe.start_from is not None:
        more = " and, in both directions, on captioned pictures that sinklens generates" if recipe.pictures else ""
        return f"It started from the weights of {recipe.start_from} and was trained further on the same problems{more}."
    if recipe.problems_first:
        first = sum(recipe.cycles[: recipe.problems_first])
        return (
            "tiny-llada-skills and tiny-llama-skills are twins with the same size, tokenizer, data and batches but "
            "different objectives;\ntiny-llama-skills stopped at the end of an earlier cycle.\n"
            f"The first {first} steps use only word problems and are the steps of "
            f"{recipe.name.removesuffix('-skills')}; the other {recipe.steps - first} draw uniformly from "
            f"{recipe.problems} problems, {recipe.code} functions and {recipe.skills} exercises of each skill."
        )
    if changes := recipe.changes():
        named = {} if recipe.objective == "masked" else {"objective": recipe.objective}
        listed = ", ".join(f"{name} = {value}" for name, value in (named | changes).items())
        twins = (
            "tiny-mdlm and tiny-duo are twins with the same network, initial weights, data and batches, whose noise is "
            "at the same\npositions: a mask, or a random token. "
        )
        return f"{twins if recipe.d_cond else ''}It differs from tiny-llada in {listed}."
    return (
        "tiny-llada and tiny-llama are twins with the same size, tokenizer, data, batches and number of steps but "
        "different objectives."
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with atomic_write(file) as part:
        part.write_text(json.dumps(content, indent=1) + "\n")
