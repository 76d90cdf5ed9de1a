"""The checkpoint families: one declarative record each.

For example, LLaDA is Llama without the causal mask, MMaDA is LLaDA with a larger vocabulary, Dream (and Dream-Coder,
DiffuCoder) is Qwen2 without the causal mask, with logits that predict the *next* position, LLaDA-MoE is Qwen3-MoE
without the causal mask, and DiffusionGemma is a class of transformers. A family record therefore says how to translate
its config to a transformers config, how its weights are named and packed, and how to sample from it. Code that ships
with a checkpoint never runs. `register` adds families from outside the package.

Limitation: a config value that the translation cannot express raises an error that names it; see `Family.required`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sinklens.families.config_keys import (
    BLOCK_DIFFUSION,
    DIT_FUSED,
    DIT_IGNORED,
    DIT_NEEDED,
    DIT_RENAMES,
    GEMMA_SETTINGS,
    GIDD_NEEDED,
    GPT2_IGNORED,
    GPT2_RENAMES,
    LLADA2_NEEDED,
    LLADA2_RENAMES,
    LLADA2_REQUIRED,
    LLADA_CONFIG,
    LLADA_DEFAULTS,
    LLADA_MOE_NEEDED,
    LLADA_MOE_REQUIRED,
    LLADA_RENAMES,
    LLADA_REQUIRED,
    MASKED_DIFFUSION,
    NEMOTRON_NEEDED,
    NEMOTRON_RENAMES,
    NEMOTRON_REQUIRED,
    QWEN_REQUIRED,
    RND1_NEEDED,
    RND1_REQUIRED,
    ROTATION,
    SEDD_NEEDED,
    SEDD_REQUIRED,
    Required,
)
from sinklens.hooks.attention.blocks import Start


@dataclass(frozen=True)
class Family:
    """How checkpoints of one kind are recognized, translated, loaded and sampled.

    Attributes:
        name: short name, as in `Model.family`.
        model_types: values of ``model_type`` in config.json that identify this family.
        classes: values of ``architectures`` in config.json that identify this family, whatever ``model_type`` says.
        own_classes: values of ``architectures`` that this family's checkpoints have; with another one, `sinklens.load`
            needs ``family=``. If empty, every value is accepted.
        architecture: transformers ``model_type`` of the class that the checkpoint is loaded into.
        sampler: name of the sampler that generates with it, in `sampling.SAMPLERS`.
        causal: whether queries see only earlier keys.
        block_causal: whether queries see only their own block and earlier ones.
        block_length: positions per block; None if the config or the argument of `sinklens.load` says it.
        block_length_key: config key that gives the block length.
        blocks_start: where blocks are counted from, see `hooks.blocks.Blocks`.
        dropped: config keys of training or of the checkpoint's own code, which transformers would obey.
        regime: for a family that shares its ``model_type`` with others: how it was trained. `sinklens.load` then needs
            ``family=`` or ``block_length=``.
        shift: whether the logits at position i predict the token at i + 1.
        config_names: the family's config key -> transformers' key. If empty, config.json already uses transformers'
            keys, which are kept. Otherwise it is read like LLaDA's: every key listed here is required except
            ``weight_tying``; one of them maps to ``rope_theta``; ``mlp_hidden_size``, ``n_kv_heads`` and ``vocab_size``
            are derived from ``mlp_ratio``, ``n_heads`` and ``embedding_size`` as in LLaDA; of the other keys, only
            special-token ids, ``initializer_range`` and ``attention_dropout`` are kept.
        convert: ``"module:function"`` that turns config.json into transformers' settings, for families whose config is
            more than renamed keys; `needed` lists the keys that it reads.
        needed: keys that config.json must have.
        fused: name of a stored weight -> the weights that it holds one after another along its first axis, both below
            the module that owns them.
        ignored: regular expression of stored names that are recomputed, such as rotary tables; they are not loaded.
        required: config key -> values that can be expressed; a missing key is accepted, unless `defaults` has it. A dot
            leads into a part of the config, as in ``text_config.use_bidirectional_attention``.
        defaults: config key -> the value that the published code uses if config.json lacks the key.
        renames: regular expression -> replacement, applied to weight names in order; at most one group.
        mask_token_id: used if neither the config nor the tokenizer names one.
        mask_is_last: then the last id of the vocabulary is used.
        eot_token_id: end-of-turn token, for the option that keeps it from being committed early.
        verified: how far agreement with the reference code was checked.
        model_class: transformers' auto class that builds the model.
        module: the module that defines the class, and registers it with transformers; "" for a class of transformers.
        class_attention: name of the attention if transformers' class decides which of its passes are causal; "" if
            `causal` decides.
        drawn: whether its samplers draw by the numbers at ``denoise.hook_uniform``.
        unconditional: whether it also generates without a prompt: an empty text, or a row without ids.
        masked: whether undecided positions hold a mask token; False for a canvas of random tokens.
        config_settings: config key -> sampler setting that it is the default of.
        generation_settings: key of generation_config.json -> sampler setting that it is the default of; a dot leads
            into a part.
        rows_of: name of the embedding's weight, after `renames`, if config.json may name fewer tokens than it has rows.
        refused_tokens: config key of a token id -> what the token stands for; prompts that contain it are refused.
        bound: how the likelihood of a diffusion model is bounded, see sinklens/experiments/nll: "masks", "subs",
            "score entropy", "uniform" or "mixture"; "" if no bound is published.
        modes: for a model whose attention changes from pass to pass: ``mode=`` of a run -> the sampler that decodes so.
            Its passes see all tokens unless they name a mode.
        adapter: folder of an adapter below the checkpoint's, which draft passes use; "" if the family has none.
    """

    name: str
    model_types: tuple[str, ...]
    architecture: str
    sampler: str
    verified: str
    causal: bool = False
    shift: bool = False
    config_names: Mapping[str, str] = field(default_factory=dict)
    required: Required = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    mask_token_id: int | None = None
    eot_token_id: int | None = None
    block_causal: bool = False
    block_length: int | None = None
    block_length_key: str = ""
    blocks_start: Start = "token"
    dropped: tuple[str, ...] = ()
    regime: str = ""
    classes: tuple[str, ...] = ()
    own_classes: tuple[str, ...] = ()
    defaults: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    convert: str = ""
    needed: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: str = ""
    mask_is_last: bool = False
    model_class: str = "AutoModelForCausalLM"
    module: str = ""
    class_attention: str = ""
    rows_of: str = ""
    drawn: bool = False
    unconditional: bool = False
    masked: bool = True
    config_settings: Mapping[str, str] = field(default_factory=dict)
    generation_settings: Mapping[str, str] = field(default_factory=dict)
    refused_tokens: Mapping[str, str] = field(default_factory=dict)
    bound: str = "masks"
    modes: Mapping[str, str] = field(default_factory=dict)
    adapter: str = ""

    @property
    def stock(self) -> bool:
        """Whether its checkpoints have the ``model_type`` of transformers' own class."""
        return self.architecture in self.model_types

    @property
    def attention(self) -> str:
        """What it was trained with: "causal", "block-causal", "bidirectional", "per-pass" or `class_attention`."""
        if self.class_attention:
            return self.class_attention
        if self.modes:
            return "per-pass"
        return "causal" if self.causal else "block-causal" if self.block_causal else "bidirectional"


