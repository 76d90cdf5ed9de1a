"""SAEs in the format of dictionary_learning, in which DLM-Scope (Wang et al., 2602.05859) publishes those of LLaDA.

A folder holds config.json, of which ``trainer`` describes the SAE, and ``ae.pt``, a pickle of tensors. torch reads it
with ``weights_only=True``, which runs no code. Biases are saved for activations as they are, whatever scaling was used
in training. The stored ``threshold`` belongs to another activation, which the library does not use by default.

Limitation: the files do not say at which positions an SAE was trained. DLM-Scope says it in the name of a repository:
"mask" for masked positions, "unmask" for the others.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklens.errors import CheckpointError, require
from sinklens.utils.documents import read_json

DICTIONARY, DICTIONARY_CONFIG = "ae.pt", "config.json"
_NAMES = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}


def read_dictionary(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of the SAE in `folder`, in SAELens's keys and shapes.

    Raises:
        CheckpointError: a file is missing or broken, the SAE is not a TopK SAE of a residual stream, or the two files
            contradict each other.
    """
    config = read_json(folder / DICTIONARY_CONFIG)
    try:
        about, stored = config["trainer"], torch.load(folder / DICTIONARY, map_location="cpu", weights_only=True)
        read = {key: about.get(key) for key in ("dict_class", "submodule_name")} | {"io": config["buffer"]["io"]}
        layer, k = about["layer"], int(stored.pop("k", about["k"]))
        stored.pop("threshold", None)
        weights = {
            _NAMES.get(name, name): (value.T if value.ndim == 2 else value).contiguous()
            for name, value in stored.items()
        }
    except Exception as error:  # a forged pickle or config can raise anything
        raise CheckpointError(
            f"{folder} has no readable {DICTIONARY} and {DICTIONARY_CONFIG} of dictionary_learning "
            f"({type(error).__name__}: {error!s:.200}). Download them again."
        ) from error
    expected = {"dict_class": "AutoEncoderTopK", "submodule_name": f"resid_post_layer_{layer}", "io": "out"}
    require(
        read == expected and k == about["k"],
        f"{folder} holds an SAE with {read} and k = {k}; supported are {expected} and the k of {DICTIONARY_CONFIG}, "
        f"{about['k']!r:.20}.",
        CheckpointError,
    )
    return {
        "architecture": "topk",
        "k": k,
        "d_in": about.get("activation_dim"),
        "d_sae": about.get("dict_size"),
        "hook_name": f"blocks.{layer}.hook_resid_post",
        "model_name": about.get("lm_name"),
    }, weights
