"""How a checkpoint was trained, where its config.json leaves that open: which family, and which block length.

A wrong guess would compute another model without an error, so nothing is guessed: `choose_family` and `blocks_for` use
config.json and the caller's arguments. If these leave the question open, the error says what to pass.
"""

from typing import Any

from sinklens.checkpoints.families import FAMILIES, Family
from sinklens.checkpoints.translate import family_named, family_of
from sinklens.errors import CheckpointError, SettingError
from sinklens.hooks.blocks import Blocks, check_length


def choose_family(config: dict[str, Any], where: str, name: str | None, block_length: int | None) -> Family:
    """The family of a checkpoint: the one called `name`, or the one that config.json names.

    Raises:
        CheckpointError: there is no such family, or several families share the ``model_type`` and neither `name` nor
            `block_length` says which.
    """
    if name is not None:
        return family_named(name)
    family = family_of(config, where)
    _refuse_ambiguous_code(config, family, where)
    sharing = [one for one in FAMILIES if one.regime and config.get("model_type") in one.model_types]
    if len(sharing) < 2:
        return family
    if block_length is not None:
        sharing = [one for one in sharing if one.block_causal]
    if len(sharing) == 1:
        return sharing[0]
    choices = "; ".join(f"family={one.name!r}, {one.regime}" for one in sharing)
    raise CheckpointError(
        f"{where}: model_type {config['model_type']!r} does not say how the checkpoint was trained, and a wrong choice "
        f"computes another model. Its model card says it; pass one of {choices}."
    )


def _refuse_ambiguous_code(config: dict[str, Any], family: Family, where: str) -> None:
    """Refuse a checkpoint with this family's model_type that names the code of another family's checkpoints."""
    brought = config.get("auto_map")
    classes = {name for name in brought.values() if isinstance(name, str)} if isinstance(brought, dict) else set()
    others = [one.name for one in FAMILIES if one is not family and classes & set(one.code)]
    if others:
        raise CheckpointError(
            f"{where}: config.json is that of {family.name}, but names the code ({', '.join(sorted(classes))}) of "
            f"{others[0]} checkpoints, whose attention differs. Pass family={others[0]!r} or "
            f"family={family.name!r}, as the model card says."
        )


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
