"""The checkpoint families: one declarative record each.

For example, LLaDA is Llama without the causal mask, MMaDA is LLaDA with a larger vocabulary, Dream (and Dream-Coder,
DiffuCoder) is Qwen2 without the causal mask, with logits that predict the *next* position, LLaDA-MoE is Qwen3-MoE
without the causal mask, and DiffusionGemma is a class of transformers. A family record therefore says how to translate
its config to a transformers config, how its weights are named and packed, and how to sample from it. Code that ships
with a checkpoint never runs. `register` adds families from outside the package.

Limitation: a config value that the translation cannot express raises an error that names it; see `Family.required`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sinklens.hooks.attention.blocks import Start
from sinklens.hooks.attention.normalizers import CONFIG_KEY

FAMILY_KEY = "sinklens_family"
"""Key of config.json that names the family of a checkpoint whose ``model_type`` several families share."""
Required = Mapping[str, tuple[str | int | list[int] | None, ...]]
"""Keys that a published class of the family reads, and the values at which it computes the same as our class."""
VERIFIED = "logits, patterns and greedy canvases equal the reference code's on tiny weights"
VERIFIED_WITH_ROUTING = VERIFIED.replace("patterns", "patterns, routing")
THETA = ("rope_theta",)
ROTATION: Required = {"partial_rotary_factor": (1, None)}
QWEN_REQUIRED: Required = {
    **ROTATION,
    "hidden_act": ("silu",),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
_SAME = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range", "attention_dropout",
    CONFIG_KEY,
)  # fmt: skip


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
        sampler: name of the sampler that generates with it, in `families.SAMPLERS`.
        causal: whether queries see only earlier keys.
        block_causal: whether queries see only their own block and earlier ones.
        block_length: positions per block; None if the config or the argument of `sinklens.load` gives it.
        block_length_key: config key that gives the block length.
        blocks_start: where blocks are counted from; see `hooks.attention.blocks.Blocks`.
        dropped: config keys of training or of the checkpoint's own code, which transformers would obey.
        regime: for a family that shares its ``model_type`` with others: how it was trained. `sinklens.load` then needs
            ``family=`` or ``block_length=``.
        shift: whether the logits at position i predict the token at i + 1.
        convert: makes transformers' settings of the parsed config.json, with `defaults` filled in; None if config.json
            already uses transformers' keys, which are kept. A key that it does not read is dropped.
        needed: keys that config.json must have (for ``"a or b"``, one of the two): those that `convert` reads, and
            those that every published checkpoint sets to a value other than the published class's default.
        fused: name of a stored weight -> the weights that it holds one after another along its first axis; names are
            relative to the module that owns the weights.
        ignored: regular expression of stored names that are recomputed, such as rotary tables; they are not loaded.
        foreign: regular expression of beginnings of stored names that belong to another family, and are refused.
        required: config key that a published class reads -> values that can be expressed; a missing key is accepted,
            unless `defaults` has it. A dot separates nested keys, as in ``text_config.use_bidirectional_attention``.
        defaults: config key -> the value that the published code uses if config.json lacks the key.
        renames: regular expression -> replacement, applied to weight names in order; at most one group.
        mask_token_id: used if neither the config nor the tokenizer names one.
        mask_is_last: whether the last id of the vocabulary is used instead in this case.
        eot_token_id: end-of-turn token, for the option that keeps it from being committed early.
        verified: how far agreement with the reference code was checked.
        checkpoints: names of the published checkpoints.
        parameters: their numbers of parameters, as far as their models were built at full size, without weights.
        model_class: transformers' auto class that builds the model.
        module: the module that defines the class, and registers it with transformers; "" for a class of transformers.
        class_attention: name of the attention if transformers' class decides which of its passes are causal; "" if
            `causal` decides.
        drawn: whether its samplers draw by the numbers at ``denoise.hook_uniform``.
        unconditional: whether it also generates without a prompt: an empty text, or a row without ids.
        masked: whether undecided positions hold a mask token; False for a canvas of random tokens.
        config_settings: config key -> the sampler setting whose default it gives.
        generation_settings: key of generation_config.json -> the sampler setting whose default it gives; a dot
            separates nested keys.
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
    convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    needed: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: str = ""
    foreign: str = ""
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
    checkpoints: str = ""
    parameters: tuple[int, ...] = ()

    @property
    def stock(self) -> bool:
        """Whether its checkpoints have the ``model_type`` of transformers' own class."""
        return self.architecture in self.model_types

    @property
    def attention(self) -> str:
        """What it was trained with: "causal", "block-causal", "bidirectional", "per-pass" or `class_attention`."""
        usual = "causal" if self.causal else "block-causal" if self.block_causal else "bidirectional"
        return self.class_attention or ("per-pass" if self.modes else usual)

    @property
    def recognized(self) -> str:
        """What identifies its checkpoints: keys of config.json, or what `sinklens.load` is given."""
        config = {"model_type": self.model_types, "architectures": self.classes}
        keys = " or ".join(f"{key} {', '.join(names)}" for key, names in config.items() if names)
        return (keys or f'family="{self.name}"') + " with family= or block_length=" * bool(self.regime)


def kept(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that mean the same in transformers; tokens that the config does not name are set to None.

    The classes' own defaults of these tokens refer to another vocabulary.
    """
    return {key: config[key] for key in _SAME if key in config} | {
        key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }


def rotation(config: dict[str, Any]) -> dict[str, Any]:
    """transformers' ``rope_parameters`` of a plain rotation."""
    return {"rope_type": "default", "rope_theta": float(config["rope_theta"])}
