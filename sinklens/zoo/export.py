"""Writes a trained tiny model as a checkpoint folder in exactly the public layout of its family.

The masked model becomes a LLaDA checkpoint (config keys, weight names), the causal one a Llama checkpoint, both in
bfloat16, so the ordinary loader reads them. generation_config.json names, under ``"sinklens"``, the lengths the model
was trained for.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklens.errors import SinklensError
from sinklens.zoo.tokenizer import train_tokenizer
from sinklens.zoo.training import ANSWER_LENGTH, Recipe, build_model

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

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
        folder: where the checkpoint goes; made if missing.

    Raises:
        SinklensError: the run has no state, or is not finished.
    """
    from safetensors.torch import save_file

    state_file = run / "state.pt"
    if not state_file.is_file():
        raise SinklensError(f"{run} has no state.pt; train first: sinklens train {recipe.name} --run {run}")
    state = torch.load(state_file, weights_only=True, map_location="cpu")
    if state["step"] < recipe.steps:
        raise SinklensError(f"{run} is at step {state['step']} of {recipe.steps}; let `sinklens train` finish it.")
    tokenizer = train_tokenizer()
    model = build_model(recipe, tokenizer)
    model.load_state_dict(state["model"])
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    masked = recipe.objective == "masked"
    if masked:
        weights = {_llada_name(name): value for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _llada_config(recipe, model.config, tokenizer) if masked else _llama_config(model.config)
    _write_json(folder / "config.json", config)
    tokenizer.save_pretrained(folder)
    lengths: dict[str, Any] = {"gen_length": ANSWER_LENGTH}
    if masked:
        lengths |= {"steps": ANSWER_LENGTH, "block_length": ANSWER_LENGTH}
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "sinklens": lengths},
    )
    return folder


def _llada_name(name: str) -> str:
    for ours, theirs in LLADA_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _llada_config(recipe: Recipe, config: "LlamaConfig", tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
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
    }


def _llama_config(config: "LlamaConfig") -> dict[str, Any]:
    kept = json.loads(config.to_json_string(use_diff=False))
    kept |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for name in ("is_causal", "_name_or_path"):
        kept.pop(name, None)
    return kept


def write_card(recipe: Recipe, run: Path, folder: Path, accuracy: str) -> Path:
    """The model card: what it is, how it was made, what it scores, what it cannot do.

    Args:
        run: the folder of `train`, whose log gives the loss curve.
        folder: the checkpoint; the card becomes its README.md.
        accuracy: measured on the held-out problems, as a sentence.
    """
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    ends = [a for a, b in zip(records, [*records[1:], {"seconds": 0.0}], strict=True) if b["seconds"] < a["seconds"]]
    minutes = sum(record["seconds"] for record in ends) / 60
    points = [r for r in records if r["step"] % 400 == 0 or r is records[-1]]
    curve = "\n".join(f"| {r['step']} | {r['loss']:.4f} |" for r in points)
    kind = "masked-diffusion (LLaDA format)" if recipe.objective == "masked" else "autoregressive (Llama format)"
    settings = "\n".join(f"- {name}: {value}" for name, value in asdict(recipe).items())
    text = f"""# {recipe.name}

A {kind} language model of 2 million parameters, trained by sinklens on word problems that it generates itself.
tiny-llada and tiny-llama are twins: same size, tokenizer, data, batches and number of steps, another objective.

Accuracy on held-out problems (exact match, greedy, one token per step): {accuracy}

Known limits: it knows these templates, whole numbers up to about 120, and nothing else. Prompts have the form
`Question: …\\nAnswer:`; answers have at most {ANSWER_LENGTH} tokens.

## Recipe (`sinklens train {recipe.name}`)
{settings}

It took {minutes:.0f} minutes of wall time on a CPU, {"" if len(ends) == 1 else f"in {len(ends)} sittings, "}beside \
other work.

| step | training loss |
|---|---|
{curve}
"""
    file = folder / "README.md"
    file.write_text(text)
    return file


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
