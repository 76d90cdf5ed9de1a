"""Reads low-rank adapters in the format of peft: adapter_config.json and adapter_model.safetensors.

An adapter beside a checkpoint's weights, or one that the caller names, is merged into them: W + scale · B A. The
weights that a model shows are then those that run, whether or not peft is installed. An adapter of a family's own
folder (`Family.adapter`) acts in draft passes only and is not merged; see hooks/adapter.py.

Only plain LoRA is accepted, with modules that were trained in full (``modules_to_save``). An adapter's weights have the
names of the authors' class, so the family's renames apply to them, and its fused weights are divided.

Pitfall: an option of peft that is ignored would compute another model, so a key that is not known must be empty.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sinklens.errors import CheckpointError
from sinklens.families import Family
from sinklens.hooks.adapter import ADAPTED, Adapter, LowRank
from sinklens.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Weights, rename
from sinklens.model.packing import Place, places_of
from sinklens.utils.documents import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READ = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "modules_to_save", "layers_to_transform", "layers_pattern",
)  # fmt: skip
_UNUSED = (  # they matter in training, or describe; the module says whether its matrix is [in, out]
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
_PLAIN: dict[str, tuple[Any, ...]] = {  # the other starts change the weights of the base model
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_EMPTY: tuple[Any, ...] = (None, False, [], {}, "")
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<path>.+)\.lora_(?P<kind>embedding_)?(?P<factor>[AB])(?:\.weight)?")
_SAVED = re.compile(r"(?P<path>.+?)(?:\.modules_to_save)?(?:\.base_layer)?\.(?P<kind>weight|bias)")


class Change(NamedTuple):
    """What an adapter adds to the output of one module.

    Attributes:
        factors: its two factors.
        scale: their factor.
        places: where the transformers model keeps the weight.
        turned: whether that weight is [in, out].
    """

    factors: LowRank
    scale: float
    places: list[Place]
    turned: bool


class Lora(NamedTuple):
    """An adapter of peft.

    Attributes:
        changes: name of a weight, as `rename` gives it -> what is added.
        saved: the same for weights that are replaced.
    """

    changes: dict[str, Change]
    saved: dict[str, tuple[Tensor, list[Place]]]


def read_adapter(folder: Path, family: Family, weights: Weights, empty: "PreTrainedModel") -> Adapter | None:
    """The adapter with which the checkpoint in `folder` drafts; None if it has none, or its family uses none.

    Args:
        weights: the checkpoint's.
        empty: its model, for names and shapes.

    Raises:
        CheckpointError: see `read_lora`; or its hooks cannot express the adapter.
    """
    place = folder / family.adapter
    if not family.adapter or not (place / ADAPTER_CONFIG).is_file():
        return None
    lora = read_lora(place, family, weights, empty)
    found = {name.removesuffix(".weight"): change for name, change in lora.changes.items()}
    if other := [path for path in [*lora.saved, *found] if path.rpartition(".")[2] not in ADAPTED]:
        raise CheckpointError(f"{place} adapts {other[0]}; supported are the projections {', '.join(ADAPTED)}.")
    scales = {change.scale for change in found.values()}
    if len(scales) > 1:
        raise CheckpointError(f"{place / ADAPTER_CONFIG} has alpha_pattern or rank_pattern; supported: one scale.")
    return Adapter(family.adapter, scales.pop(), {path: change.factors for path, change in found.items()})


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies in `folder`, complete or not."""
    return any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"))


