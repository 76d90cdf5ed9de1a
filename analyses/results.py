"""The files of a finished study, and the warning about files that will be replaced.

    NAME-TABLE.csv, NAME.nc (every prompt's measurements), NAME-FIGURE.png and .svg, NAME.json (the manifest)

Pitfall: files of an earlier run that the new run does not write, such as a table made only for several models, remain.
The manifest lists the tables of the newest run under ``tables``, and `sinklens table` prints only these.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr

from sinklens.errors import CheckpointError
from sinklens.utils.atomic import atomic_write, write_file
from sinklens.utils.documents import read_json
from sinklens.utils.escaping import in_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]


@dataclass(frozen=True)
class Findings:
    """What a study found: its tables, and the files that it wrote.

    Attributes:
        measured: model name -> every prompt's measurements, with the axis ``prompt``.
        examples: model name -> data of one prompt's run for the figures, for the studies and models that have it.
        tables: name -> table.
        manifest: everything that determines the numbers.
        files: the files written; empty without a folder.
    """

    measured: dict[str, xr.Dataset]
    examples: dict[str, xr.Dataset]
    tables: "dict[str, DataFrame]"
    manifest: dict[str, Any]
    files: tuple[Path, ...] = ()


def write(name: str, figures: Callable[..., "Mapping[str, Figure]"], findings: Findings, out: Path) -> Findings:
    """Write tables, figures, measurements and finally the manifest of the study `name`."""
    stacked = xr.concat(list(findings.measured.values()), dim="model", join="outer", combine_attrs="drop_conflicts")
    contents: dict[Path, str | bytes] = {
        **{out / f"{name}-{title}.csv": in_csv(table) for title, table in findings.tables.items()},
        out / f"{name}.nc": bytes(stacked.assign_coords(model=list(findings.measured)).to_netcdf(engine="h5netcdf")),
        out / f"{name}.json": json.dumps(findings.manifest, indent=1, sort_keys=True) + "\n",
    }
    drawn = draw(name, figures(findings.measured, findings.examples), out)
    for file, content in contents.items():
        write_file(file, content)
    return replace(findings, files=(*contents, *drawn))


def warn_of_others(file: Path, manifest: Mapping[str, Any]) -> None:
    """Warn, before anything is measured, that the results described by the manifest `file` will be replaced."""
    try:
        before = read_json(file)
        summary = f"{', '.join(model['name'] for model in before['models'])}; prompts: {before['prompts']}"
        earlier, now = (
            {**one, "options": {**one["options"], "batch_size": 0}}
            for one in (before, json.loads(json.dumps(manifest)))
        )
    except (CheckpointError, KeyError, TypeError):
        return  # missing, or not the manifest of a study
    if any(earlier.get(key) != now[key] for key in ("options", "models", "prompts_sha256")):
        warnings.warn(
            f"{file.parent} holds another run of this study ({summary}), which this run will replace; to keep it, "
            f"interrupt now and choose another folder (--out).",
            stacklevel=4,
        )


def draw(study: str, figures: "Mapping[str, Figure]", out: Path) -> list[Path]:
    """Write every figure as PNG and SVG; equal numbers give equal bytes."""
    from matplotlib import pyplot

    files = []
    with pyplot.rc_context({"svg.hashsalt": "sinklens"}):  # otherwise ids inside an SVG are random
        for name, figure in figures.items():
            for kind in ("png", "svg"):
                files.append(out / f"{study}-{name}.{kind}")
                with atomic_write(files[-1]) as part:
                    figure.savefig(part, dpi=150, metadata={"Date": None} if kind == "svg" else None)
                figure.set_layout_engine("none")  # keep the layout for the next format
            pyplot.close(figure)
    return files
