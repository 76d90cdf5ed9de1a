"""Finds the files of a checkpoint and checks its weights before loading any of them.

Only safetensors files are read. The names and shapes in their headers are compared with those of the model that the
config describes, so a checkpoint with missing, unexpected, misshapen or truncated weights is rejected before anything
is built. transformers alone would only warn and continue with random weights.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sinklens.errors import CheckpointError, nearest, require
from sinklens.families import FAMILIES, Family
from sinklens.model import fetching
from sinklens.model.fetching import REPOSITORY
from sinklens.utils.documents import read_json
from sinklens.utils.folders import inside
from sinklens.utils.hub import download, on_hub, refuse_missing, refuse_revision

SHIPPED_FOLDER = "shipped"
REPOSITORY_MODELS = ("tiny-llada-skills", "tiny-llama-skills", "tiny-text", "tiny-text-causal")
"""Models that only studies use; they lie in `REPOSITORY`, which a wheel lacks."""
_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Weights:
    """The contents of the headers of a checkpoint's safetensors files.

    Attributes:
        shapes: weight name in transformers' naming -> shape.
        dtype: element type of most of the values.
        original: weight name in transformers' naming -> name in the files.
    """

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    original: dict[str, str]

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def shipped_names() -> list[str]:
    """Names of the checkpoints that ship with sinklens; in a checkout, also of those of the repository alone."""
    return sorted(_shipped())


def _shipped() -> dict[str, Path]:
    """Name -> folder."""
    packed = Path(str(resources.files("sinklens.model") / SHIPPED_FOLDER))
    folders = [*(packed.iterdir() if packed.is_dir() else ()), *(REPOSITORY / name for name in REPOSITORY_MODELS)]
    return {folder.name: folder for folder in folders if (folder / "config.json").is_file()}


def find_checkpoint(
    name_or_path: str | Path, revision: str | None = None, weights: bool = True, otherwise: str = "pass revision='main'"
) -> Path:
    """The local folder of a checkpoint, with its config.json, *.safetensors and tokenizer.

    Args:
        name_or_path: tried in this order: a shipped name, or one that `sinklens fetch` fetched; a folder, which is
            returned; a name on the hub, whose files are downloaded and cached.
        revision: branch, tag or commit on the hub; None means the main branch.
        weights: whether they are downloaded too.
        otherwise: what the error advises if a hub name begins with the name of a local folder.

    Raises:
        CheckpointError: nothing has this name, there is no network, or `revision` was given for a folder or is missing
            for a name on the hub that begins like a folder here.
    """
    path = _shipped().get(str(name_or_path), Path(name_or_path))
    if str(name_or_path) in (fetching.BASE, *fetching.ARMS) and not path.is_dir():
        path = fetching.fetched(str(name_or_path))
    if (str(name_or_path) and path.is_dir()) or (path.is_file() and path.suffix == ".gguf"):
        refuse_revision(path, revision)
        return _of_gguf(path)
    require(
        not path.is_file(),
        f"{path} is a file; pass the folder that contains config.json and the weights, or a GGUF file.",
        CheckpointError,
    )
    require(
        str(name_or_path) not in REPOSITORY_MODELS,
        f"{name_or_path} comes with sinklens's repository, not with the installed package; pass the folder "
        f"models/{name_or_path} of a checkout.",
        CheckpointError,
    )
    known = [*shipped_names(), fetching.BASE, *fetching.ARMS]
    require(
        on_hub(name_or_path) and str(name_or_path).count("/") == 1,
        f"{str(name_or_path)!r} is neither a folder nor a shipped checkpoint ({', '.join(known)}) nor a hub name like "
        f"'GSAI-ML/LLaDA-8B-Instruct'.{nearest(str(name_or_path), known)}",
        CheckpointError,
    )
    refuse_missing(name_or_path, revision, otherwise)
    wanted = [pattern for pattern in _DOWNLOADED if weights or pattern != "*.safetensors"]
    return download(str(name_or_path), revision, wanted)


def _of_gguf(path: Path) -> Path:
    """The checkpoint folder of a GGUF file, or of a folder that holds one and no other weights; else `path`."""
    held = list(path.glob("*.gguf")) if path.is_dir() else [path]
    if not held or any(path.glob("*.safetensors")):
        return path
    require(
        len(held) == 1,
        f"{path} holds {len(held)} GGUF files; pass the path of one of them.",
        CheckpointError,
    )
    from sinklens.model.gguf import converted

    return converted(held[0])


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot in the hub's cache, which is its folder's name; None for other folders."""
    is_commit = folder.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", folder.name)
    return folder.name if is_commit else None


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder.

    Raises:
        CheckpointError: the file is missing or not valid JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        _refuse_lone_adapter(folder)
        raise CheckpointError(
            f"{folder} has no config.json; a checkpoint folder contains config.json and *.safetensors."
        )
    return read_json(file)


