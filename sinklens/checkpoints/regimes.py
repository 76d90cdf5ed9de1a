"""How a checkpoint was trained, where its config.json leaves that open: which family, and which block length.

A wrong guess would compute another model without an error, so nothing is guessed: `choose_family` and `blocks_for` use
config.json and the caller's arguments. If these leave the question open, or if keys of config.json contradict each
other, the error says what to pass. For example, a config.json of Qwen2 that names its own code may be that of a
bidirectional model.

Limitation: a diffusion model whose config.json equals that of an ordinary causal one loads as causal.
"""

from typing import Any

from sinklens.checkpoints.families import BY_MODEL_TYPE, FAMILIES, Family
from sinklens.checkpoints.translate import class_names, family_named, family_of
from sinklens.errors import CheckpointError, SettingError
from sinklens.hooks.attention.blocks import Blocks, check_length


def choose_family(config: dict[str, Any], where: str, name: str | None, block_length: int | None) -> Family:
    """The family of a checkpoint: the one called `name`, or the one that config.json names.

    Raises:
        CheckpointError: there is no such family; or several families share the ``model_type`` and neither `name` nor
            `block_length` says which; or no `name` is given, and another key contradicts the ``model_type``.
    """
    if name is not None:
        return family_named(name)
    family = family_of(config, where)
    _refuse_other_model(config, family, where)
    sharing = [one for one in FAMILIES if one.regime and set(one.model_types) & set(family.model_types)]
    if not family.regime or len(sharing) < 2:
        return family
    if block_length is not None:
        sharing = [one for one in sharing if one.block_causal]
    if len(sharing) == 1:
        return sharing[0]
    choices = "; ".join(f"family={one.name!r}, {one.regime}" for one in sharing)
    raise CheckpointError(
        f"{where}: model_type {config.get('model_type')!r} does not say how the checkpoint was trained, and a wrong "
        f"choice computes another model. Its model card says how; pass one of {choices}."
    )


def _refuse_other_model(config: dict[str, Any], family: Family, where: str) -> None:
    """Refuse a checkpoint whose config.json says that its model is not the one that ``model_type`` names."""
    named = BY_MODEL_TYPE.get(str(config.get("model_type")))
    if named is not None and named.stock:
        family = named
    signs = _signs_of_another(config, family)
    if not signs:
        return
    choices = ", ".join(
        f"{one.name!r} ({one.attention}{', predicts the next position' * one.shift})"
        for one in FAMILIES
        if (one.architecture, one.config_names) == (family.architecture, family.config_names)
    )
    raise CheckpointError(
        f"{where}: config.json is that of {family.name}, but {', and '.join(signs)}, so its model may differ. Pass "
        f"family=, as the model card says: {choices}."
    )


def _signs_of_another(config: dict[str, Any], family: Family) -> list[str]:
    """What in config.json says that the model is not `family`'s."""
    signs = []
    foreign = [name for name in class_names(config) if family.own_classes and name not in family.own_classes]
    if foreign:
        signs.append(f"architectures names {', '.join(foreign)} instead of {' or '.join(family.own_classes)}")
    directed = not family.class_attention and isinstance(config.get("is_causal"), bool)
    if directed and config["is_causal"] != family.causal:
        signs.append(f"is_causal is {config['is_causal']}")
    if not family.stock:
        return signs
    brought = config.get("auto_map")
    code = {str(name) for key, name in brought.items() if _is_code(key)} if isinstance(brought, dict) else set()
    if code:
        signs.append(f"auto_map names code of its own ({', '.join(sorted(code))})")
    keys = {"mask_token_id", *(one.block_length_key for one in FAMILIES if one.block_length_key)}
    if family.causal and config.get("is_causal") is not True:
        signs += [f"it has {key}, which causal models lack" for key in sorted(keys) if config.get(key) is not None]
    return signs


def _is_code(key: str) -> bool:
    """Whether an entry of ``auto_map`` is about the model, and not about a tokenizer or processor."""
    return key.startswith(("AutoConfig", "AutoModel"))


def blocks_for(config: dict[str, Any], family: Family, given: int | None, where: str) -> Blocks | None:
    """The blocks of a checkpoint: `given`, else config.json's, else the family's; None if it is not block-causal.

    Raises:
        CheckpointError: the family is not block-causal and a block length was given; or it is, and nothing says the
            length; or the length is not a number of positions.
    """
    if not family.block_causal:
        if given is not None:
            raise CheckpointError(
                f"{where}: the {family.name} family has {family.attention} attention, which has no blocks; leave "
                f"block_length= out. Runs take one as a setting of their sampler."
            )
        return None
    found = next((n for n in (given, config.get(family.block_length_key), family.block_length) if n is not None), None)
    if found is None:
        raise CheckpointError(
            f"{where}: config.json does not give the block length of this {family.name} checkpoint; "
            f"pass it, as in sinklens.load(..., block_length=4). The checkpoint's name or its model card says it."
        )
    try:
        return Blocks(check_length(found), family.blocks_start)
    except SettingError as error:
        raise CheckpointError(f"{where}: {error}") from error
