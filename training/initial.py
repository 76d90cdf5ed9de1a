"""The models that the recipes train, at step 0: their sizes, and the weights of the checkpoint that they start from.

All families get the recipe's width, depth and heads, with as many key-value heads as query heads; `_SIZES` adds what a
family's config needs besides. MDLM and Duo have MLPs of four times the width. DiffusionGemma's class also has a vision
tower, which text never reaches: it gets the smallest one that transformers can build, and its weights keep their
initial values.

`fit_norms` is for a model that starts from a causal one without norms of queries and keys, as tiny-sdar does. A norm
removes the length of a query, which the other weights count on; with weights of one, the model computes something else
than the model it starts from.

Pitfall: a weight that the starting checkpoint lacks keeps its initial value, so `_is_new` lists which may be missing.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.families import family_named
from sinklens.families.registry import named_family
from sinklens.hooks.attention import normalizers as weighing
from sinklens.model import files
from training.corpus import Corpus
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WINDOW = 32  # a sliding layer sees every prompt of the training rows, but not arbitrarily long ones
FIT_STEPS = 60
_NORMS = ("q_norm.weight", "k_norm.weight")


def additive(sees: Bool[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query key"]:
    """0 where a query sees a key, else -inf; transformers' eager attention would add a boolean mask as 0 and 1."""
    return torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)


def build_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """The initial model of the recipe, with the attention of its family."""
    import transformers

    from sinklens.hooks.attention import attention

    family = family_named(recipe.family)
    if family.module:
        import_module(family.module)
    torch.manual_seed(recipe.seed)
    config = transformers.CONFIG_MAPPING[family.architecture](**_settings(recipe, tokenizer))
    implementation = "sdpa"
    if recipe.attention != "softmax":
        implementation = attention.NAME
        setattr(config, weighing.CONFIG_KEY, recipe.attention)
    builder = getattr(transformers, family.model_class)
    model: PreTrainedModel = builder.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    if not family.class_attention:
        model.config.is_causal = family.causal
        for layer in model.model.layers:
            layer.self_attn.is_causal = family.causal
    if recipe.start_from is not None:
        _start_from(recipe.start_from, model)
    return model


