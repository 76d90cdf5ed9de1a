"""Turns a checkpoint's config.json into the transformers config it is loaded with.

The translation goes by the family's record: keys are renamed, values that cannot be expressed are refused by name.
Keys that neither the record nor transformers knows (training settings, initialisation) say nothing about the forward
pass and are dropped.
"""

from typing import TYPE_CHECKING, Any

from sinklens.checkpoints.families import BY_MODEL_TYPE, FAMILIES, Family
from sinklens.checkpoints.registry import register_installed
from sinklens.errors import CheckpointError, nearest
from sinklens.hooks import normalizers as weighing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Keys of a public config that transformers' own config classes take over unchanged. A token that the config does not
# name is none: the classes' own defaults are of another vocabulary.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT = ("initializer_range", "attention_dropout", weighing.CONFIG_KEY)


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family that config.json's ``model_type`` names.

    Raises:
        CheckpointError: it names none; says whether the checkpoint would need code of its own.
    """
    kind = config.get("model_type")
    named = isinstance(kind, str)
    if named and kind not in BY_MODEL_TYPE:
        register_installed()
    if named and kind in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind]
    own_code = " It asks for code of its own (auto_map), which sinklens never runs." if config.get("auto_map") else ""
    raise CheckpointError(
        f"{where}: model_type {kind!r} is not a known family.{own_code} Known: {', '.join(BY_MODEL_TYPE)}."
        f"{nearest(str(kind), BY_MODEL_TYPE)} A new family is one record, made known by sinklens.checkpoints.register."
    )


def translate(config: dict[str, Any], family: Family, where: str) -> "PreTrainedConfig":
    """The transformers config for `config` (the parsed config.json) of a checkpoint at `where`.

    The result carries ``is_causal`` of the family, and no ``auto_map``.

    Raises:
        CheckpointError: a value cannot be expressed, or a needed key is missing.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    check_required(config, family, where)
    if config.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: config.json has a quantization_config; only weights that are not quantized are loaded. Give the "
            f"checkpoint that it was made from."
        )
    if family.config_names:
        settings = _renamed(config, family, where)
    else:
        dropped = ("model_type", "auto_map", "architectures", "transformers_version", "torch_dtype", "dtype")
        settings = {key: value for key, value in config.items() if key not in dropped}
    try:
        made = CONFIG_MAPPING[family.architecture](**settings)
    except (StrictDataclassError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{where}: config.json describes no {family.architecture} model: {reason}") from error
    made.is_causal = family.causal
    return made


def check_required(config: dict[str, Any], family: Family, where: str) -> None:
    """Hold a config to what the family and the hook points can express.

    Raises:
        CheckpointError: names the key, its value and the values that can be expressed.
    """
    for key, allowed in family.required.items():
        if key in config and config[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise CheckpointError(
                f"{where}: config.json has {key} = {config[key]!r}; the {family.name} family can express only "
                f"{expected}. Loading it anyway would compute another model."
            )
    if strange := [key for key in config if key.startswith("sinklens") and key != weighing.CONFIG_KEY]:
        raise CheckpointError(f"{where}: config.json has {strange[0]!r}; sinklens reads {weighing.CONFIG_KEY} alone.")
    weighed = config.get(weighing.CONFIG_KEY, "softmax")
    if not isinstance(weighed, str) or weighed not in weighing.WAYS:
        raise CheckpointError(
            f"{where}: config.json has {weighing.CONFIG_KEY} = {weighed!r}; known ways from scores to attention "
            f"weights are {', '.join(weighing.WAYS)}.{nearest(str(weighed), weighing.WAYS)}"
        )


def _renamed(config: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """LLaDA's config keys under transformers' names, with its two derived sizes."""
    config = dict(config)
    if config.get("mlp_hidden_size") is None and config.get("mlp_ratio") and config.get("d_model"):
        config["mlp_hidden_size"] = config["mlp_ratio"] * config["d_model"]
    if config.get("n_kv_heads") is None:
        config["n_kv_heads"] = config.get("n_heads")
    config["vocab_size"] = config.get("embedding_size") or config.get("vocab_size")
    needed = [*family.config_names, "vocab_size"]
    missing = [key for key in needed if config.get(key) is None and key != "weight_tying"]
    if missing:
        raise CheckpointError(f"{where}: config.json lacks {', '.join(missing)}, which the {family.name} family needs.")
    settings = {new: config[old] for old, new in family.config_names.items() if old in config}
    theta = settings.pop("rope_theta")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise CheckpointError(
            f"{where}: config.json has rope_theta = {theta!r}; it is a number above 0, such as 500000.0."
        )
    settings |= {key: config[key] for key in _KEPT if key in config} | {key: config.get(key) for key in _TOKENS}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": float(theta)}
    settings["vocab_size"] = config["vocab_size"]
    return settings


def family_named(name: str) -> Family:
    """The family called `name`.

    Raises:
        CheckpointError: there is none.
    """
    if name not in (family.name for family in FAMILIES):
        register_installed()
    known = {family.name: family for family in FAMILIES}
    if name not in known:
        raise CheckpointError(f"no family is called {name!r}; known: {', '.join(known)}.{nearest(name, known)}")
    return known[name]
