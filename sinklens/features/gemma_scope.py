"""SAEs and transcoders in Gemma Scope's layout: one ``params.npz`` each (Lieberum et al., 2408.05147).

The file holds ``W_enc`` [d_in, d_sae], ``b_enc``, ``W_dec`` [d_sae, d_in], ``b_dec`` and ``threshold``; the SAE is a
JumpReLU that does not subtract b_dec before encoding. Nothing in the file names the model or the point, so the caller
does.

Pitfall: the same keys describe Gemma Scope's transcoders, which write to another point than they read; the folder's
name says which they are. Without ``point_out=`` one is taken for an SAE.
"""

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from sinklens.errors import CheckpointError, SettingError
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.saelens import check_names

FILE = "params.npz"
TENSORS = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")


def load_gemma_scope(
    path: str | Path, point: str = "", model: str = "", device: str | torch.device = "cpu", *, point_out: str = ""
) -> SparseAutoencoder:
    """Read an SAE in Gemma Scope's layout, in float32.

    Args:
        path: the file, or the folder that contains ``params.npz``.
        point: the hook point of its activations, such as ``"blocks.20.hook_resid_post"``.
        model: name of the model.
        device: where the weights are put.
        point_out: of a transcoder, the hook point that it writes to, such as ``"blocks.20.hook_mlp_out"``.

    Raises:
        CheckpointError: the file is missing or broken, or does not hold these arrays alone.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
    except (OSError, ValueError, BadZipFile, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} is no readable {FILE}: {error}. Pass the file or its folder.") from error
    check_names(arrays, TENSORS, file)
    tensors: dict[str, Any] = {name: torch.from_numpy(np.array(arrays[name], dtype=np.float32)) for name in TENSORS}
    try:
        sae = SparseAutoencoder(
            **tensors, architecture="jumprelu", subtract_b_dec=False, point=point, model=model,
            transcoder=bool(point_out), point_out=point_out,
        )  # fmt: skip
    except (SettingError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    return sae.to(device)
