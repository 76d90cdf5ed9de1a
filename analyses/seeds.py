"""The summary of a study over training runs that differ in their seed only, as a file (estimates/seeds.py).

sinklens analyse necessity runs/seed-1 runs/seed-2 runs/seed-3 --seeds
"""

from collections.abc import Mapping
from pathlib import Path

import xarray as xr
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.analyses.estimates.seeds import seeds_table
from sinklens.analyses.estimates.tables import corrected, verdict
from sinklens.analyses.results import Findings
from sinklens.analyses.study import Study
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import in_csv

ENTRIES = 100  # maps of layers and heads or of steps are not summarized


def write_seeds(study: Study, findings: Findings, out: Path, seed: int = 0) -> tuple["DataFrame", Path]:
    """Write ``STUDY-seeds.csv``: `seeds_table` of a study's contrasts and of every measurement with at most `ENTRIES`
    entries; the column ``compared`` is "difference" for the former and "measurement" for the latter. Differences have
    p values, corrected by Holm's method over all of them, and a verdict.
    """
    from pandas import concat

    parts = {
        "difference": {name: _of_prompts(study.contrasts(data), data) for name, data in findings.measured.items()},
        "measurement": findings.measured,
    }
    tables = [
        seeds_table(measured, _summarized(measured), seed, study.scales, compared == "difference").assign(
            compared=compared
        )
        for compared, measured in parts.items()
    ]
    table = concat(tables, ignore_index=True).astype({"seeds": int})
    if not table.empty:
        table = corrected(table.assign(model="")).drop(columns="model")
        table["verdict"] = [
            verdict(row.estimate, row.low, row.high, 0.0, "above 0", "below 0", row.p_holm) if row.p == row.p else ""
            for row in table.itertuples()
        ]
    file = out / f"{study.name}-seeds.csv"
    write_file(file, in_csv(table))
    return table, file


def _of_prompts(contrasts: xr.Dataset, data: xr.Dataset) -> xr.Dataset:
    """The contrasts with the groups of the prompts, which a contrast built from bare arrays lacks."""
    if "prompt_group" not in data.coords or "prompt" not in contrasts.dims:
        return contrasts
    return contrasts.assign_coords(prompt_group=data["prompt_group"])


def _summarized(measured: Mapping[str, xr.Dataset]) -> list[str]:
    """The variables with the axis ``prompt`` and few other entries in every model."""
    first = next(iter(measured.values()))
    return [
        str(name)
        for name, values in first.data_vars.items()
        if "prompt" in values.dims and all(data[name][{"prompt": 0}].size <= ENTRIES for data in measured.values())
    ]
