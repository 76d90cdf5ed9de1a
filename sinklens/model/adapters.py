"""Reads the low-rank adapter of a checkpoint, in the format of peft: adapter_config.json and adapter_model.safetensors.

Only what hooks/adapter.py can express is accepted: plain LoRA of one rank, without biases, on projections that it may
change. The adapter's weights are named after the checkpoint's own names, so the family's renames apply to them.

Pitfall: an option of peft that is ignored would compute another model, so every key that changes a result is checked.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError
from sinklens.families import Family
from sinklens.hooks.adapter import ADAPTED, Adapter, LowRank
from sinklens.model.files import rename
from sinklens.utils.arguments import Count, Number, read_as
from sinklens.utils.documents import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    **dict.fromkeys(("fan_in_fan_out", "use_dora", "use_qalora", "lora_bias"), (False, None)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "modules_to_save", "target_parameters"), (None, [])),
    **dict.fromkeys(("trainable_token_indices", "layer_replication"), (None, [])),
    **dict.fromkeys(("alpha_pattern", "rank_pattern"), (None, {})),
}
_NAME = re.compile(r"^base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.weight$")


def read_adapter(folder: Path, family: Family, expected: Mapping[str, tuple[int, ...]]) -> Adapter | None:
    """The adapter of the checkpoint in `folder`; None if it has none, or its family uses none.

    Args:
        expected: name of each weight of the transformers model -> its shape.

    Raises:
        CheckpointError: a file is missing or corrupt, an option is not supported, or a weight does not fit the model.
    """
    place = folder / family.adapter
    if not family.adapter or not (place / CONFIG).is_file():
        return None
    try:
        config = read_json(place / CONFIG)
        stored = load_file(place / WEIGHTS)
        rank, alpha = read_as(Count, "r", config.get("r")), read_as(Number, "lora_alpha", config.get("lora_alpha"))
    except (OSError, CheckpointError, SettingError, SafetensorError) as error:
        raise CheckpointError(
            f"{place} is no complete adapter of peft ({type(error).__name__}: {error}). It holds {CONFIG} and "
            f"{WEIGHTS}; download both again, or remove the folder to load the model without its adapter."
        ) from error
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise CheckpointError(f"{place / CONFIG} has {key} = {config[key]!r}; supported: {allowed[0]!r}.")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(family.adapter, scale, _factors(stored, family, expected, rank, place))


def _factors(
    stored: Mapping[str, Tensor], family: Family, expected: Mapping[str, tuple[int, ...]], rank: int, place: Path
) -> dict[str, LowRank]:
    """The two factors of every adapted projection, by its path in the transformers model."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in stored.items():
        match = _NAME.match(name)
        if match is None:
            raise CheckpointError(f"{place / WEIGHTS} has {name!r}, which is not a factor of a LoRA weight.")
        path = rename(match["path"] + ".weight", family.renames).removesuffix(".weight")
        found.setdefault(path, {})[match["factor"]] = value
    for path, parts in found.items():
        size = expected.get(f"{path}.weight", ())
        shapes = {letter: tuple(value.shape) for letter, value in parts.items()}
        if path.rpartition(".")[2] not in ADAPTED or len(size) != 2:
            raise CheckpointError(f"{place} adapts {path}; supported are the projections {', '.join(ADAPTED)}.")
        if shapes != {"A": (rank, size[1]), "B": (size[0], rank)}:
            raise CheckpointError(
                f"{place}: the factors of {path} have the shapes {shapes}; rank {rank} and the model need A "
                f"{(rank, size[1])} and B {(size[0], rank)}."
            )
    return {path: LowRank(parts["A"], parts["B"]) for path, parts in found.items()}
