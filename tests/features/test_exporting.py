"""A store's size is known beforehand, and other tools read the same numbers from its exports."""

import json

import numpy as np
import pandas
import pytest
from safetensors.numpy import load_file
from watching import LONG, PADDED, SHORT

from sinklens.errors import SettingError
from sinklens.features import ActivationStore, collect, store_size
from sinklens.sinks.kinds import STATES

POINT = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def store(worded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    return collect(worded(), PADDED, POINT, folder / "a.zarr", scope="masked", gen_length=4)


@pytest.mark.parametrize(("causal", "chosen"), [
    (False, {"scope": "decided"}), (False, {"only_steps": [1], "positions": [-1, -2]}), (True, {}),
])  # fmt: skip
def test_the_size_is_that_of_the_store(worded, tmp_path, causal, chosen):
    model = worded("llama", causal)
    prompts = [SHORT, LONG, "w3 w4"]
    stored = collect(model, prompts, POINT, tmp_path / "a.zarr", gen_length=4, **chosen)
    size = store_size(model, prompts, POINT, gen_length=4, **chosen)
    assert (size.places, size.sampled) == (len(stored), 3)
    assert size.bytes == len(stored) * (stored.d_in * 4 + 4 * 4 + 1)


def test_an_estimate_takes_the_other_prompts_to_be_as_long(worded):
    one = store_size(worded(), [SHORT], POINT, gen_length=4)
    many = store_size(worded(), [SHORT] * 50, [POINT, POINT], gen_length=4, sample=2, dtype="float16")
    assert (many.places, many.sampled) == (50 * one.places, 2)
    assert many.bytes == one.bytes * 50


def check(store: ActivationStore, frame):
    """A table holds the rows of a store."""
    np.testing.assert_array_equal(np.stack(frame["activation"].to_list()), store.read(0, len(store)).numpy())
    for name in ("prompt", "step", "pos", "token_id"):
        assert frame[name].tolist() == store.column(name).tolist()
    assert frame["state"].tolist() == [STATES[state] for state in store.column("state")]


def test_a_frame_and_parquet_shards_hold_the_rows_of_the_store(store, tmp_path):
    check(store, store.frame())
    files = store.export(tmp_path / "out", rows=len(store) // 2 + 1)
    assert [file.name for file in files] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    check(store, pandas.concat([pandas.read_parquet(file) for file in files]))
    assert json.loads((tmp_path / "out" / "about.json").read_text())["point"] == POINT
    (file,) = store.export(tmp_path / "one", "safetensors")
    np.testing.assert_array_equal(load_file(file)["activation"], store.read(0, len(store)).numpy())
    assert load_file(file)["pos"].tolist() == store.column("pos").tolist()


@pytest.mark.extended
def test_datasets_loads_the_folder(store, tmp_path):
    from datasets import load_dataset

    store.export(tmp_path / "out", rows=5)
    loaded = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"), split="train")
    check(store, loaded.to_pandas())


def test_a_folder_in_use_and_an_unknown_format_are_refused(store, tmp_path, unchecked):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(SettingError, match="is not an empty folder; choose another"):
        store.export(tmp_path)
    with pytest.raises(SettingError, match="kind must be one of parquet, safetensors; got 'csv'"):
        store.export(tmp_path / "new", "csv")
