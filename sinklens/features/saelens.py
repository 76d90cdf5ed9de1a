"""SAEs in SAELens's format: a folder with ``cfg.json`` and ``sae_weights.safetensors``.

SAELens cannot be installed beside sinklens (it needs an earlier TransformerLens), so its folders are read here. `READ`
lists the architectures that are known; SAELens stores a finished BatchTopK SAE as "jumprelu". What would change a
number and is not implemented is refused by name: other architectures, activation functions and normalizations, and
weights that are left over. Points and the model are in ``metadata`` (version 6), in ``meta``, or at the top of the
config (earlier versions).

Pitfall: files of SAELens before 6 that normalize activations leave the scaling to the caller. They are refused; load
such an SAE with SAELens, fold its norm, and save it again.
"""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError, nearest, require
from sinklens.features.autoencoder import SAEArchitecture, SparseAutoencoder
from sinklens.features.dictionaries import DICTIONARY, DICTIONARY_CONFIG, read_dictionary
from sinklens.utils.arguments import checked
from sinklens.utils.atomic import write_file
from sinklens.utils.documents import read_json
from sinklens.utils.hub import local
from sinklens.utils.integers import as_integer

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
SHIPPED_FOLDER = "shipped"
SHARED = ("W_enc", "b_enc", "W_dec", "b_dec")
READ: dict[SAEArchitecture, tuple[str, ...]] = {
    "standard": SHARED,
    "topk": SHARED,
    "jumprelu": (*SHARED, "threshold"),
}
"""The architectures, by SAELens's names and those of `SparseAutoencoder`, and their weights."""
ONLY: dict[str, tuple[Any, ...]] = {
    "normalize_activations": ("none", None, False),
    "finetuning_scaling_factor": (False, None),
    "reshape_activations": ("none", "hook_z", None),  # heads are flattened at every point
    "noise_scale": (0, 0.0, None),
    "hook_head_index": (None,),
}
"""Keys of the config that change what an SAE computes, and the values that are supported."""
ACTIVATIONS: dict[SAEArchitecture, tuple[str | None, ...]] = {
    "standard": ("relu", None),
    "topk": ("topk", "relu", None),
    "jumprelu": ("relu", "jumprelu", None),
}
OLD_NAMES = {
    "hook_point": "hook_name",
    "hook_point_head_index": "hook_head_index",
    "activation_fn_str": "activation_fn",
}


def shipped_saes() -> list[str]:
    """Names of the SAEs that ship with sinklens."""
    folder = resources.files("sinklens.features") / SHIPPED_FOLDER
    return sorted(entry.name for entry in folder.iterdir() if (entry / CONFIG).is_file()) if folder.is_dir() else []


