"""Translates a checkpoint's config.json into the transformers config that it is loaded with.

The family's record defines the translation: keys are renamed, and a value that cannot be expressed raises an error that
names it. Keys that neither the record nor transformers knows (training settings, initialization) do not affect the
forward pass and are dropped.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from transformers import PreTrainedConfig

from sinklens.errors import CheckpointError, nearest, require
from sinklens.families.base import FAMILY_KEY, Family
from sinklens.hooks.attention import normalizers as weighing
from sinklens.utils.progress import transformers_output

POSITIVE = {
    "rope_theta": 500000.0, "rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5, "final_logit_softcapping": 30.0,
    "routed_scaling_factor": 2.5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
"""Keys that must be numbers above 0, and an example of each."""
REPEATED = ("num_hidden_layers", "n_layers", "n_blocks", "n_layer", "num_experts", "num_experts_per_tok")
COUNTS = (
    *REPEATED, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "moe_intermediate_size", "decoder_sparse_step", "n_group",
    "topk_group", "d_model", "n_heads", "n_kv_heads", "mlp_hidden_size", "max_sequence_length", "embedding_size",
    "expert_intermediate_size", "dense_intermediate_size", "hidden_dim", "cond_dim", "model_length", "length",
    "timestep_cond_dim", "max_seq_len", "n_embd", "n_head", "n_positions", "n_inner", "tokens", "global_head_dim",
    "num_global_key_value_heads", "top_k_experts", "sliding_window", "mlp_ratio", "block_size", "bd_size",
    "canvas_length", "original_max_position_embeddings",
)  # fmt: skip
"""Keys that must be whole numbers above 0, or null."""
UNBUILDABLE = (AttributeError, ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers' classes raise for values that they do not expect."""


