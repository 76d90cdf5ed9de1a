"""LLaDA, MMaDA and LLaDA-MoE: Llama or Qwen3-MoE without the causal mask.

LLaDA-MoE has LLaDA's ``model_type``; ``architectures`` distinguishes the two. Its published config.json was not
available: the number of parameters follows from the sizes that third parties report, and agrees with the published 7.36
billion. As in the published code, the weights of its experts are not divided by their sum, whatever ``norm_topk_prob``
says. No key of the config gives the mask token; it is the tokenizer's mask token, or 156895 if the tokenizer has none.
A shared expert, expert bias, clipping and partial rotation, which no published checkpoint uses, are refused.

LLaDA's sampler: blocks from left to right; the least confident proposals stay masked.

Within a block, every step proposes a token at each masked position and commits the next share of them, the most
confident first. If the proposal is the mask token itself, the position stays masked, as in the reference code.

Under a cache policy, a step decides only positions that it computes. A row's block ends when none of the block's
positions is masked; masks left in earlier blocks are decided only in steps that compute them, as in Fast-dLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import VERIFIED, VERIFIED_WITH_ROUTING, Family, Required, kept, rotation
from sinklens.sampling import decisions
from sinklens.sampling.parts import EqualBlocks, Guided, StopAtEnd
from sinklens.sampling.state import State
from sinklens.utils.arguments import NonNegative, Share

CONFIG = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "rms_norm_eps": "rms_norm_eps",
    "max_sequence_length": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
}
NEEDED = (
    "d_model", "n_heads", "n_kv_heads or n_heads", "n_layers", "mlp_hidden_size or mlp_ratio", "rms_norm_eps",
    "rope_theta", "max_sequence_length", "embedding_size or vocab_size",
)  # fmt: skip
LLADA_REQUIRED: Required = {
    "alibi": (False,),
    "rope": (True,),
    "block_type": ("llama",),
    "block_group_size": (1,),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "bias_for_layer_norm": (False, None),
    "multi_query_attention": (None,),
    "rope_full_precision": (True,),
    "scale_logits": (False,),
    "clip_qkv": (None,),
    "rope_scaling": (None,),
}
LLADA_DEFAULTS: dict[str, str | int | float | bool] = {
    "rope": False,
    "block_type": "sequential",
    "activation_type": "swiglu",
    "layer_norm_type": "default",
    "weight_tying": True,
}
LLADA_FOREIGN = r"model\.(embed_tokens|layers|norm)\.|lm_head\."
LLADA_RENAMES = {
    r"^model\.transformer\.wte\.": "model.embed_tokens.",
    r"^model\.transformer\.ln_f\.": "model.norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.([qkv]_proj)\.": r".self_attn.\1.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
}


@dataclass(frozen=True)
class LladaSettings(StopAtEnd, Guided, EqualBlocks):
    """LLaDA's sampler (Nie et al., 2502.09992, and its reference code).

    Attributes:
        threshold: also commit every proposal of at least this confidence, which can end a block early; None turns it
            off. Not allowed with "random", which has no confidences to compare.
        factor: commit by Fast-dLLM's factor rule instead of the schedule: of the proposals by falling confidence, rank
            r = 1, 2, … must have at least 1 − factor / (r + 1), and the first rank always passes; None turns it off.
        by_quota: commit at least the step's share of the block. False commits the most confident proposal and what
            `threshold` or `factor` adds; masks may then be left when the block's steps are used up, as in Fast-dLLM.
        logits_eos_inf: never propose an end-of-sequence token.
        confidence_eos_eot_inf: treat end-of-sequence and end-of-turn proposals as having no confidence. The reference
            code does so at temperature 0; above it, only for end-of-turn.
    """

    name: ClassVar = "llada"
    threshold: Share | None = None
    factor: NonNegative | None = None
    by_quota: bool = True
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False

    @property
    def leaves_masks(self) -> bool:
        return not self.by_quota

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.steps <= self.gen_length,
            f"steps {self.steps} is more than gen_length {self.gen_length}: each step commits at least one token.",
        )
        require(
            self.remasking != "random" or self.threshold is None,
            "remasking 'random' does not use confidences; leave threshold out or choose remasking 'low_confidence'.",
        )
        require(
            self.factor is None or (self.threshold is None and self.remasking == "low_confidence"),
            "factor replaces threshold and needs confidences; leave threshold and remasking out.",
        )
        require(
            self.by_quota or self.threshold is not None or self.factor is not None,
            "by_quota=False commits by threshold or factor alone; set one of them.",
        )
        require(
            not (self.stop_at_eos and self.logits_eos_inf),
            "logits_eos_inf never proposes the token that stop_at_eos waits for; choose one of them.",
        )

    def denoise(self, state: State) -> Iterator[None]:
        if self.stop_at_eos:
            state.require_end_tokens()
        for start in range(state.prompt_length, state.prompt_length + self.gen_length, self.block_length):
            end = start + self.block_length
            masked = state.canvas[:, start:end] == state.mask_id
            for number, counts in enumerate(decisions.even_schedule(masked.sum(dim=1), self.steps_per_block)):
                first = start if number and state.keys is not None else 0
                if not bool((state.canvas[:, first:end] == state.mask_id).any()):
                    break
                yield
                self._step(state, slice(start, end), counts if self.by_quota else [1] * len(counts), first)

    def _step(self, state: State, block: slice, counts: list[int], first: int) -> None:
        canvas = state.begin_step(block)
        where = canvas == state.mask_id
        where[:, block.stop :] = False
        # alone, rows with nothing left in the block would be in their next one
        where &= state.computed() & where[:, first:].any(dim=1, keepdim=True)
        logits = state.logits(canvas, where, self.cfg_scale)
        if self.logits_eos_inf:
            logits[:, list(state.eos_ids)] = -torch.inf
        proposed, confidence = self.propose(state, canvas, where, logits)
        if self.factor is None:
            chosen = decisions.most_confident(confidence, counts, self.threshold, state.computed())
        else:
            chosen = decisions.by_rank(confidence, self.factor, state.computed())
        state.commit(chosen, proposed, fill=self.stop_at_eos, best_by=confidence)

    def confidence(
        self, state: State, logits: Float[Tensor, "masked vocab"], candidates: Int[Tensor, " masked"]
    ) -> Float[Tensor, " masked"]:
        """Probability of the proposed token; without that of end tokens under `confidence_eos_eot_inf`."""
        if self.confidence_eos_eot_inf:
            ended = [*state.eos_ids, *([] if state.eot_id is None else [state.eot_id])]
            logits = logits.clone()
            logits[:, ended] = -torch.inf
        return super().confidence(state, logits, candidates)


def llada(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA's config keys under transformers' names, with the sizes that LLaDA derives."""
    return {
        **kept(config),
        **{new: config[old] for old, new in CONFIG.items() if old in config},
        "intermediate_size": config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        "num_key_value_heads": config.get("n_kv_heads") or config["n_heads"],
        "hidden_act": "silu",
        "rope_parameters": rotation(config),
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
    }


