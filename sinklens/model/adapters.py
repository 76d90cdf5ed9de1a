"""Reads low-rank adapters in the format of peft: adapter_config.json and adapter_model.safetensors.

An adapter beside a checkpoint's weights, or one that the caller names, is merged into them: W + scale · B A. The
weights that a model shows are then those that run, whether or not peft is installed. An adapter of a family's own
folder (`Family.adapter`) acts in draft passes only and is not merged; see hooks/adapter.py.

Only plain LoRA is accepted, with modules that were trained in full (``modules_to_save``) and tokens whose embedding was
trained (``trainable_token_indices``). An adapter's weights have the names of the authors' class, so the family's
renames apply to them, and its fused weights are divided. Factors may be stored in 8 bits.

Pitfall: to ignore an option of peft would silently change the model, so an unknown key must be empty.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from sinklens.errors import CheckpointError, SinklensError, require
from sinklens.families import Family
from sinklens.hooks.adapter import ADAPTED, Adapter, LowRank
from sinklens.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Weights, rename
from sinklens.model.packing import Place, joined_shape, stored_places
from sinklens.utils.arguments import Count, Positive, read_as
from sinklens.utils.documents import read_json

_READ = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "modules_to_save", "layers_to_transform", "trainable_token_indices",
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
_ROWS = re.compile(r"(?P<path>.+)\.token_adapter\.trainable_tokens_delta")  # new rows, despite the name
_SAVED = re.compile(r"(?P<path>(?!.*\.lora_).+?)(?:\.modules_to_save)?(?:\.base_layer)?\.(?P<kind>weight|bias)")


class Change(NamedTuple):
    """What an adapter does to one weight: it adds a product of two factors, or replaces the weight.

    Attributes:
        places: where the transformers model keeps the weight.
        value: the factors, or what replaces the weight.
        scale: factor of the product.
        turned: whether the weight is stored as [in, out].
        rows: token ids, if the value replaces their rows alone, here and in the weights that are tied to this one.
    """

    places: list[Place]
    value: LowRank | Tensor
    scale: float = 1.0
    turned: bool = False
    rows: tuple[int, ...] = ()


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
    found, factors = read_lora(place, family, weights, empty), dict[str, LowRank]()
    for name, change in found.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] not in ADAPTED or not isinstance(change.value, LowRank):
            raise CheckpointError(f"{place} adapts {path}; supported are the projections {', '.join(ADAPTED)}.")
        factors[path] = change.value
    scales = {change.scale for change in found.values()}
    require(
        len(scales) == 1,
        f"{place / ADAPTER_CONFIG} has alpha_pattern or rank_pattern; supported: one scale.",
        CheckpointError,
    )
    return Adapter(family.adapter, scales.pop(), factors)


def has_adapter(folder: Path) -> bool:
    """Whether an adapter lies in `folder`, complete or not."""
    return any((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin"))


def read_lora(place: Path, family: Family, weights: Weights, empty: "PreTrainedModel") -> dict[str, Change]:
    """The adapter in the folder `place`, checked against the model: name of a weight, as `rename` gives it -> a change.

    Args:
        family, weights, empty: as in `read_adapter`.

    Raises:
        CheckpointError: a file is missing or corrupt, an option is not plain LoRA, or the adapter and the model do not
            fit each other.
    """
    try:
        config, stored = _config(place), load_file(place / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _incomplete(place, error) from error
    shapes = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
    known = stored_places(shapes, family.fused)
    factors, saved, found = dict[tuple[str, str], dict[str, Tensor]](), set[str](), dict[str, Change]()

    def located(name: str) -> tuple[list[Place], tuple[int, ...]]:
        require(
            name in known,
            f"{place} adapts {name}, which this {family.name} model does not have; it is an adapter of another model.",
            CheckpointError,
        )
        return known[name], joined_shape(known[name])

    for name, value in stored.items():
        inner = name.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(inner):
            factors.setdefault((match["path"], match["kind"] or ""), {})[match["factor"]] = value
        elif match := _ROWS.fullmatch(inner):
            new = rename(f"{match['path']}.weight", family.renames)
            found[new] = Change(located(new)[0], value, rows=_rows(config, match["path"], new, value, empty, place))
            saved.add(match["path"])
        elif (match := _SAVED.fullmatch(inner)) and name != inner:
            new = rename(f"{match['path']}.{match['kind']}", family.renames)
            places, size = located(new)
            require(
                value.shape == size,
                f"{place}: {new} is {list(value.shape)}, but in the model {list(size)}.",
                CheckpointError,
            )
            found[new] = Change(places, value)
            saved.add(match["path"])
        else:
            raise CheckpointError(f"{place / ADAPTER_WEIGHTS} has {name!r}, which is not a factor of a LoRA weight.")
    for (path, kind), parts in factors.items():
        new = rename(f"{path}.weight", family.renames)
        found[new] = _product(path, parts, *located(new), bool(kind), config, empty, place)
    _check_complete(config, {path for path, _ in factors}, saved, weights, family, place)
    _check_tied(config, found, empty, place)
    return found


def _check_tied(config: dict[str, Any], found: Mapping[str, Change], empty: "PreTrainedModel", place: Path) -> None:
    """Check that the adapter determines the value of every weight that the model ties to another.

    A product changes one of them, as in peft. A weight that was trained in full does so in some classes only: in
    LLaDA's, the head reads the trained embedding.
    """
    kept = [change for change in found.values() if not change.rows]
    saved = {one.name for change in kept if isinstance(change.value, Tensor) for one in change.places}
    adapted = {one.name for change in kept for one in change.places}
    for pair in map(set, empty.all_tied_weights_keys.items()):
        require(
            not pair & adapted or (pair & saved in (set(), pair) and not config.get("ensure_weight_tying")),
            f"{place} adapts {' and '.join(sorted(pair & adapted))}, which config.json ties to another weight, and "
            f"does not say whether that one changes too. Merge the adapter with peft, and save the model with both "
            f"weights (tie_word_embeddings: false).",
            CheckpointError,
        )


def _config(place: Path) -> dict[str, Any]:
    """adapter_config.json of a plain LoRA."""
    file = place / ADAPTER_CONFIG
    try:
        config = read_json(file)
        read_as(str, "peft_type", config.get("peft_type"))
        for key, patterns, kind in (("r", "rank_pattern", Count), ("lora_alpha", "alpha_pattern", Positive)):
            read_as(kind, key, config.get(key))
            for pattern, value in (config.get(patterns) or {}).items():
                re.compile(pattern)
                read_as(kind, pattern, value)
        for key in ("use_rslora", "ensure_weight_tying"):
            read_as(bool | None, key, config.get(key))
        for key in ("target_modules", "exclude_modules", "modules_to_save"):
            _named(read_as(str | list, key, config.get(key) or []), "")
        if isinstance(config.get(key := "trainable_token_indices"), list):
            config[key] = {"embed_tokens": config[key]}  # as in peft
        read_as(dict | None, key, config.get(key))
    except (SinklensError, AttributeError, re.error) as error:
        raise _incomplete(place, error) from error
    for key, value in config.items():
        require(
            key in (*_READ, *_UNUSED) or value in _PLAIN.get(key, _EMPTY),
            f"{file} has {key} = {value!r}, which is not plain LoRA; merge it with peft.",
            CheckpointError,
        )
    return config


def _incomplete(place: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{place} is no complete adapter of peft ({type(error).__name__}: {error}). It holds {ADAPTER_CONFIG} and "
        f"{ADAPTER_WEIGHTS}; download both again, or remove them to load the model without its adapter."
    )


def _product(
    path: str, parts: dict[str, Tensor], places: list[Place], size: tuple[int, ...], embeds: bool,
    config: dict[str, Any], empty: "PreTrainedModel", place: Path,
) -> Change:  # fmt: skip
    """What is added to a weight [*size], whose module is called `path` in the authors' class."""
    from transformers.pytorch_utils import Conv1D

    turned = embeds or isinstance(empty.get_submodule(places[0].name.rpartition(".")[0]), Conv1D)
    wanted = size[::-1] if turned else size
    rank, alpha = (
        next((value for one, value in (config.get(key) or {}).items() if re.match(rf"(.*\.)?({one})$", path)), default)
        for key, default in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"]))
    )
    found = {letter: tuple(value.shape) for letter, value in parts.items()}
    require(
        len(wanted) == 2 and found == {"A": (rank, wanted[-1]), "B": (wanted[0], rank)},
        f"{place / ADAPTER_WEIGHTS}: the factors of {path} have the shapes {found}; rank {rank} and the model need A "
        f"{(rank, wanted[-1])} and B {(wanted[0], rank)}.",
        CheckpointError,
    )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Change(places, LowRank(parts["A"], parts["B"]), scale, turned)


