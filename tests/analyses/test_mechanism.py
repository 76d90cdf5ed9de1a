"""The mechanism study: halves, correlations and orders on known data, and verdicts on planted effects."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.analyses.mechanism import (
    CONFIDENCE,
    COSTS,
    ORDERS,
    PICKS,
    TOP_K,
    Mechanism,
    above_median,
    attention_to,
    claims,
    correlations,
    orders,
)
from sinklens.interventions import MaskSinks
from sinklens.tasks import held_out

PROMPT = held_out(2)[1].prompt
SETTINGS = {"gen_length": 6}
MASK = 9


def run_of(canvases):
    """A run of one row that only holds its canvas."""
    canvas = torch.tensor(canvases)[None]
    real = torch.ones(1, canvas.shape[2], dtype=torch.bool)
    return SimpleNamespace(canvas=canvas, real=real, undecided=canvas == MASK)


def test_halves_split_the_undecided_positions_of_a_step():
    run = run_of([[1, MASK, MASK, MASK, MASK], [1, MASK, 2, MASK, MASK], [1, 3, 2, 4, 5]])
    found = above_median(run, np.array([[[0.9, 0.1, 0.4, 0.3, 0.2], [0.9, 0.1, 0.8, 0.3, 0.2]]]))[0].tolist()
    assert found == [[False, False, True, True, False], [False, False, False, True, False]]


def test_the_correlation_is_between_attention_and_change_over_positions():
    run = run_of([[1, MASK, MASK, MASK], [1, 2, MASK, MASK], [1, 2, 3, 4]])
    mass = np.array([[[0.5, 0.1, 0.2, 0.3], [0.5, 0.4, 0.2, 0.3]]])
    shares = [torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.6, 0.4]]), torch.tensor([[0.9, 0.1], [0.9, 0.1]])]
    lower = [torch.tensor([[0.6, 0.4], [0.55, 0.45], [0.53, 0.47]]), torch.tensor([[0.8, 0.2], [0.9, 0.1]])]
    before, after = ({step: part.log() for step, part in enumerate(parts)} for parts in (shares, lower))
    expected = np.corrcoef([0.0, -0.05, -0.07], [0.1, 0.2, 0.3])[0, 1]
    assert correlations(run, mass, before, after) == pytest.approx(expected)  # the second step has too few positions
    assert math.isnan(correlations(run, mass, before, before))


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_attention_to_keys_is_the_mean_over_heads_and_layers_of_the_unchanged_model(shipped):
    change = MaskSinks(top_k=2, layers=[0, -1], heads=[1, 4], steps=range(2, 6))
    run = sinklens.generate(shipped, [problem.prompt for problem in held_out(3)], hooks=change, **SETTINGS)
    keys = change.keys(run)
    found = attention_to(run, keys)
    for step in (0, 3, 5):
        known = run.prompt_length + step if shipped.causal else run.canvas.shape[2]
        real = run.real[:, :known]
        _, cache = shipped.run_with_cache(run.canvas[:, step, :known], attention_mask=real)
        patterns = torch.stack([cache["pattern", layer] for layer in range(4)], dim=1).double().numpy()
        expected = (patterns * keys.to_numpy()[:, step, :, :, None, :known]).sum(-1).mean((1, 2))
        np.testing.assert_allclose(found[:, step, :known], np.where(real, expected, np.nan), atol=1e-6)
        assert np.isnan(found[:, step, known:]).all()
    assert np.nanmax(found) > 0.02


def test_orders_unmask_as_named_one_token_per_step(tiny_llada, tiny_llama):
    given = {"gen_length": 6, "steps": 2, "block_length": 3, "threshold": 0.9}
    steps = {}
    for name, settings in orders(tiny_llada, given).items():
        run = sinklens.generate(tiny_llada, [PROMPT], record_sinks=False, **settings)
        steps[name] = run.unmask_step[0, run.prompt_length :].tolist()
        assert sorted(steps[name]) == list(range(6))
    assert (list(steps), steps["position"]) == (list(ORDERS), list(range(6)))
    assert steps["random"] != steps["position"]
    assert orders(tiny_llama, {"gen_length": 6}) == {"position": {"gen_length": 6}}


def test_every_cost_is_stored_under_its_order_pick_and_number(tiny_llada):
    data = Mechanism().measure(tiny_llada, [PROMPT], SETTINGS).isel(prompt=0)
    for order, settings in orders(tiny_llada, SETTINGS).items():
        base = sinklens.generate(tiny_llada, [PROMPT], record_sinks=False, **settings)
        for top_k in TOP_K:
            run = sinklens.generate(
                tiny_llada, [PROMPT], hooks=[MaskSinks(top_k=top_k)], record_sinks=False, **settings
            )
            assert data["changed"].sel(order=order, pick="strongest", top_k=top_k) == float(run.text != base.text)
    np.testing.assert_array_equal(data["cost"], data["base"] - data["right"])
    np.testing.assert_array_equal(data["kept"], data["right"].where(data["base"] == 1))
    assert data["difference"].notnull().all()


def planted(difference, cost):
    """Forty prompts with planted means per [pick], and per [order, pick] an outcome with that mean; random keys stand
    for both controls.
    """
    rows, difference, cost = 40, [*difference, difference[-1]], [[*means, means[-1]] for means in cost]
    base = np.full((rows, len(ORDERS)), 1.0)
    data = {name: (("prompt", "pick"), np.tile(difference, (rows, 1))) for name in CONFIDENCE}
    lost = (np.arange(rows) + 0.5)[:, None, None] / rows < np.array(cost)
    costs = np.tile(lost[..., None].astype(float), (1, 1, 1, len(TOP_K)))
    data |= dict.fromkeys(COSTS, (("prompt", "order", "pick", "top_k"), costs))
    data["base"] = (("prompt", "order"), base)
    return xr.Dataset(data, {"order": list(ORDERS), "pick": list(PICKS), "top_k": list(TOP_K)})


def test_verdicts_match_the_planted_effects():
    """Confidence falls only under steady masking; left to right costs more, random order does not."""
    cost = [[0.6, 0.1, 0.1], [0.1, 0.6, 0.1], [0.1, 0.1, 0.3]]
    rows = claims({"planted": planted([0.1, -0.2, 0.0], cost)}, seed=0).set_index(["measure", "pick"]).sort_index()
    falls = "confidence falls more where the masked keys were attended to"
    further = "masking costs more from left to right than by confidence"
    shuffled = "masking costs more in random order than by confidence"
    verdicts = {
        (falls, "strongest"): {"no"}, (falls, "steady"): {"holds"}, (further, "strongest"): {"no"},
        (further, "steady"): {"holds"}, (shuffled, "steady"): {"cannot tell"},
    }  # fmt: skip
    assert {place: {*rows.loc[[place], "verdict"]} for place in verdicts} == verdicts
    for measure, value in (("… and more so than with random keys", 0.2), (shuffled, 0), ("… in random order", -0.2)):
        np.testing.assert_allclose(rows.loc[[(measure, "steady")], "estimate"], value, atol=1e-9)