def _settings(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """The arguments of the transformers config."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.d_model,
        "intermediate_size": recipe.d_mlp,
        "num_hidden_layers": recipe.n_layers,
        "num_attention_heads": recipe.n_heads,
        "num_key_value_heads": recipe.n_heads,
        "max_position_embeddings": recipe.context,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return _SIZES.get(recipe.family, _as_they_are)(recipe, common)


def _as_they_are(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    return common


def _with_head_size(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    return common | {"head_dim": recipe.d_model // recipe.n_heads}


def _with_query_scale(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    """Ministral3's sizes for Nemotron-Labs-Diffusion: within the context, the network is Llama's.

    YaRN with factor 1 is the plain rotation, and queries are scaled only beyond the context.
    """
    rotation = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 1.0,
        "original_max_position_embeddings": recipe.context,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return _with_head_size(recipe, common) | {"rms_norm_eps": 1e-6, "rope_parameters": rotation}


def _with_experts(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-MoE's sizes for LLaDA-MoE: all layers are mixtures, and the chosen weights are not divided by their sum."""
    return _with_head_size(recipe, common) | {
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "moe_intermediate_size": recipe.d_expert,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _with_encoder(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    """DiffusionGemma's sizes: sliding layers and a last full one, all with heads of one size."""
    heads = recipe.d_model // recipe.n_heads
    text = common | {
        "head_dim": heads,
        "global_head_dim": heads,
        "num_global_key_value_heads": recipe.n_heads,
        "num_experts": recipe.experts,
        "top_k_experts": recipe.experts_per_token,
        "moe_intermediate_size": recipe.d_expert,
        "layer_types": ["sliding_attention"] * (recipe.n_layers - 1) + ["full_attention"],
        "sliding_window": WINDOW,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
    }
    tokens = {"boi_token_id": None, "eoi_token_id": None, "image_token_id": None}
    return {"text_config": text, "vision_config": VISION, "canvas_length": recipe.block_length, **tokens}


def _with_noise_level(recipe: Recipe, common: dict[str, Any]) -> dict[str, Any]:
    """The sizes of MDLM's and Duo's network, whose MLP is always four times as wide as the stream."""
    sizes = {name: value for name, value in common.items() if name != "intermediate_size"}
    return sizes | {"cond_dim": recipe.d_cond, "time_conditioning": recipe.objective == "duo"}


VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "position_embedding_size": 8,
}
_SIZES: Mapping[str, Callable[[Recipe, dict[str, Any]], dict[str, Any]]] = {
    "sdar": _with_head_size,
    "llada-moe": _with_experts,
    "diffusion-gemma": _with_encoder,
    "mdlm": _with_noise_level,
    "duo": _with_noise_level,
    "nemotron-diffusion": _with_query_scale,
}


@torch.no_grad()
def _start_from(name: str, model: "PreTrainedModel") -> None:
    """Copy the weights of a checkpoint into `model`.

    Weights that the checkpoint lacks keep their initial values: the biases of Qwen2, which Llama lacks and which are
    initialized to zero, the norms of Qwen3's queries and keys, which are initialized to one (`fit_norms` improves on
    that), and the embeddings and head of tokens beyond the checkpoint's vocabulary.

    Raises:
        ValueError: the checkpoint has weights that `model` lacks, weights of another size, or lacks other weights.
    """
    from safetensors.torch import load_file

    folder = files.find_checkpoint(name, None)
    family = named_family(files.read_config(folder), str(folder))
    stored = {
        files.rename(key, family.renames): value for key, value in load_file(folder / "model.safetensors").items()
    }
    target = model.state_dict()
    unexpected = sorted(set(stored) - set(target))
    missing = sorted(key for key in set(target) - set(stored) if not _is_new(key))
    misfits = [
        key
        for key in set(target) & set(stored)
        if target[key].shape[1:] != stored[key].shape[1:]
        or len(target[key]) < len(stored[key])
        or (len(target[key]) > len(stored[key]) and not key.startswith(("model.embed_tokens.", "lm_head.")))
    ]
    if unexpected or missing or misfits:
        wrong = ", ".join([*unexpected, *missing, *sorted(misfits)][:4])
        raise ValueError(
            f"the weights of {name} do not fit this model: {wrong} differ; start from a checkpoint of the same sizes."
        )
    for key, value in stored.items():
        target[key][: len(value)] = value.float()


def _is_new(key: str) -> bool:
    return key.endswith(("_proj.bias", *_NORMS))


def fit_norms(
    model: "PreTrainedModel", recipe: Recipe, tokenizer: "PreTrainedTokenizerFast", corpus: Corpus
) -> float | None:
    """Fit the norms of queries and keys so that `model`, under a causal mask, predicts what it starts from predicts.

    `FIT_STEPS` steps of Adam on these norms alone minimize the divergence between both models' next-token distributions
    on training rows. Only for the objective "blocks" with a checkpoint to start from.

    Returns:
        KL(start ‖ model) in nats per token in the last step; None if there is nothing to fit.
    """
    if recipe.objective != "blocks" or recipe.start_from is None:
        return None
    start = build_model(replace(recipe, objective="causal"), tokenizer).to(model.device)
    norms = [weight for name, weight in model.named_parameters() if name.endswith(_NORMS)]
    optimizer = torch.optim.Adam(norms, lr=0.05)
    divergence = torch.zeros(())
    for step in range(FIT_STEPS):
        _, rows = corpus.batch(recipe.seed, 800_000_001 + step, 16, problems_only=True)
        rows = rows.to(model.device)
        causal = additive(torch.ones(1, 1, rows.shape[1], rows.shape[1], dtype=torch.bool).tril()).to(model.device)
        with torch.no_grad():
            wanted = start(input_ids=rows, use_cache=False).logits.log_softmax(dim=-1)
        found = model(input_ids=rows, attention_mask=causal, use_cache=False).logits.log_softmax(dim=-1)
        divergence = F.kl_div(found, wanted, reduction="none", log_target=True).sum(dim=-1).mean()
        gradients = torch.autograd.grad(divergence, norms)
        for weight, gradient in zip(norms, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return divergence.item()
