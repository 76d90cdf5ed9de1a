"""The window study: each width restricts attention as stated, and the last does not restrict it."""

import numpy as np
import pytest

from sinklens.analyses.windows import WIDTHS, Windows
from sinklens.experiments import effect
from sinklens.interventions import WindowAttention
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(1)[0].prompt


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_every_width_is_a_separate_run_and_the_last_changes_nothing(name, request):
    model, settings = request.getfixturevalue(name), {"gen_length": 6}
    data = Windows().measure(model, [PROMPT], settings).isel(prompt=0)
    assert data["width"].to_numpy().tolist() == list(WIDTHS)
    for width in (2, 16):
        one = effect(model, [PROMPT], WindowAttention(width=width), **settings)
        assert float(data["kl"].sel(width=width)) == pytest.approx(float(one.under_replay["kl"].mean()), abs=1e-4)
        assert float(data["edits"].sel(width=width)) == one.free_running["edit_distance"].item()
    last = data.sel(width=np.inf)
    assert abs(float(last["kl"])) < 1e-9
    assert (float(last["changed"]), float(last["agreement"])) == (0, 1)
