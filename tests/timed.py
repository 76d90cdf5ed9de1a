"""Networks of the reference data, also as if they had been trained to read the noise level."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import sinklens


def loader(references: Path, made: Callable[[str], Path]) -> Callable[..., sinklens.Model]:
    """Loads a network by the name of its folder; with " timed" behind it, a copy that reads the noise level.

    Args:
        references: the folders.
        made: makes a temporary folder.
    """

    def load(name: str, **options: Any) -> sinklens.Model:
        folder = references / name.split()[0]
        if name.endswith("timed"):
            folder = copytree(folder, made("timed") / folder.name)
            config = json.loads((folder / "config.json").read_text()) | {"time_conditioning": True}
            (folder / "config.json").chmod(0o644)
            (folder / "config.json").write_text(json.dumps(config))
        return sinklens.load(folder, family="sedd" if folder.name == "sedd" else None, **options)

    return load