def llada_moe(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA-MoE's config as Qwen3-MoE's.

    The weights of the chosen experts are never divided by their sum, whatever ``norm_topk_prob`` says: the published
    code does not read it. A layer has a dense MLP where ``moe_layer_freq`` is 0.
    """
    frequency = config.get("moe_layer_freq", 1)
    layers = config["num_hidden_layers"]
    every = [1] * layers if frequency == 1 else frequency
    require(
        isinstance(every, list) and len(every) == layers and all(sparse in (0, 1) for sparse in every),
        f"moe_layer_freq = {frequency!r} must be 1, or list 0 or 1 for each of {layers} layers",
        ValueError,
    )
    return {
        **kept(config),
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        "moe_intermediate_size": config["expert_intermediate_size"],
        "intermediate_size": config["dense_intermediate_size"],
        "num_experts": config["num_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "norm_topk_prob": False,
        "mlp_only_layers": [layer for layer, sparse in enumerate(every) if not sparse],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "rope_parameters": rotation(config),
    }


FAMILIES = (
    Family(
        name="llada",
        model_types=("llada",),
        architecture="llama",
        sampler="llada",
        verified=VERIFIED,
        convert=llada,
        needed=NEEDED,
        required=LLADA_REQUIRED,
        renames=LLADA_RENAMES,
        foreign=LLADA_FOREIGN,
        mask_token_id=126336,
        eot_token_id=126348,
        own_classes=("LLaDAModelLM",),
        defaults=LLADA_DEFAULTS,
        checkpoints="LLaDA-8B-Base/Instruct, LLaDA-1.5",
        parameters=(8_015_581_184,),
    ),
    Family(
        name="mmada",
        model_types=("mmada",),
        architecture="llama",
        sampler="llada",
        verified=VERIFIED,
        convert=llada,
        needed=NEEDED,
        required=LLADA_REQUIRED,
        renames=LLADA_RENAMES,
        foreign=LLADA_FOREIGN,
        mask_token_id=126336,
        eot_token_id=126348,
        own_classes=("MMadaModelLM",),
        defaults=LLADA_DEFAULTS,
        checkpoints="MMaDA-8B",
        parameters=(8_082_690_048,),
    ),
    Family(
        name="llada-moe",
        model_types=("lladamoe",),
        architecture="qwen3_moe",
        sampler="llada",
        verified=VERIFIED_WITH_ROUTING,
        required={
            "hidden_act": ("silu",),
            "rope_scaling": (None,),
            "partial_rotary_factor": (1, None),
            "shared_expert_intermediate_size": (None,),
            "moe_router_enable_expert_bias": (False,),
            "clip_qkv": (None,),
            "qk_layernorm": (True,),
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "moe_router_score_function": ("softmax", None),
            "routed_scaling_factor": (1,),
            "router_num_group": (None,),
            "router_topk_group": (None,),
        },
        defaults={"qk_layernorm": False},
        mask_token_id=156895,
        classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        own_classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        convert=llada_moe,
        needed=(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "rope_theta",
            "rms_norm_eps",
            "max_position_embeddings",
            "num_experts",
            "num_experts_per_tok",
            "expert_intermediate_size",
            "dense_intermediate_size",
        ),
        checkpoints="LLaDA-MoE-7B-A1B-Base/Instruct",
        parameters=(7_356_880_896,),
    ),
)
SAMPLERS = (LladaSettings,)