def translate(config: dict[str, Any], family: Family, file: str) -> "PreTrainedConfig":
    """The transformers config for `config`, the parsed config.json of a checkpoint at `file`.

    The result has the family's ``is_causal`` and no ``auto_map``.

    Raises:
        CheckpointError: a value cannot be expressed, or a required key is missing.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    config = one_spelling(config, file)
    check_required(config, family, file)
    config.pop("quantization_config", None)  # of the weights, not of what they compute: see quantization.py
    if family.module:
        import_module(family.module)
    parts = {"text_config", "llm_config", "language_config"} - set(CONFIG_MAPPING[family.architecture].sub_configs)
    others = sorted(key for key in parts if config.get(key) is not None)
    require(
        not others,
        f"{file}: config.json has {', '.join(others)}, so it describes a model of several parts, such as images and "
        f"text; sinklens reads {family.name} models of text alone. Load the checkpoint of the text model.",
        CheckpointError,
    )
    try:
        with transformers_output():
            made = CONFIG_MAPPING[family.architecture](**_settings({**family.defaults, **config}, family, file))
    except CheckpointError:
        raise
    except (StrictDataclassError, *UNBUILDABLE) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{file}: config.json does not describe a {family.architecture} model: {reason.rstrip('.')}. "
            f"{shape_of(config, family)}"
        ) from error
    made.is_causal = None if family.class_attention else family.causal
    _check_defaults(config, made, family, file)
    _check_layers(made, family, file)
    chosen, experts = getattr(made, "num_experts_per_tok", None), getattr(made, "num_local_experts", None)
    groups, allowed = getattr(made, "n_group", None) or 1, getattr(made, "topk_group", None) or 1
    fits = chosen is None or experts is None or chosen <= allowed * (experts // groups)
    require(
        fits and not (experts or 0) % groups and allowed <= groups,
        f"{file}: config.json has num_experts_per_tok = {chosen} of num_experts = {experts} in topk_group = "
        f"{allowed} of n_group = {groups} groups, which is impossible.",
        CheckpointError,
    )
    return made


def one_spelling(config: dict[str, Any], where: str) -> dict[str, Any]:
    """`config` with the keys of the rotation at the top level, where transformers 4 writes them.

    transformers 5 writes ``rope_parameters``, which holds ``rope_theta``, ``partial_rotary_factor`` and the entries of
    ``rope_scaling``. A dictionary per layer type stays as it is.

    Raises:
        CheckpointError: a key has one value at the top level and another one in ``rope_parameters``.
    """
    moved = config.get("rope_parameters")
    if not isinstance(moved, dict) or any(isinstance(value, dict) for value in moved.values()):
        moved = {}
    kept = ("rope_theta", "partial_rotary_factor", "rope_scaling")
    scaling = _scaling({key: value for key, value in moved.items() if key not in kept})
    found = {key: value for key, value in config.items() if key != "rope_parameters" or not moved}
    if _scaling(found.get("rope_scaling")) is None:
        found.pop("rope_scaling", None)
    for key, value in {**moved, "rope_scaling": scaling}.items():
        if key in kept and value is not None:
            require(
                found.get(key, value) in (value, None),
                f"{where}: config.json has {key} = {found.get(key)!r}, but {value!r} in rope_parameters; keep one of "
                f"them.",
                CheckpointError,
            )
            found[key] = value
    return found


def _scaling(given: Any) -> Any:
    """``rope_scaling`` if it changes the rotation; the type "default" does not."""
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else "other"
    return given if given and kind != "default" else None


def _check_defaults(config: dict[str, Any], made: "PreTrainedConfig", family: Family, where: str) -> None:
    """Check that the family can express the default of each key that config.json leaves out."""
    for key, allowed in family.required.items():
        published = key in family.defaults
        source = "its published code" if published else f"transformers' class for {family.architecture}"
        value = family.defaults[key] if published else value_at(made, key, default=allowed[0])
        require(
            has_key(config, key) or value in allowed,
            f"{where}: config.json has no {key}, and {source} then uses {value!r}; the {family.name} family can "
            f"express only {_either(allowed)}. Set it in config.json.",
            CheckpointError,
        )


def _check_layers(made: "PreTrainedConfig", family: Family, where: str) -> None:
    """Check that layers see all of their keys, or a window of them where the class has windows."""
    has_windows = hasattr(type(made), "sliding_window")  # a class without them would ignore the key
    windowed = family.causal and has_windows and getattr(made, "sliding_window", None) is not None
    allowed = {"full_attention", "sliding_attention"} if windowed else {"full_attention"}
    other = sorted(set(getattr(made, "layer_types", None) or ()) - allowed)
    off = " while sliding_window is off" if family.causal and has_windows and not windowed else ""
    require(
        not other or family.class_attention,
        f"{where}: layer_types in config.json has {', '.join(other)}; the {family.name} family can express only "
        f"{' and '.join(sorted(allowed))}{off}.",
        CheckpointError,
    )


def check_required(config: dict[str, Any], family: Family, where: str) -> None:
    """Check that the family and the hook points can express a config.

    Raises:
        CheckpointError: they cannot; the message names the key, its value and the values that can be expressed.
    """
    for key, allowed in family.required.items():
        value = value_at(config, key, default=allowed[0])
        require(
            value in allowed,
            f"{where}: config.json has {key} = {value!r}; the {family.name} family can express only {_either(allowed)}"
            f". Ignoring the value would compute a different model.",
            CheckpointError,
        )
    known = (weighing.CONFIG_KEY, FAMILY_KEY)
    unknown = [key for key in config if key.startswith("sinklens") and key not in known]
    require(
        not unknown,
        f"{where}: config.json has {', '.join(map(repr, unknown))}; sinklens reads only {' and '.join(known)}.",
        CheckpointError,
    )
    chosen = config.get(weighing.CONFIG_KEY, "softmax")
    require(
        isinstance(chosen, str) and chosen in weighing.NORMALIZERS,
        f"{where}: config.json has {weighing.CONFIG_KEY} = {chosen!r}; known attention normalizers are "
        f"{', '.join(weighing.NORMALIZERS)}.{nearest(str(chosen), weighing.NORMALIZERS)}",
        CheckpointError,
    )


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(repr, values))


def _settings(config: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The arguments of the transformers config."""
    missing = [keys for keys in family.needed if all(value_at(config, key) is None for key in keys.split(" or "))]
    require(
        not missing,
        f"{where}: config.json lacks {', '.join(missing)}, which the {family.name} family needs.",
        CheckpointError,
    )
    for key, path, value in _entries(config):
        allowed, kind = RULES.get(key, (lambda _: True, ""))
        small = kind.partition(", at most")[0] if not _number(value) else kind
        require(
            allowed(value), f"{where}: config.json has {path} = {value!r:.200}; it must be {small}.", CheckpointError
        )
    if family.convert is not None:
        return family.convert(config)
    dropped = ("model_type", "auto_map", "architectures", "transformers_version", "torch_dtype", "dtype", "return_dict")
    return {key: value for key, value in config.items() if key not in (*dropped, *family.dropped)}


