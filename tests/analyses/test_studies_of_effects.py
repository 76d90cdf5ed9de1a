"""Checks for every study of interventions: the batch size does not matter, and every file opens."""

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses import find
from sinklens.errors import SettingError
from sinklens.tasks.word_problems import held_out

PROMPTS = [held_out(2)[1].prompt, "Is $x_1$ a _b_ or 12 \n\n $\\frac{ 中?\nAnswer:"]
SETTINGS = {"gen_length": 4, "steps": 4, "block_length": 2, "threshold": 0.95}
FEW = {"heads": {"reference": 2}}
LONG = ("heads", "budget", "content", "necessity", "mechanism")  # of many interventions, for which two steps suffice


STUDIES = ["heads", "necessity", "content", "definitions", "windows", "interaction", "blocks", "budget", "mechanism"]


@pytest.mark.parametrize("name", [*STUDIES, "patching"])
def test_the_batch_size_does_not_matter_and_every_file_opens(name, tiny_llada, tiny_llama, tmp_path):
    kind, models = find(name), [tiny_llada, tiny_llama]
    settings = SETTINGS | ({"gen_length": 2, "steps": 2, "block_length": 1} if name in LONG else {})
    together = kind(batch=2, settings=settings, **FEW.get(name, {})).run(models, PROMPTS, tmp_path)
    apart = kind(batch=1, settings=settings, **FEW.get(name, {})).run(models, PROMPTS)
    for table, values in together.tables.items():
        other = apart.tables[table]
        assert list(values["model"].unique()) == ["tiny-llada", "tiny-llama"]
        words = [column for column in values if values[column].dtype.kind not in "fi"]
        assert values[words].equals(other[words])
        np.testing.assert_allclose(values["estimate"], other["estimate"], atol=1e-4)
        known = values["estimate"].notna()
        assert (values["low"][known].isna() | (values["low"][known] <= values["estimate"][known] + 1e-9)).all()
        assert values["prompts"].max() <= 2
    assert {file.suffix for file in together.files} == {".csv", ".png", ".svg", ".nc", ".json"}
    assert xr.load_dataset(tmp_path / f"{name}.nc", engine="h5netcdf").sizes["model"] == 2
    for file in together.files:
        assert file.suffix != ".png" or file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [*sorted({*STUDIES} - {"interaction"}), "diagnose"])
def test_prompts_of_token_ids_are_measured_without_scoring_their_answers(name, tiny_llada):
    study = find(name)(settings={"gen_length": 2}, **FEW.get(name, {}))
    given = tiny_llada.encode(held_out(1)[0].prompt)[0]
    (measured,) = study.run(tiny_llada, given).measured.values()
    (text,) = study.run(tiny_llada, held_out(1)[0].prompt).measured.values()
    assert measured["right"].isnull().all()
    assert text["right"].notnull().any()
    changed = "masking_changed" if name == "diagnose" else "changed"
    np.testing.assert_array_equal(measured[changed], text[changed])


def test_patching_rejects_token_ids(tiny_llada):
    with pytest.raises(SettingError, match=r"a number in the text of a prompt; prompt 0 is a list of token ids. Give"):
        find("patching")().run(tiny_llada, torch.tensor([2, 287, 28]))
