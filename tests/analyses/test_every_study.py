"""Checks for every study: reproducible numbers, for any batch size, and files that open; prompts of token ids."""

import io

import numpy as np
import pandas
import pytest
import xarray as xr

from sinklens.analyses import find
from sinklens.tasks import held_out

PROMPTS = [*(problem.prompt for problem in held_out(2)), "Is $x_1$ a _b_ or 12 \n\n $\\frac{ 中?\nAnswer:"]
OBSERVED = ("existence", "dynamics", "edits", "swaps", "token_types", "events", "texts")
EFFECTS = ("necessity", "content", "definitions", "mechanism")
LONG = ("content", "necessity", "mechanism")  # of many interventions, for which two steps suffice


@pytest.mark.parametrize("name", [*OBSERVED, *EFFECTS])
def test_a_second_run_agrees_for_any_batch_size_and_its_tables_are_identical(name, tiny_llada, tiny_llama, tmp_path):
    models = [tiny_llada, tiny_llama]
    prompts, length = (PROMPTS, 6) if name in OBSERVED else (PROMPTS[1:], 2 if name in LONG else 4)
    settings = {"gen_length": length, "steps": length, "block_length": length // 2, "threshold": 0.95}  # rows wait
    first = find(name)(batch=len(prompts), settings=settings).run(models, prompts, tmp_path)
    again = find(name)(batch=len(prompts), settings=settings).tables(first.measured)
    study = find(name)(batch=1, settings=settings)
    apart = study.run(models, prompts) if study.together else first  # the others take one prompt at a time anyway
    for table, values in first.tables.items():
        csv = (tmp_path / f"{name}-{table}.csv").read_bytes()
        assert csv == again[table].to_csv(index=False).encode()
        assert list(pandas.read_csv(io.BytesIO(csv), keep_default_na=False).columns) == list(values.columns)
        other = apart.tables[table]
        assert len(values) == len(other)
        words = [column for column in values if values[column].dtype.kind not in "fi"]
        assert values[words].equals(other[words])
        if name in OBSERVED:
            numbers = ["estimate", "low", "high"]
            np.testing.assert_allclose(values[numbers], other[numbers], rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_allclose(values["estimate"], other["estimate"], atol=1e-4)
            assert list(values["model"].unique()) == ["tiny-llada", "tiny-llama"]
            known = values["estimate"].notna()
            assert (values["low"][known].isna() | (values["low"][known] <= values["estimate"][known] + 1e-9)).all()
            assert values["prompts"].max() <= 2
    assert {file.suffix for file in first.files} == {".csv", ".png", ".svg", ".nc", ".json"}
    for file in first.files:
        assert file.stat().st_size > 100
        if file.suffix == ".png":
            assert file.with_suffix(".svg") in first.files
            assert file.read_bytes().startswith(b"\x89PNG")
    data = xr.load_dataset(tmp_path / f"{name}.nc", engine="h5netcdf")
    assert data.sizes["prompt"] == len(prompts)
    assert data["model"].values.tolist() == ["tiny-llada", "tiny-llama"]


@pytest.mark.parametrize("name", EFFECTS)
def test_prompts_of_token_ids_are_measured_without_scoring_their_answers(name, tiny_llada):
    study = find(name)(settings={"gen_length": 2})
    given = tiny_llada.encode(held_out(1)[0].prompt)[0]
    (measured,) = study.run(tiny_llada, given).measured.values()
    (text,) = study.run(tiny_llada, held_out(1)[0].prompt).measured.values()
    assert measured["right"].isnull().all()
    assert text["right"].notnull().any()
    np.testing.assert_array_equal(measured["changed"], text["changed"])
