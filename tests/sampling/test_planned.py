"""A planned run computes, reuses and hides what its table lists, and nothing else."""

import numpy as np
import torch
import xarray as xr
from asked import WORDS as PROMPTS

import sinklens
from sinklens.runs.identity import fingerprint
from sinklens.sampling import Keys, Planned

STEPS = 4


def test_each_key_is_as_old_as_the_table_says(model):
    exact = sinklens.generate(model, PROMPTS, gen_length=STEPS)
    rows, length = exact.real.shape
    table = np.full((rows, STEPS, model.cfg.n_layers, length), int(Keys.FRESH))
    table[0, 1:, 1, 3] = Keys.STALE  # in one row and layer, from step 1 on
    table[1, 2, 0, 4] = Keys.GONE
    run = sinklens.generate(model, PROMPTS, gen_length=STEPS, replay=exact, cache=Planned(table))
    expected = np.where(exact.real.numpy()[:, None, None], np.zeros_like(table), -1)
    expected[0, :, 1, 3] = range(STEPS)
    expected[1, 2, 0, 4] = -1
    np.testing.assert_array_equal(run.sinks["staleness"].to_numpy(), expected)


def test_an_array_of_booleans_may_leave_axes_out_that_do_not_matter(model):
    length = sinklens.generate(model, PROMPTS, gen_length=STEPS).canvas.shape[2]
    late = torch.arange(length)[None, None, None] >= length - STEPS
    runs = [
        sinklens.generate(model, PROMPTS, gen_length=STEPS, cache=Planned(table))
        for table in (late, xr.DataArray(late.numpy(), dims=("batch", "step", "layer", "pos")))
    ]
    assert torch.equal(runs[0].canvas, runs[1].canvas)
    assert int(runs[0].sinks["fresh"].isel(step=2, layer=0).sum("pos").max()) == STEPS


def test_plans_are_equal_by_what_they_list():
    table = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    assert fingerprint(Planned(table)) == fingerprint(Planned(table.clone())) != fingerprint(Planned(~table))
    assert repr(Planned(table)) == "Planned([1, 1, 1, 3])"