def _rows(
    config: dict[str, Any], path: str, name: str, value: Tensor, empty: "PreTrainedModel", place: Path
) -> tuple[int, ...]:
    """The tokens whose rows of the embedding `value` replaces."""
    named = config.get("trainable_token_indices")
    ids = next((rows for one, rows in (named or {}).items() if f".{path}".endswith(f".{one}")), None)
    table = empty.get_input_embeddings().weight
    require(
        len(named or ()) == 1
        and isinstance(ids, list)
        and empty.get_parameter(name) is table
        and tuple(value.shape) == (len(ids), table.shape[1])
        and all(type(one) is int and 0 <= one < len(table) for one in ids),
        f"{place}: trainable_token_indices = {named!r} does not fit {path}, {list(value.shape)}: it names tokens of "
        f"the input embedding, {list(table.shape)}, and each has a row.",
        CheckpointError,
    )
    return tuple(ids or ())


def _named(names: str | Iterable[str], path: str) -> bool:
    """Whether a list of names, or a regular expression, names a module."""
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, path) is not None
    return any(f".{path}".endswith(f".{one}") for one in names)


def _targeted(config: Mapping[str, Any], path: str) -> bool:
    """Whether the config names a module."""
    targets, layers = config.get("target_modules") or (), config.get("layers_to_transform")
    saves = any(f".{one}." in f".{path}." for one in config.get("modules_to_save") or ())
    if saves or _named(config.get("exclude_modules") or (), path) or not _named(targets, path):
        return False
    if layers in (None, []) or isinstance(targets, str):
        return True
    number = re.match(r".*?\.[^.]*\.(\d+)\.", path)
    return number is not None and int(number[1]) in (layers if isinstance(layers, list) else [layers])