def _number(value: Any, most: float = 1e30) -> bool:
    return type(value) in (int, float) and 0 < value <= most


def _whole(value: Any, most: float = 1e8) -> bool:
    return value is None or (type(value) is int and _number(value, most))


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{key: (_number, f"a number above 0, such as {usual}") for key, usual in POSITIVE.items()},
    **dict.fromkeys(
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "llama_4_scaling_beta"),
        (lambda value: value in (None, 0) or _number(value), "a number of at least 0, or null"),
    ),
    "partial_rotary_factor": (lambda value: value is None or _number(value, 1.0), "a share, above 0 and at most 1"),
    **dict.fromkeys(COUNTS, (_whole, "a whole number above 0, at most 100,000,000")),
    **dict.fromkeys(REPEATED, (lambda value: _whole(value, 2e3), "a whole number above 0, at most 2,000")),
    "sliding_window": (lambda value: value is False or _whole(value), "a whole number above 0"),
    **dict.fromkeys(
        ("bos_token_id", "pad_token_id"), (lambda value: type(value) in (int, type(None)), "the id of a token")
    ),
    "eos_token_id": (
        lambda value: all(type(one) in (int, type(None)) for one in (value if isinstance(value, list) else [value])),
        "the id of a token, or a list",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), (lambda value: isinstance(value, str | None), "the name of a type")),
}
"""Key of config.json -> which values it may have, and what they are. Far above the sizes of published models."""


SHAPING = (
    *(key for key in RULES if key != "torch_dtype"), "tie_word_embeddings", "weight_tying", "attention_bias",
    "mlp_bias", "use_qkv_bias", "layer_types", "moe_layer_freq", "mlp_only_layers", "first_k_dense_replace",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "num_shared_experts", "hidden_act", "hidden_activation",
    "activation_function", "rope_type", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Keys on which names and shapes of weights depend, or whether a model can be built."""


def _entries(config: dict[str, Any], at: str = "") -> Iterator[tuple[str, str, Any]]:
    """Key, path and value of each entry of a config and its parts."""
    for key, value in config.items():
        if isinstance(value, dict) and key not in RULES:
            yield from _entries(value, f"{at}{key}.")
        else:
            yield key, at + key, value


def shape_of(config: dict[str, Any], family: Family) -> str:
    """What config.json says of the names and shapes of weights, as the end of a message."""
    from transformers import CONFIG_MAPPING

    said = (f"{path} = {value!r:.60}" for key, path, value in _entries(config) if key in SHAPING)
    optional = (key for keys in family.needed for key in keys.split(" or "))
    known = (key for key in SHAPING if key == "head_dim" or hasattr(CONFIG_MAPPING[family.architecture], key))
    lacking = [key for key in (optional if family.convert is not None else known) if not has_key(config, key)]
    return f"config.json has {', '.join(said)}{', and lacks ' * bool(lacking)}{', '.join(lacking)}."


def has_key(config: Any, key: str) -> bool:
    """Whether a config, a dictionary or an object, has `key`; a dot leads into a part."""
    return value_at(config, key, default=config) is not config


def value_at(config: Any, key: str, default: Any = None) -> Any:
    """The value of `key` in a config; `default` if it has no such key."""
    found = config
    for part in key.split("."):
        entries = found if isinstance(found, dict) else getattr(found, "__dict__", {})
        if part not in entries:
            return default
        found = entries[part]
    return found