def _refuse_lone_adapter(folder: Path) -> None:
    """Say of which model an adapter is, if `folder` holds an adapter without one."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise CheckpointError(
            f"{folder} holds only an adapter{f' of {base}' if base else ''}. Load the model with it, as in "
            f"sinklens.load({base or '...'!r}, adapter={str(folder)!r})."
        )


def read_headers(folder: Path, family: Family, quantized: bool = False) -> Weights:
    """Names, shapes and element type of all stored weights; reads only the headers.

    Args:
        quantized: whether integers and 8-bit numbers may be among them; the element type is then that of the others.

    Raises:
        CheckpointError: there are no safetensors files (pickles are rejected), a shard is missing, or a file is
            truncated or corrupt.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    original: dict[str, str] = {}
    dtypes = Counter[str]()
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                _check_names(list(opened.keys()), family, file)
                for stored in opened.keys():  # noqa: SIM118 — safe_open is not a mapping
                    if family.ignored and re.search(family.ignored, stored):
                        continue
                    part = opened.get_slice(stored)
                    name = rename(stored, family.renames)
                    shapes[name], original[name] = tuple(part.get_shape()), stored
                    dtypes[part.get_dtype()] += torch.Size(shapes[name]).numel()
        except SafetensorError as error:
            raise CheckpointError(f"{file} is truncated or corrupt ({error}). Download it again.") from error
    if quantized:
        dtypes = Counter({kind: size for kind, size in dtypes.items() if kind in DTYPES})
    main = max(dtypes, key=lambda kind: dtypes[kind], default="F32")
    require(
        main in DTYPES,
        f"{folder}: weights of type {main} are not supported; use {', '.join(DTYPES)}.",
        CheckpointError,
    )
    return Weights(shapes, DTYPES[main], original)


def _check_names(stored: list[str], family: Family, file: Path) -> None:
    """Check that no weight is named as only another family names it."""
    foreign = [name for name in stored if family.foreign and re.match(family.foreign, name)]
    if not foreign:
        return
    fitting = [
        one.name
        for one in FAMILIES.values()
        if one.architecture == family.architecture
        and all(rename(name, one.renames) != name for name in foreign)
        and not any(one.foreign and re.match(one.foreign, name) for name in stored)
    ]
    hint = f" If it is one of {' or '.join(fitting)}, pass family=." if fitting else ""
    raise CheckpointError(
        f"{file}: {len(foreign)} weights ({', '.join(foreign[:3])}) are named as in another family than "
        f"{family.name}, so its model may differ.{hint}"
    )


def rename(stored: str, renames: Mapping[str, str]) -> str:
    """The name of a stored weight in transformers' naming, by `Family.renames`."""
    for pattern, replacement in renames.items():
        stored = re.sub(pattern, replacement, stored)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    single = folder / "model.safetensors"
    if single.is_file():  # before the index: transformers, which reads the weights, checks in this order
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            content = read_json(index)
            dict.keys(content["metadata"])  # transformers, which reads the weights, requires it
            names = sorted(set(content["weight_map"].values()))
            shards = [inside(folder, name) for name in names]
            missing = [shard.name for shard in shards if not shard.is_file()]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} is corrupt ({error!s:.300}); download it again.") from error
        require(
            not missing,
            f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing)}.",
            CheckpointError,
        )
        return shards
    require(
        not any(folder.glob("model-*-of-*.safetensors")),
        f"{folder} has shards but no {index.name}, which lists their contents. Download it too.",
        CheckpointError,
    )
    _refuse_lone_adapter(folder)
    pickles = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
    note = f" It has pickles ({', '.join(pickles[:3])}), which can run code and are rejected." if pickles else ""
    raise CheckpointError(f"{folder} has no model.safetensors.{note} Convert the weights to safetensors.")


def check_weights(weights: Weights, expected: dict[str, tuple[int, ...]], tied: set[str], where: str) -> None:
    """Check the stored weights against the model's parameters.

    Args:
        expected: names and shapes of the model's parameters.
        tied: parameters that may be absent because they share another parameter's values.

    Raises:
        CheckpointError: weights are missing, unexpected, or of another shape.
    """
    missing = sorted(set(expected) - set(weights.shapes) - tied)
    unexpected = sorted(weights.original[name] for name in set(weights.shapes) - set(expected) - tied)
    shapes = [
        f"{weights.original[name]} is {list(shape)}, the config requires {list(expected[name])}"
        for name, shape in weights.shapes.items()
        if name in expected and shape != expected[name]
    ]
    both = ((missing, "are missing"), (unexpected, "have no place in the model"))
    problems = [f"{len(names)} weights {what} ({', '.join(names[:4])})" for names, what in both if names] + shapes[:4]
    require(
        not problems,
        f"{where}: {'; '.join(problems)}. Nothing was loaded; check that config and weights match.",
        CheckpointError,
    )