def _check_complete(
    config: Mapping[str, Any], adapted: set[str], saved: set[str], weights: Weights, family: Family, place: Path
) -> None:
    """Check that the tensors are those of the modules that the config names."""
    require(adapted, f"{place / ADAPTER_WEIGHTS} has no factors of LoRA weights.", CheckpointError)
    if stray := sorted(path for path in adapted if not _targeted(config, path)):
        raise CheckpointError(
            f"{place} adapts {stray[0]}, but target_modules in {ADAPTER_CONFIG} does not name it; the files do not "
            f"belong together."
        )
    lacking = [one for one in config.get("modules_to_save") or () if not any(f"{one}." in f"{path}." for path in saved)]
    lacking += [one for one in config.get("trainable_token_indices") or () if not any(one in path for path in saved)]
    if config["target_modules"] != "all-linear":  # what peft takes for a linear layer is not known here
        held = {rename(f"{path}.", family.renames) for path in adapted}
        modules = {stored.rpartition(".")[0] for stored in weights.original.values() if ".experts." not in stored}
        named = sorted(path for path in modules if _targeted(config, path))
        lacking += [path for path in named if rename(f"{path}.", family.renames) not in held]
    if lacking:
        raise CheckpointError(
            f"{place}: {ADAPTER_CONFIG} names {lacking[0]}, for which {ADAPTER_WEIGHTS} has no tensors. It is "
            f"incomplete, or an adapter of another model."
        )


@torch.no_grad()
def merge(hf: "PreTrainedModel", changes: Mapping[str, Change], tied: Mapping[str, str], place: Path) -> None:
    """Change the weights of a model as an adapter says, in float32 or wider; adapted weights are no longer tied.

    Raises:
        CheckpointError: a weight stays on disk.
    """
    adapted = {one.name for change in changes.values() if not change.rows for one in change.places}
    for target, source in tied.items():
        if adapted & {target, source}:
            module, _, name = target.rpartition(".")
            setattr(hf.get_submodule(module), name, Parameter(hf.get_parameter(source).clone()))
            hf.config.get_text_config().tie_word_embeddings = False
    for places, value, scale, turned, rows in changes.values():
        if isinstance(value, LowRank):
            weight = hf.get_parameter_or_buffer(places[0].name)
            a, b = (factor.to(weight.device, torch.promote_types(weight.dtype, torch.float32)) for factor in value)
            product = (scale * b) @ a
            pieces = (product.mT if turned else product).split([one.shape[0] for one in places])
        else:
            pieces = (value,) if rows else value.split([one.shape[0] for one in places])
        for one, piece in zip(places, pieces, strict=True):
            weight = hf.get_parameter_or_buffer(one.name)
            require(
                not weight.is_meta,
                f"{place} adapts {one.name}, which device_map= leaves on another device's storage; load the "
                f"checkpoint with device=.",
                CheckpointError,
            )
            index = list(rows) if rows else one.index
            piece = piece.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
            weight[index] = (weight[index] + piece if isinstance(value, LowRank) else piece).to(weight.dtype)
