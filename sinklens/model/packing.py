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
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sinklens.families import Family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Shapes = Mapping[str, tuple[int, ...]]

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
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


def places_of(stored: str, parameters: Shapes, fused: Mapping[str, tuple[str, ...]]) -> list[Place]:
    """Where the model keeps a stored weight: in several pieces along its first axis, or a part of a stacked one.

    Args:
        stored: its name in transformers' naming.
        parameters, fused: as in `stored_shapes`.

    Returns:
        The pieces in order; none if the model does not have the weight.
    """
    if stored in parameters:
        return [Place(stored, ..., parameters[stored])]
    for whole, pieces in fused.items():
        if stored.endswith(f".{whole}"):
            names = [stored.removesuffix(whole) + piece for piece in pieces]
            return [Place(name, ..., parameters[name]) for name in names if name in parameters]
    match = _EXPERT.match(stored)
    name = "" if match is None else f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
    if match is None or int(match[2]) >= parameters.get(name, (0,))[0]:
        return []
    number, (_, rows, columns) = int(match[2]), parameters[name]
    if match[3] == "down":
        return [Place(name, number, (rows, columns))]
    half = slice(0, rows // 2) if match[3] == "gate" else slice(rows // 2, rows)
    return [Place(name, (number, half), (rows // 2, columns))]


def stored_shapes(parameters: Shapes, fused: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes under which a checkpoint stores `parameters`.

    Args:
        parameters: names and shapes of a model's parameters.
        fused: name of a stored weight -> the weights that it holds one after another, both from the last module on.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in parameters.items():
        match = _EXPERTS.match(name)
        found |= _alone(match.group(1), match.group(2), shape) if match else {name: shape}
    for whole, pieces in fused.items():
        found = _fused(found, whole, pieces)
    return found


def _alone(experts: str, weight: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The weights of single experts that a stacked parameter holds."""
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if weight == "gate_up_proj" else ("down_proj",)
    return {
        f"{experts}.{number}.{part}.weight": (rows // len(parts), columns) for number in range(count) for part in parts
    }


def _fused(shapes: Shapes, whole: str, pieces: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """`shapes` with each set of `pieces` replaced by one weight that holds them along the first axis."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        piece = next((piece for piece in pieces if name.endswith(f".{piece}")), None)
        if piece is None:
            found[name] = shape
            continue
        joined = name.removesuffix(piece) + whole
        found[joined] = (found.get(joined, (0,))[0] + shape[0], *shape[1:])
    return found


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
