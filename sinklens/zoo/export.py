"""Writes a trained tiny model as a checkpoint folder in exactly the public layout of its family.

The masked model becomes a LLaDA checkpoint (config keys, weight names), or an MMaDA checkpoint if it has pictures; the
shifted model becomes a Dream checkpoint and the causal model a Llama checkpoint. All are stored in bfloat16 and read by
the ordinary loader. generation_config.json lists, under ``"sinklens"``, the lengths that the model was trained for.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SinklensError
from sinklens.evaluation.statistics import Accuracy
from sinklens.hooks import normalizers as weighing
from sinklens.zoo import pictures
from sinklens.zoo.corpus import ANSWER_LENGTH
from sinklens.zoo.recipes import Recipe
from sinklens.zoo.run_files import read_records, read_tensors
from sinklens.zoo.scores import Score
from sinklens.zoo.training import build_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

LAST_WRITTEN = "generation_config.json"  # a checkpoint that has it is complete
LLADA_NAMES = {
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "model.layers.": "model.transformer.blocks.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ff_norm.",
    ".self_attn.o_proj.": ".attn_out.",
    ".self_attn.": ".",
    ".mlp.gate_proj.": ".ff_proj.",
    ".mlp.up_proj.": ".up_proj.",
    ".mlp.down_proj.": ".ff_out.",
}


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
        raise SinklensError(f"{run} has no state.pt; train first: sinklens train {recipe.name} --run {run}")
    state = read_tensors(state_file)
    if state["step"] < recipe.steps:
        raise SinklensError(f"{run} is at step {state['step']} of {recipe.steps}; let `sinklens train` finish it.")
    return write_checkpoint(recipe, state["model"], folder)


def write_checkpoint(recipe: Recipe, weights: dict[str, Float[Tensor, "..."]], folder: Path) -> Path:
    """Write `weights`, in transformers' naming, as a checkpoint of the recipe's family.

    Args:
        weights: all weights of the model, as in state.pt or in a kept ``weights-<step>.pt``.
        folder: where to write the checkpoint; created if missing.
    """
    from safetensors.torch import save_file

    tokenizer = make_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    model.load_state_dict(weights)
    folder.mkdir(parents=True, exist_ok=True)
    masked = recipe.objective == "masked"
    stored = {
        _llada_name(name) if masked else name: value.bfloat16().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", CONFIGS[recipe.family](recipe, model.config, tokenizer))
    tokenizer.save_pretrained(folder)
    lengths = {"gen_length": ANSWER_LENGTH}
    if recipe.objective != "causal":
        lengths |= {"steps": ANSWER_LENGTH}
    if masked:
        lengths |= {"block_length": ANSWER_LENGTH}
    _write_json(
        folder / LAST_WRITTEN,
        {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "sinklens": lengths},
    )
    return folder


def _llada_name(name: str) -> str:
    for ours, theirs in LLADA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _llada_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of LLaDA-8B's config.json, with this model's sizes."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": recipe.d_model,
        "embedding_size": config.vocab_size,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": tokenizer.mask_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "max_sequence_length": recipe.context,
        "mlp_hidden_size": recipe.d_mlp,
        "mlp_ratio": 4,
        "multi_query_attention": None,
        "n_heads": recipe.n_heads,
        "n_kv_heads": recipe.n_heads,
        "n_layers": recipe.n_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_theta": config.rope_parameters["rope_theta"],
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": False,
    } | ({} if recipe.attention == "softmax" else {weighing.CONFIG_KEY: recipe.attention})


def _mmada_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of MMaDA-8B's config.json: LLaDA's and the split of the vocabulary into text and picture codes."""
    codes = len(pictures.CODE_TOKENS)
    return _llada_config(recipe, config, tokenizer) | {
        "architectures": ["MMadaModelLM"],
        "model_type": "mmada",
        "llm_vocab_size": config.vocab_size - codes,
        "new_vocab_size": config.vocab_size,
        "codebook_size": codes,
        "num_vq_tokens": pictures.SIDE**2,
        "num_new_special_tokens": 0,
    }


