"""Checks for every study: reproducible numbers, for any batch size, and files that open."""

import io

import numpy as np
import pandas
import pytest
import xarray as xr

from sinklens.analyses import find
from sinklens.tasks.word_problems import held_out

PROMPTS = [*(problem.prompt for problem in held_out(2)), "Is $x_1$ a _b_ or \n\n $\\frac{ 中?\nAnswer:"]
SETTINGS = {"gen_length": 6, "steps": 6, "block_length": 3, "threshold": 0.95}  # rows wait for others
STUDIES = ("existence", "dynamics", "layers", "token_types", "split", "masked_sinks", "events", "diagnose")
NUMBERS = ["estimate", "low", "high"]


@pytest.mark.parametrize("name", STUDIES)
def test_a_second_run_agrees_for_any_batch_size_and_its_tables_are_identical(name, tiny_llada, tiny_llama, tmp_path):
    kind, models = find(name), [tiny_llada, tiny_llama]
    first = kind(batch=3, settings=SETTINGS).run(models, PROMPTS, tmp_path)
    again = kind(batch=3, settings=SETTINGS).tables(first.measured)
    apart = kind(batch=1, settings=SETTINGS).run(models, PROMPTS)
    for table, values in first.tables.items():
        csv = (tmp_path / f"{name}-{table}.csv").read_bytes()
        assert csv == again[table].to_csv(index=False).encode()
        read = pandas.read_csv(io.BytesIO(csv), keep_default_na=False)
        assert list(read.columns) == list(values.columns)
        other = apart.tables[table]
        assert len(values) == len(other)
        words = [column for column in values if values[column].dtype.kind not in "fi"]
        assert values[words].equals(other[words])
        np.testing.assert_allclose(values[NUMBERS], other[NUMBERS], rtol=1e-4, atol=1e-4)
    assert {file.suffix for file in first.files} == {".csv", ".png", ".svg", ".nc", ".json"}
    for file in first.files:
        assert file.stat().st_size > 100
        if file.suffix == ".png":
            assert file.with_suffix(".svg") in first.files
            assert file.read_bytes().startswith(b"\x89PNG")
    data = xr.load_dataset(tmp_path / f"{name}.nc", engine="h5netcdf")
    assert data.sizes["prompt"] == 3
    assert data["model"].values.tolist() == ["tiny-llada", "tiny-llama"]
