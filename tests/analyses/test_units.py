"""Finished prompts on disk equal the measurements, and are separate from those of other runs."""

import numpy as np
import xarray as xr

from sinklens.analyses.units import FOLDER, Units
from sinklens.evaluation import LedgerRun
from sinklens.evaluation.ledger import Writer

WHAT = {"study": "letters", "model": {"name": "m", "weights": "0"}, "prompts": 3, "seed": 0}
DATA = xr.Dataset(
    {"x": (("prompt", "token"), np.array([[0.1, np.nan], [1 / 3, 2.0], [3.0, 4.0]])), "n": ("prompt", np.arange(3))},
    coords={"token": ["1 word ␣a", "2 newline ⏎"]},
    attrs={"unit": "sum"},
)


def test_units_are_restored_exactly_in_the_order_of_the_prompts(tmp_path):
    """Text labels, NaN, integers and every bit of a float survive the file."""
    with Units(tmp_path, WHAT, 3) as units:
        units.add([2], DATA.isel(prompt=[2]))
        units.add([0, 1], DATA.isel(prompt=[0, 1]))
    with Units(tmp_path, WHAT, 3) as again:
        assert again.done == {0, 1, 2}
        xr.testing.assert_identical(again.dataset(), DATA)
        assert again.dataset()["n"].dtype == DATA["n"].dtype


def test_a_unit_without_a_complete_record_is_measured_again(tmp_path):
    """As after a kill of version 0.2, which kept units in JSON Lines."""
    with Units(tmp_path / "new", WHAT, 3) as units:
        units.add([0, 1, 2], DATA)
    (run,) = LedgerRun.all(tmp_path / "new" / FOLDER)
    with Writer(LedgerRun.of(tmp_path / FOLDER, run.what)) as writer:
        writer.add(*run.records()[:2])
    with Units(tmp_path, WHAT, 3) as units:
        assert units.done == {0, 1}
        units.add([2], DATA.isel(prompt=[2]))
        xr.testing.assert_identical(units.dataset(), DATA)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Units(None, WHAT, 3) as units:
        units.add([0, 1, 2], DATA)
        xr.testing.assert_identical(units.dataset(), DATA)
    assert list(tmp_path.iterdir()) == []