def read_lora(place: Path, family: Family, weights: Weights, empty: "PreTrainedModel") -> Lora:
    """The adapter in the folder `place`, checked against the model.

    Args:
        family, weights, empty: as in `read_adapter`.

    Raises:
        CheckpointError: a file is missing or corrupt, an option is not plain LoRA, or the adapter and the model do not
            fit each other.
    """
    config = _config(place)
    try:
        stored = load_file(place / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _incomplete(place, error) from error
    shapes = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
    factors: dict[tuple[str, str], dict[str, Tensor]] = {}
    saved: dict[str, tuple[Tensor, list[Place]]] = {}
    replaced: set[str] = set()
    for name, value in stored.items():
        inner = name.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(inner):
            factors.setdefault((match["path"], match["kind"] or ""), {})[match["factor"]] = value
        elif (match := _SAVED.fullmatch(inner)) and name != inner and ".lora_" not in inner:
            new = rename(f"{match['path']}.{match['kind']}", family.renames)
            saved[new] = value, _located(new, shapes, family, tuple(value.shape), place)
            replaced.add(match["path"])
        else:
            raise CheckpointError(f"{place / ADAPTER_WEIGHTS} has {name!r}, which is not a factor of a LoRA weight.")
    changes: dict[str, Change] = {}
    for (path, kind), parts in factors.items():
        new = rename(f"{path}.weight", family.renames)
        changes[new] = _change(path, new, bool(kind), parts, config, family, shapes, empty, place)
    _check_complete(config, {path for path, _ in factors}, replaced, weights, family, place)
    return Lora(changes, saved)


def _config(place: Path) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA."""
    file = place / ADAPTER_CONFIG
    try:
        config = read_json(file)
        _check_number(config["r"] if "peft_type" in config else None, int)
        _check_number(config["lora_alpha"], int | float)
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern, value in (config.get(key) or {}).items():
                re.compile(pattern)
                _check_number(value, int if key == "rank_pattern" else int | float)
        for key in ("target_modules", "exclude_modules", "modules_to_save"):
            named = config.get(key) or []
            if not isinstance(named, str) and not (
                isinstance(named, list) and all(isinstance(one, str) for one in named)
            ):
                raise ValueError(f"{key} is not a list of names")
            _named(named, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise _incomplete(place, error) from error
    for key, value in config.items():
        if key not in (*_READ, *_UNUSED) and value not in _PLAIN.get(key, _EMPTY):
            raise CheckpointError(f"{file} has {key} = {value!r}, which is not plain LoRA; merge it with peft.")
    return config


def _check_number(value: Any, kind: Any) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a rank or scale")


def _incomplete(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{place} is no complete adapter of peft ({type(error).__name__}: {error}). It holds {ADAPTER_CONFIG} and "
        f"{ADAPTER_WEIGHTS}; download both again, or remove them to load the model without its adapter."
    )


def _located(
    name: str, shapes: Mapping[str, tuple[int, ...]], family: Family, shape: tuple[int, ...] | None, place: Path
) -> list[Place]:
    """Where the model keeps a weight, which must have this shape."""
    places = places_of(name, shapes, family.fused)
    if not places:
        raise CheckpointError(
            f"{place} adapts {name}, which this {family.name} model does not have; it is an adapter of another model."
        )
    rows, size = sum(one.shape[0] for one in places), places[0].shape[1:]
    if shape is not None and shape != (rows, *size):
        raise CheckpointError(f"{place}: {name} is {list(shape)}, but in the model {[rows, *size]}.")
    return places


def _change(
    path: str, name: str, embeds: bool, parts: dict[str, Tensor], config: dict[str, Any], family: Family,
    shapes: Mapping[str, tuple[int, ...]], empty: "PreTrainedModel", place: Path,
) -> Change:  # fmt: skip
    """What is added to the weight `name`, whose module is called `path` in the authors' class."""
    from transformers.pytorch_utils import Conv1D

    places = _located(name, shapes, family, None, place)
    size = (sum(one.shape[0] for one in places), *places[0].shape[1:])
    turned = embeds or isinstance(empty.get_submodule(places[0].name.rpartition(".")[0]), Conv1D)
    wanted = size[::-1] if turned else size
    rank = _value(config, "rank_pattern", path, config["r"])
    alpha = _value(config, "alpha_pattern", path, config["lora_alpha"])
    found = {letter: tuple(value.shape) for letter, value in parts.items()}
    if len(wanted) != 2 or found != {"A": (rank, wanted[1]), "B": (wanted[0], rank)}:
        raise CheckpointError(
            f"{place}: the factors of {path} have the shapes {found}; rank {rank} and the model need A "
            f"{(rank, wanted[-1])} and B {(wanted[0], rank)}."
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Change(LowRank(parts["A"], parts["B"]), scale, places, turned)


def _value(config: Mapping[str, Any], key: str, path: str, default: Any) -> Any:
    """The rank or alpha of a module: that of the first pattern that names it."""
    patterns = (config.get(key) or {}).items()
    return next((value for one, value in patterns if re.match(rf"(.*\.)?({one})$", path)), default)


def _named(names: str | Iterable[str], path: str) -> bool:
    """Whether a list of names, or a regular expression, names a module."""
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, path) is not None
    return any(f".{path}".endswith(f".{one}") for one in names)


def _targeted(config: Mapping[str, Any], path: str) -> bool:
    """Whether the config names a module."""
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    saves = any(f".{one}." in f".{path}." for one in config.get("modules_to_save") or ())
    if saves or _named(config.get("exclude_modules") or (), path) or not _named(targets or (), path):
        return False
    if layers in (None, []) or isinstance(targets, str):
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    numbers = (
        re.match(rf"(?:^|.*?\.){one}\.(\d+)\.", path) for one in ([patterns] if isinstance(patterns, str) else patterns)
    )
    number = next((int(match[1]) for match in numbers if match), None)
    return number in (layers if isinstance(layers, list) else [layers])


def _check_complete(
    config: Mapping[str, Any], adapted: set[str], replaced: set[str], weights: Weights, family: Family, place: Path
) -> None:
    """Check that the tensors are those of the modules that the config names."""
    if not adapted:
        raise CheckpointError(f"{place / ADAPTER_WEIGHTS} has no factors of LoRA weights.")
    if stray := sorted(path for path in adapted if not _targeted(config, path)):
        raise CheckpointError(
            f"{place} adapts {stray[0]}, but target_modules in {ADAPTER_CONFIG} does not name it; the files do not "
            f"belong together."
        )
    targets = config.get("target_modules") or ()
    named = [] if isinstance(targets, str) else [one for one in targets if not any(_named([one], p) for p in adapted)]
    unsaved = [
        one for one in config.get("modules_to_save") or () if not any(f"{one}." in f"{path}." for path in replaced)
    ]
    whole = {rename(f"{path}.", family.renames) for path in adapted}
    modules = {stored.rpartition(".")[0] for stored in weights.original.values() if ".experts." not in stored}
    left = [] if targets == "all-linear" else sorted(path for path in modules if _targeted(config, path))
    missing = [path for path in left if rename(f"{path}.", family.renames) not in whole]
    if lacking := [*named, *unsaved, *missing]:
        raise CheckpointError(
            f"{place}: {ADAPTER_CONFIG} names {lacking[0]}, for which {ADAPTER_WEIGHTS} has no tensors. It is "
            f"incomplete, or an adapter of another model."
        )


def merge(hf: "PreTrainedModel", lora: Lora, tied: Mapping[str, str], place: Path) -> None:
    """Add an adapter to the weights of a model, in float32 or wider.

    Raises:
        CheckpointError: a weight is shared with another one or stays on disk.
    """
    every = [one for _, places in lora.saved.values() for one in places]
    every += [one for change in lora.changes.values() for one in change.places]
    for one in every:
        if one.name in tied or one.name in tied.values():
            raise CheckpointError(
                f"{place} adapts {one.name}, which config.json ties to another weight. Merge the adapter with peft, "
                f"and save the model with both weights (tie_word_embeddings: false)."
            )
        if hf.get_parameter_or_buffer(one.name).is_meta:
            raise CheckpointError(
                f"{place} adapts {one.name}, which device_map= leaves on another device's storage; load the "
                f"checkpoint with device=."
            )
    with torch.no_grad():
        for value, places in lora.saved.values():
            _write(hf, value, places, keep=False)
        for (a, b), scale, places, turned in lora.changes.values():
            device = hf.get_parameter_or_buffer(places[0].name).device
            added = scale * (b.to(device).double() @ a.to(device).double())
            _write(hf, added.mT if turned else added, places, keep=True)


def _write(hf: "PreTrainedModel", value: Tensor, places: list[Place], keep: bool) -> None:
    """Write a value over the weights at `places`, or add it to them."""
    for place, piece in zip(places, value.split([one.shape[0] for one in places]), strict=True):
        part = hf.get_parameter_or_buffer(place.name)[place.index]
        wide = torch.promote_types(part.dtype, torch.float32)
        piece = piece.to(part.device, wide)
        part.copy_(part.to(wide) + piece if keep else piece)