@checked
def load_sae(path: str | Path, device: str | torch.device = "cpu", *, revision: str | None = None) -> SparseAutoencoder:
    """Read an SAE, in float32.

    Args:
        path: a folder in SAELens's format or in that of dictionary_learning; the name of a shipped SAE; or a
            repository on the hub and a folder in it, such as
            "AwesomeInterpretability/llada-mask-topk-sae/resid_post_layer_26/trainer_2".
        device: where the weights are put.
        revision: branch, tag or commit on the hub; None means the main branch.

    Raises:
        CheckpointError: there is no such folder, it could not be downloaded, a file is missing or broken, or the SAE is
            of a kind that is not supported; the message names the key or the weight.
    """
    path = _found(path, revision)
    config, weights = read_dictionary(path) if (path / DICTIONARY).is_file() else (_config(path), _weights(path))
    kind = _architecture(config, path)
    about = {**config, **(config.get("meta") or {}), **(config.get("metadata") or {})}
    for name, allowed in {**ONLY, "activation_fn": ACTIVATIONS[kind]}.items():
        shown = ", ".join(repr(value) for value in allowed if value is not None) or "None"
        require(
            about.get(name) in allowed,
            f"{path}: {name}={about.get(name)!r} is not supported for architecture {kind!r}; only {shown}.",
            CheckpointError,
        )
    missing = [name for name in READ[kind] if name not in weights]
    surplus = [name for name in weights if name not in READ[kind]]
    require(
        not missing and not surplus,
        f"{path}: the weights must be {', '.join(READ[kind])} for architecture {kind!r}; missing: "
        f"{', '.join(missing) or 'none'}; not known: {', '.join(surplus) or 'none'}.",
        CheckpointError,
    )
    try:
        sae = SparseAutoencoder(
            **{name: value.float() for name, value in weights.items()},
            architecture=kind,
            k=_k(config, path) if kind == "topk" else None,
            subtract_b_dec=bool(config.get("apply_b_dec_to_input", True)),
            rescale=bool(config.get("rescale_acts_by_decoder_norm", False)),
            point=str(about.get("hook_name") or ""),
            model=str(about.get("model_name") or ""),
        )
    except (SettingError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in ("d_in", "d_sae"):
        require(
            config.get(name, getattr(sae, name)) == getattr(sae, name),
            f"{path}: the config says {name} {config.get(name)}, but the weights have {getattr(sae, name)}; the two "
            f"files belong to different SAEs.",
            CheckpointError,
        )
    return sae.to(device)


@checked
def save_sae(sae: SparseAutoencoder, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `sae` in SAELens's format (of version 6), which `load_sae` and SAELens read.

    Args:
        sae: an SAE.
        path: created if it is missing; its config and weights are replaced.
        dtype: type of the stored weights.
    """
    tensors = {name: getattr(sae, name).to(dtype).contiguous().cpu() for name in READ[sae.architecture]}
    config: dict[str, Any] = {
        "architecture": sae.architecture,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": sae.subtract_b_dec,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"model_name": sae.model, "hook_name": sae.point, "sae_lens_version": "6.0.0"},
    }
    if sae.architecture == "topk":
        config |= {"k": sae.k, "rescale_acts_by_decoder_norm": sae.rescale}
    write_file(Path(path) / WEIGHTS, save(tensors))
    write_file(Path(path) / CONFIG, json.dumps(config, indent=1) + "\n")


def _found(folder: str | Path, revision: str | None) -> Path:
    if str(folder) in shipped_saes():
        return Path(str(resources.files("sinklens.features") / SHIPPED_FOLDER / str(folder)))
    path = local(folder, revision, (CONFIG, WEIGHTS, DICTIONARY_CONFIG, DICTIONARY))
    require(
        path.is_dir(),
        f"{str(folder)!r} is neither a folder nor a shipped SAE ({', '.join(shipped_saes()) or 'there are none'}) "
        f"nor a folder of a repository on the hub.{nearest(str(folder), shipped_saes())}",
        CheckpointError,
    )
    return path


def _config(path: Path) -> dict[str, Any]:
    found = {OLD_NAMES.get(name, name): value for name, value in read_json(path / CONFIG).items()}
    for name in ("meta", "metadata", "activation_fn_kwargs"):
        require(
            isinstance(found.get(name), dict | None),
            f"{path / CONFIG} has {name} = {found.get(name)!r:.80}; it must be an object.",
            CheckpointError,
        )
    return found


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} has no readable {WEIGHTS}: {error}. Download it again, or convert other files to it."
        ) from error


def _architecture(config: Mapping[str, Any], path: Path) -> SAEArchitecture:
    kind: Any = config.get("architecture", "standard")
    if kind == "standard" and config.get("activation_fn") == "topk":  # SAELens before 4
        kind = "topk"
    require(
        isinstance(kind, str) and kind in READ,
        f"{path}: architecture {kind!r} is not supported; known are {', '.join(READ)}. Any object with encode "
        f"and decode can be spliced, so write one for it.",
        CheckpointError,
    )
    return kind


def _k(config: Mapping[str, Any], path: Path) -> int:
    k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    if (number := as_integer(k)) is None:
        raise CheckpointError(f"{path}: architecture 'topk' needs an integer k in its config; got {k!r}.")
    return number