def _dream_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The keys of Dream-7B's config.json, with this model's sizes."""
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": recipe.d_model,
        "initializer_range": config.initializer_range,
        "intermediate_size": recipe.d_mlp,
        "mask_token_id": tokenizer.mask_token_id,
        "max_position_embeddings": recipe.context,
        "max_window_layers": recipe.n_layers,
        "num_attention_heads": recipe.n_heads,
        "num_hidden_layers": recipe.n_layers,
        "num_key_value_heads": recipe.n_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def _llama_config(recipe: Recipe, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    kept = json.loads(config.to_json_string(use_diff=False))
    kept |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for name in ("is_causal", "_name_or_path"):
        kept.pop(name, None)
    return kept


CONFIGS: dict[str, Callable[[Recipe, "PreTrainedConfig", "PreTrainedTokenizerFast"], dict[str, Any]]] = {
    "llada": _llada_config,
    "mmada": _mmada_config,
    "dream": _dream_config,
    "llama": _llama_config,
}
DESCRIPTIONS = {
    "llada": "A masked-diffusion (LLaDA format)",
    "mmada": "A masked-diffusion (MMaDA format)",
    "dream": "A masked-diffusion (Dream format, shifted prediction)",
    "llama": "An autoregressive (Llama format)",
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
        over_training: step -> `sinklens.zoo.scores.training_score` of the weights kept at that step.
    """
    records = read_records(run / "log.jsonl")
    ends = [a for a, b in zip(records, [*records[1:], {"seconds": 0.0}], strict=True) if b["seconds"] < a["seconds"]]
    minutes = sum(record["seconds"] for record in ends) / 60
    steps = {record["step"]: record for record in records}  # a resumed run repeats some steps: the later records count
    points = [steps[step] for step in sorted(steps) if step % 400 == 0 or step == max(steps)]
    rows = "\n".join(
        f"| {r['step']} | {r['loss']:.4f} | {_format_accuracy(over_training.get(r['step']))} |" for r in points
    )
    table = "\n".join(f"| {s.what} | {s.accuracy} | {s.chance:.2f} |" for s in scores)
    settings = "\n".join(f"- {name}: {value}" for name, value in asdict(recipe).items())
    text = f"""# {recipe.name}

{DESCRIPTIONS[recipe.family]} language model with 2 million parameters, trained by sinklens on \
{"word problems, small functions and exercises" if recipe.code else "word problems"} that it generates.
{_origin(recipe)}

Accuracy on held-out samples (greedy, one token per step), with 95 % intervals:

| task | accuracy | accuracy of guessing |
|---|---|---|
{table}

Limits: the model knows only these templates and the numbers of its training problems: 1 to 20 in sums and differences,
2 to 9 in products and quotients. With larger numbers the shipped models are almost always wrong
(`python -m sinklens.analyses.accuracy {recipe.name} --ranges`). Prompts have the form `Question: …\\nAnswer:`;
answers have at most {ANSWER_LENGTH} tokens.{_other_prompts(recipe)}{_picture_prompts(recipe)}

## Recipe (`sinklens train {recipe.name}`)
{settings}

Training took {minutes:.0f} minutes of wall time on a CPU{"" if len(ends) == 1 else f" in {len(ends)} sessions"}, \
alongside other work.

| step | training loss | held-out word problems right, with 95 % interval |
|---|---|---|
{rows}
"""
    file = folder / "README.md"
    file.write_text(text)
    return file


def _format_accuracy(record: Mapping[str, int | float] | None) -> str:
    return "" if record is None else str(Accuracy(int(record["right"]), int(record["total"])))


def _other_prompts(recipe: Recipe) -> str:
    if not recipe.code:
        return ""
    return " Functions have the form of\n`sinklens.tasks.tiny_code`, exercises those of `sinklens.tasks.skills`."


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
        return f"It differs from tiny-llada in {', '.join(f'{name} = {value}' for name, value in changes.items())}."
    return (
        "tiny-llada and tiny-llama are twins with the same size, tokenizer, data, batches and number of steps but "
        "different objectives."
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
