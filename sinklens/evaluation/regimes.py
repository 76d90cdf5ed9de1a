"""Decoding regimes: the same settings with all positions decided in one block (pure diffusion), or block by block.

Scores differ more between regimes than under most interventions (LLaDA-8B-Instruct's GSM8K: 0.694 and 0.786), so an
effect that is found in one of them should be looked for in the other.

Pitfall: only the blocks change. Settings that belong to one regime, such as how end-of-text tokens are treated, stay as
they are; a published score of the other regime needs its own protocol.
"""

import re
from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError
from sinklens.families import settings_for
from sinklens.families.registry import find_sampler

if TYPE_CHECKING:
    from sinklens.model import Model

BOTH = ("diffusion", "blocks")
USUAL = 32  # the length of blocks, where the settings have a single one
_FORM = re.compile(r"diffusion|blocks(?::([1-9][0-9]*))?")


def check_regime(regime: str) -> None:
    """Refuse a text that is not a regime.

    Raises:
        SettingError: it is not one.
    """
    if not isinstance(regime, str) or not (regime == "" or _FORM.fullmatch(regime)):
        raise SettingError(f"a regime is diffusion, blocks or blocks:N, such as blocks:32; got {regime!r}.")


def in_regime(model: "Model", given: dict[str, Any], regime: str) -> dict[str, Any]:
    """The settings of a run under a regime; `given` if it is "".

    Args:
        given: settings, as `sinklens.generate` takes them.
        regime: "diffusion", one block as long as the answer; "blocks:N", blocks of N positions from left to right;
            "blocks", those of the settings, or of 32 if they have a single one.

    Raises:
        SettingError: an unknown regime, or a model whose sampler does not have both.
    """
    check_regime(regime)
    if not regime:
        return given
    plain = settings_for(model, given)
    sampler = find_sampler(plain.name)
    by_blocks = plain.name if "block_length" in sampler.setting_names() else sampler.blocks_by
    if model.family_record.attention != "bidirectional" or not by_blocks:
        raise SettingError(
            f"{model.name} decodes with the {plain.name} sampler in one regime only; leave --regimes out, or choose a "
            f"bidirectional model with a sampler such as llada or dream."
        )
    if regime == "diffusion":
        return given if plain.positions_per_block == plain.gen_length else given | {"block_length": plain.gen_length}
    size = _FORM.fullmatch(regime)
    assert size is not None, "checked above"
    usual = plain.positions_per_block if plain.positions_per_block < plain.gen_length else USUAL
    found = given | {"block_length": int(size[1] or usual)}
    return found if by_blocks == plain.name else found | {"sampler": by_blocks}
