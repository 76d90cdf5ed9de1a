"""A model from its config alone: where the config is found, and the model of fake tensors.

Pitfall: a folder of the hub's cache may hold the config and no weights afterwards; loading the model completes it.
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklens.errors import CheckpointError

if TYPE_CHECKING:
    from sinklens.model import Model

CONFIGS = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]  # what is read of a checkpoint on the hub


@contextmanager
def config_folder(source: str | Path) -> Iterator[Path]:
    """The folder with the config.json of `source`, without its weights.

    Raises:
        CheckpointError: nothing has this name.
    """
    from sinklens.model.files import find_checkpoint, shipped_names

    path = Path(source)
    if path.is_file():
        if path.name == "config.json":
            yield path.parent
            return
        with tempfile.TemporaryDirectory(prefix="sinklens-plan-") as folder:
            shutil.copy(path, Path(folder) / "config.json")
            yield Path(folder)
        return
    if path.suffix == ".json":
        raise CheckpointError(f"there is no file {source}; pass a config.json, a folder, or a name on the Hub.")
    on_hub = str(source) not in shipped_names() and not path.is_dir() and str(source).count("/") == 1
    yield _download_config(str(source)) if on_hub and not path.is_absolute() else find_checkpoint(source)


def _download_config(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=CONFIGS))
    except (OSError, HTTPError, HFValidationError) as error:
        reason = next(iter(str(error).splitlines()), "no reason given").rstrip(".")
        raise CheckpointError(
            f"could not download the config of {name!r}: {type(error).__name__}: {reason}. Check the name and the "
            f"network, or download config.json elsewhere and pass that file."
        ) from error


def fake_model(folder: Path, load: Mapping[str, Any], dtype: torch.dtype) -> "Model":
    """A model of fake tensors; call it inside `without_memory`."""
    from sinklens.model.loading import LoadRequest, outline
    from sinklens.model.model import Model

    given = {key: value for key, value in load.items() if key in ("family", "block_length", "tokenizer")}
    return Model(outline(folder, LoadRequest(**given), device="cpu", dtype=dtype))
