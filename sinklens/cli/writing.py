"""Writes the figures of a command, each completely or not at all."""

from pathlib import Path
from typing import Any

from sinklens.utils.atomic import atomic_write


def write_figure(path: Path, figure: Any) -> None:
    with atomic_write(path) as part:
        figure.savefig(part, dpi=150)
