"""Parameters that a checkpoint stores in different pieces than its transformers class does.

transformers converts them while it loads; here only names and shapes are converted, so that the headers of a checkpoint
can be checked before anything is read:

- experts of an MLP are stored one by one and held stacked: ``mlp.experts.7.gate_proj.weight`` is a part of
  ``mlp.experts.gate_up_proj``;
- a family may store queries, keys and values as one weight (`Family.fused`).

`class_for` returns a class with its own converters, with which transformers splits fused weights.

Limitation: this module restates what transformers does and is not derived from it; a test loads each kind.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from sinklens.families import Family

_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


class Place(NamedTuple):
    """Where a model keeps a weight, or a piece of one.

    Attributes:
        name: the parameter.
        index: of the part that holds it.
        shape: of that part.
    """

    name: str
    index: Any
    shape: tuple[int, ...]


def stored_places(
    parameters: Mapping[str, tuple[int, ...]], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, list[Place]]:
    """Where a model keeps each weight of a checkpoint: in pieces along its first axis, or as a part of a stacked one.

    Args:
        parameters: names and shapes of the model's parameters; pieces of a weight are in order.
        fused: name of a stored weight -> the weights that it holds one after another, as in `Family.fused`.

    Returns:
        Name of each stored weight, in transformers' naming -> its pieces in order.
    """
    found: dict[str, list[Place]] = {}
    for name, shape in parameters.items():
        if match := _EXPERTS.match(name):
            parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            count, rows = shape[0], shape[1] // len(parts)
            for number, (first, part) in product(range(count), enumerate(parts)):
                index = number, slice(first * rows, (first + 1) * rows)
                found[f"{match[1]}.{number}.{part}.weight"] = [Place(name, index, (rows, *shape[2:]))]
            continue
        joined = (
            name.removesuffix(piece) + whole
            for whole, pieces in fused.items()
            for piece in pieces
            if name.endswith(f".{piece}")
        )
        found.setdefault(next(joined, name), []).append(Place(name, ..., shape))
    return found


def joined_shape(places: Sequence[Place]) -> tuple[int, ...]:
    """The shape of a weight that is kept in these places."""
    return sum(one.shape[0] for one in places), *places[0].shape[1:]


def class_for(config: "PreTrainedConfig", family: Family) -> Any:
    """The class whose ``from_pretrained`` loads a checkpoint with this transformers config.

    transformers looks its weight converters up by the name of a class. With fused weights the result is a subclass
    that computes the same and has its own converters: those of the model type, and a split of each fused weight.
    """
    import transformers
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import Split, WeightConverter
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not family.fused:
        return getattr(transformers, family.model_class)
    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = type(f"Fused{base.__name__}", (base,), {"__module__": base.__module__})
    splits = [WeightConverter(whole, list(pieces), [Split(dim=0)]) for whole, pieces in family.fused.items()]
    converters = [*(get_checkpoint_conversion_mapping(config.model_type) or []), *splits]
    register_checkpoint_conversion_mapping(made.__name__, converters, overwrite=True)
    return made
