"""Features of a run are those of separate passes, position by position."""

import numpy as np
import pytest
import torch
from planted_saes import random_sae
from watching import PADDED, entered, short

import sinklens
from sinklens.errors import SettingError
from sinklens.features import read_features

POINT = "blocks.1.hook_resid_post"


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_features_are_those_of_a_pass_over_each_row_alone(worded, architecture, causal):
    model, sae = worded(architecture, causal), random_sae()
    run = sinklens.generate(model, PADDED, **short(model, {}))
    found = read_features(run, sae, POINT, steps=[1, -1])
    assert found.step.values.tolist() == [1, run.steps_run - 1]
    for step in found.step.values:
        ids, real = entered(run, step)
        for row in range(2):
            alone = model.run_with_cache(ids[row : row + 1, real[row]], names_filter=POINT)[1][POINT][0]
            got = found.sel(step=step).isel(batch=row).to_numpy()
            known = ~np.isnan(got[:, 0])
            assert known.nonzero()[0].tolist() == real[row].nonzero()[:, 0].tolist()
            torch.testing.assert_close(torch.from_numpy(got[known]), sae.encode(alone.detach()), atol=2e-4, rtol=1e-3)


def test_a_step_that_did_not_run_is_refused(worded):
    run = sinklens.generate(worded(), PADDED, **short(worded(), {}))
    with pytest.raises(SettingError, match="step 4 does not exist; there are 4"):
        read_features(run, random_sae(), POINT, steps=[4])
