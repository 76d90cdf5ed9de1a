"""The interaction study: keys are masked within a window, and the interaction is a difference of differences."""

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.analyses.interaction import MEASURES, PICKS, WINDOWS, Interaction, interactions, windows
from sinklens.experiments import compare
from sinklens.interventions import MaskedLogits, MaskSinks, WindowAttention
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(1)[0].prompt
SETTINGS = {"gen_length": 6, "steps": 6}


def test_a_diffusion_model_has_four_windows_and_an_autoregressive_one_two():
    assert list(windows(causal=False)) == list(WINDOWS)
    assert windows(causal=True) == {"none": [], "near": [WindowAttention(left=8)]}


def test_the_kl_of_a_window_is_that_of_masking_its_own_strongest_keys_in_it(tiny_llada):
    data = Interaction().measure(tiny_llada, [PROMPT], SETTINGS).isel(prompt=0)
    window, given = WindowAttention(right=0), {"progress": False, **SETTINGS}
    logits, changed = MaskedLogits(), MaskedLogits()
    base = sinklens.generate(tiny_llada, [PROMPT], hooks=[window, logits], **given)
    mask = MaskSinks(source=base.sinks)
    run = sinklens.generate(tiny_llada, [PROMPT], hooks=[window, mask, changed], replay=base, **given)
    expected = float(compare(base, run, logits.kept, changed.kept)["kl"].mean())
    assert expected > 0
    assert float(data["kl"].sel(window="earlier", pick="strongest")) == pytest.approx(expected, abs=1e-5)
    pattern = run.sinks.scores()
    assert torch.equal(torch.tensor(base.sinks.top(1).shape), torch.tensor((*pattern.shape[:4], 1)))
    assert len({round(float(value), 6) for value in data["kl"].to_numpy().ravel()}) == len(WINDOWS) * len(PICKS)
    np.testing.assert_allclose(data["cost"], data["base"] - data["right"])


def test_windows_that_do_not_apply_have_no_number(tiny_llama):
    data = Interaction().measure(tiny_llama, [PROMPT], {"gen_length": 6}).isel(prompt=0)
    assert data["kl"].isel(pick=0).notnull().to_numpy().tolist() == [name in ("none", "near") for name in WINDOWS]


def test_an_interaction_is_the_cost_in_a_window_minus_the_cost_without_one_paired_by_prompt():
    sizes = (40, len(WINDOWS), len(PICKS))
    data = xr.Dataset(
        {name: (("prompt", "window", "pick"), np.zeros(sizes)) for name in MEASURES},
        {"window": list(WINDOWS), "pick": list(PICKS)},
    )
    number = np.arange(40)
    data["cost"].loc[{"window": "none", "pick": "strongest"}] = number < 4
    data["cost"].loc[{"window": "earlier", "pick": "strongest"}] = number < 24
    data["cost"].loc[{"window": "earlier", "pick": "random"}] = (number >= 4) & (number < 12)
    table = interactions({"planted": data}, 0).set_index(["measure", "window", "pick"])
    assert table.loc[("cost", "earlier", "strongest"), "estimate"] == pytest.approx(0.5)
    assert table.loc[("cost", "earlier", "strongest"), "low"] > 0.2
    assert table.loc[("cost", "earlier", "excess"), "estimate"] == pytest.approx(0.3)
    assert table.loc[("cost", "earlier", "strongest"), "verdict"] == "more"
    assert table.loc[("cost", "near", "strongest"), "verdict"] == "cannot tell"