_DIT = Family(  # what the families of dit.py share
    "",
    (),
    "adaln_dit",
    "",
    "logits, patterns, stream and modulations equal the reference code's on tiny weights; full size built, not run",
    convert="sinklens.families.conversions:dit",
    renames=DIT_RENAMES,
    ignored=DIT_IGNORED,
    fused=DIT_FUSED,
    module="sinklens.families.dit",
    drawn=True,
    unconditional=True,
)
FAMILIES: list[Family] = [
    Family(
        "llada",
        ("llada",),
        "llama",
        "llada",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        config_names=LLADA_CONFIG,
        required=LLADA_REQUIRED,
        renames=LLADA_RENAMES,
        mask_token_id=126336,
        eot_token_id=126348,
        own_classes=("LLaDAModelLM",),
        defaults=LLADA_DEFAULTS,
    ),
    Family(
        "mmada",
        ("mmada",),
        "llama",
        "llada",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        config_names=LLADA_CONFIG,
        required=LLADA_REQUIRED,
        renames=LLADA_RENAMES,
        mask_token_id=126336,
        eot_token_id=126348,
        own_classes=("MMadaModelLM",),
        defaults=LLADA_DEFAULTS,
    ),
    Family(
        "dream",
        ("Dream", "dream"),
        "qwen2",
        "dream",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        shift=True,
        required=QWEN_REQUIRED,
        mask_token_id=151666,
        own_classes=("DreamModel",),
    ),
    Family(
        "sdar",
        ("sdar",),
        "qwen3",
        "sdar",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        mask_token_id=151669,
        block_causal=True,
        block_length_key="block_size",
        dropped=("attn_implementation", "use_cache"),
        own_classes=("SDARForCausalLM",),
    ),
    Family(
        "sdar-moe",
        ("sdar_moe",),
        "qwen3_moe",
        "sdar",
        "logits, patterns, routing and greedy canvases equal the reference's on tiny weights; full size built, not run",
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        block_causal=True,
        block_length=4,
        own_classes=("SDARMoeForCausalLM",),
    ),
    Family(
        "fast-dllm-v2",
        ("Fast_dLLM_Qwen",),
        "qwen2",
        "fast-dllm-v2",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        shift=True,
        required=QWEN_REQUIRED,
        mask_token_id=151665,
        block_causal=True,
        block_length_key="bd_size",
        own_classes=("Fast_dLLM_QwenForCausalLM",),
    ),
    Family(
        "llada-moe",
        ("lladamoe",),
        "qwen3_moe",
        "llada",
        "logits, patterns, routing and greedy canvases equal the reference's on tiny weights; full size built, not run",
        required=LLADA_MOE_REQUIRED,
        mask_token_id=156895,
        classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        own_classes=("LLaDAMoEModelLM", "LLaDAMoEModel"),
        convert="sinklens.families.conversions:llada_moe",
        needed=LLADA_MOE_NEEDED,
    ),
    Family(
        "llada2",
        ("llada2_moe",),
        "glm4_moe",
        "llada2",
        "logits, patterns, routing and greedy canvases of 2.0 and 2.1 equal the reference's on tiny weights; full size "
        "built, not run",
        required=LLADA2_REQUIRED,
        renames=LLADA2_RENAMES,
        mask_token_id=156895,
        block_causal=True,
        block_length=32,
        convert="sinklens.families.conversions:llada2",
        needed=LLADA2_NEEDED,
        fused={"query_key_value.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")},
        own_classes=("LLaDA2MoeModelLM",),
        defaults={"partial_rotary_factor": 0.5},
    ),
    Family(
        "rnd1",
        ("rnd1",),
        "qwen3_moe",
        "rnd1",
        "logits, patterns, routing and greedy canvases equal the reference's on tiny weights; full size built, not run",
        shift=True,
        required=RND1_REQUIRED,
        mask_token_id=151669,
        convert="sinklens.families.conversions:rnd1",
        needed=RND1_NEEDED,
        own_classes=("RND1LM",),
    ),
    Family(
        "open-dcoder",
        (),
        "qwen2",
        "open-dcoder",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        shift=True,
        required=QWEN_REQUIRED,
        dropped=("trust_remote_code",),
    ),
    Family(
        "a2d-llama",
        ("a2d-llama",),
        "llama",
        "llada",
        "architecture equals transformers' Llama without the causal mask; no reference outputs compared",
        required=ROTATION,
        regime=MASKED_DIFFUSION,
        own_classes=("A2DLlamaLMHeadModel",),
    ),
    Family(
        "bd3lm-llama",
        ("a2d-llama",),
        "llama",
        "bd3lm",
        "architecture equals transformers' Llama with the block-causal mask; no reference outputs compared",
        required={**ROTATION, "rope_scaling": (None,)},
        block_causal=True,
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DLlamaLMHeadModel",),
    ),
    Family(
        "a2d-qwen2",
        ("a2d-qwen2",),
        "qwen2",
        "llada",
        "architecture equals transformers' Qwen2 without the causal mask; no reference outputs compared",
        required={**ROTATION, "use_sliding_window": (False,)},
        regime=MASKED_DIFFUSION,
        own_classes=("A2DQwen2LMHeadModel",),
    ),
    Family(
        "bd3lm-qwen2",
        ("a2d-qwen2",),
        "qwen2",
        "bd3lm",
        "architecture equals transformers' Qwen2 with the block-causal mask; no reference outputs compared",
        required=QWEN_REQUIRED,
        block_causal=True,
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DQwen2LMHeadModel",),
    ),
    Family(
        "a2d-qwen3",
        ("a2d-qwen3",),
        "qwen3",
        "llada",
        "architecture equals transformers' Qwen3 without the causal mask; no reference outputs compared",
        required={**ROTATION, "use_sliding_window": (False,)},
        regime=MASKED_DIFFUSION,
        own_classes=("A2DQwen3LMHeadModel",),
    ),
    Family(
        "bd3lm-qwen3",
        ("a2d-qwen3",),
        "qwen3",
        "bd3lm",
        "logits, patterns and greedy canvases equal the reference code's on tiny weights; full size built, not run",
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        block_causal=True,
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DQwen3LMHeadModel",),
    ),
    Family(
        "llama",
        ("llama",),
        "llama",
        "autoregressive",
        "logits equal transformers' own on tiny weights; Llama-3.1-8B built at full size, not run",
        causal=True,
        required=ROTATION,
        own_classes=("LlamaForCausalLM",),
    ),
    Family(
        "qwen2",
        ("qwen2",),
        "qwen2",
        "autoregressive",
        "logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen2ForCausalLM",),
    ),
    Family(
        "qwen3",
        ("qwen3",),
        "qwen3",
        "autoregressive",
        "logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen3ForCausalLM",),
    ),
    Family(
        "qwen3-moe",
        ("qwen3_moe",),
        "qwen3_moe",
        "autoregressive",
        "logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen3MoeForCausalLM",),
    ),
    Family(
        "gpt2",
        ("gpt2",),
        "gpt2",
        "autoregressive",
        "logits equal transformers' own on tiny weights; GPT-2 small built at full size, not run",
        causal=True,
        required={"add_cross_attention": (False,)},
        renames=GPT2_RENAMES,
        ignored=GPT2_IGNORED,
        own_classes=("GPT2LMHeadModel",),
    ),
    Family(
        "diffullama",
        (),
        "llama",
        "diffullama",
        "logits, patterns, stream and canvases equal the reference code's on tiny weights; full size built, not run",
        shift=True,
        required=ROTATION,
        mask_token_id=811,
        drawn=True,
        unconditional=True,
    ),
    Family(
        "diffugpt",
        (),
        "gpt2",
        "diffullama",
        "logits, patterns, stream and canvases equal the reference code's on tiny weights; full size built, not run",
        shift=True,
        required={"add_cross_attention": (False,)},
        renames=GPT2_RENAMES,
        ignored=GPT2_IGNORED,
        rows_of="transformer.wte.weight",
        drawn=True,
        unconditional=True,
    ),
    Family(
        "diffusion-gemma",
        ("diffusion_gemma",),
        "diffusion_gemma",
        "diffusion-gemma",
        "logits equal transformers' own on tiny weights; text only; full size built, not run",
        model_class="AutoModelForMultimodalLM",
        class_attention="encoder-decoder",
        masked=False,
        required={"text_config.use_bidirectional_attention": ("vision", None)},
        config_settings={"canvas_length": "canvas_length"},
        generation_settings=GEMMA_SETTINGS,
        refused_tokens={"image_token_id": "image"},
        bound="",
        own_classes=("DiffusionGemmaForBlockDiffusion",),
    ),
    Family(
        "nemotron-diffusion",
        ("nemotron_labs_diffusion",),
        "ministral3",
        "nemotron-diffusion",
        "logits, patterns, greedy canvases, drafts and accepted lengths equal the authors' samplers on a reconstructed "
        "backbone with tiny weights; text only; full size built, not run",
        required=NEMOTRON_REQUIRED,
        renames=NEMOTRON_RENAMES,
        mask_token_id=100,
        own_classes=("NemotronLabsDiffusionModel",),
        convert="sinklens.families.conversions:nemotron_diffusion",
        needed=NEMOTRON_NEEDED,
        config_settings={"block_size": "block_length"},
        modes={
            "autoregressive": "autoregressive",
            "diffusion": "nemotron-diffusion",
            "speculation": "linear-speculation",
        },
        adapter="linear_spec_lora",
    ),
    replace(
        _DIT,
        name="mdlm",
        bound="subs",
        model_types=("mdlm",),
        sampler="mdlm",
        needed=(*DIT_NEEDED, "time_conditioning"),
        mask_is_last=True,
        own_classes=("MDLM",),
    ),
    replace(
        _DIT,
        name="bd3lm-owt",
        bound="subs",
        model_types=("bd3lm",),
        sampler="bd3lm-owt",
        needed=(*DIT_NEEDED, "time_conditioning"),
        required={"adaln": (True,), "cross_attn": (True,), "causal": (False,)},
        mask_is_last=True,
        block_causal=True,
        block_length_key="block_size",
        blocks_start="column",
        unconditional=False,  # its text begins with the start token
        own_classes=("BD3LM",),
    ),
    replace(
        _DIT,
        name="duo",
        bound="uniform",
        model_types=("duo",),
        sampler="duo",
        needed=DIT_NEEDED,
        required={"causal": (False,)},
        masked=False,
        own_classes=("DUO",),
    ),
    replace(
        _DIT,
        name="sedd",
        bound="score entropy",
        sampler="sedd",
        convert="sinklens.families.conversions:sedd",
        needed=SEDD_NEEDED,
        required=SEDD_REQUIRED,
        mask_is_last=True,
    ),
    replace(
        _DIT,
        name="gidd",
        bound="mixture",
        model_types=("dit",),
        sampler="gidd",
        convert="sinklens.families.conversions:gidd",
        needed=GIDD_NEEDED,
        own_classes=("DIT",),
    ),
]
