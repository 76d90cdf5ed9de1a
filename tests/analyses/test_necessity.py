"""The necessity study: strongest keys are split into sinks and others, and masked where stated."""

import numpy as np
import pytest
import xarray as xr
from asked import PROMPT

from sinklens.analyses.answers import is_right, unchanged
from sinklens.analyses.necessity import ABOVE, EPSILONS, MEASURES, PARTS, PICKS, Necessity
from sinklens.experiments import effect
from sinklens.interventions import MaskSinks
from sinklens.sinks import EpsilonOverMean, StrongestKeys
from sinklens.utils.estimates import mcnemar

SETTINGS = {"gen_length": 6, "steps": 6}
SINK = EpsilonOverMean(1.5)


@pytest.fixture(scope="module")
def measured(tiny_llada):
    return Necessity(sink=SINK).measure(tiny_llada, [PROMPT], SETTINGS)


def test_every_number_equals_that_of_a_separate_run(tiny_llada, measured):
    track = unchanged(Necessity(), tiny_llada, PROMPT, SETTINGS)
    for part in PARTS:
        mask = MaskSinks(top_k=None, detector=StrongestKeys(part=part, sink=SINK), source=track)
        one = effect(tiny_llada, [PROMPT], mask, **SETTINGS)
        got = measured.sel(part=part, pick="strongest").isel(prompt=0)
        assert float(got["kl"]) == pytest.approx(float(one.under_replay["kl"].mean()), abs=1e-4)
        assert float(got["changed"]) == float(not one.free_running["same_answer"].item())
    everywhere = effect(tiny_llada, [PROMPT], MaskSinks(top_k=1, source=track), **SETTINGS)
    got = measured.sel(part="all", pick="strongest").isel(prompt=0)
    assert float(got["kl"]) == pytest.approx(float(everywhere.under_replay["kl"].mean()), abs=1e-4)
    assert float(measured["base"].item()) == float(measured["right"].sel(part="other", pick="random").item()) + float(
        measured["cost"].sel(part="other", pick="random").item()
    )
    assert len({round(float(value), 6) for value in measured["kl"].to_numpy().ravel()}) == len(PARTS) * len(PICKS)


def test_the_control_of_equal_mass_removes_as_much_attention(measured):
    gone = measured["removed"].isel(prompt=0)
    np.testing.assert_allclose(gone.sel(pick="same_mass"), gone.sel(pick="strongest"), rtol=0.1)
    assert gone.sel(pick="random").isnull().all()
    above = measured["above_removed"].isel(prompt=0).sel(pick="strongest")
    assert (above.diff("epsilon") <= 0).all()  # fewer keys at a higher threshold


def test_every_key_above_each_threshold_is_masked(tiny_llada, measured):
    track = unchanged(Necessity(), tiny_llada, PROMPT, SETTINGS)
    scores = track.scores().to_numpy()[0, :-1]
    others = (scores.sum(-1, keepdims=True) - scores) / (scores.shape[-1] - 1)
    for number, epsilon in enumerate(EPSILONS):
        found = (scores > others + epsilon).sum(-1).mean()
        assert float(measured["above_keys"][0, number]) == pytest.approx(float(found))
    mask = MaskSinks(top_k=None, detector=EpsilonOverMean(1.0), source=track)
    one = effect(tiny_llada, [PROMPT], mask, **SETTINGS)
    at_one = measured["above_right"].isel(prompt=0).sel(epsilon=1.0, pick="strongest")
    assert float(at_one) == is_right(PROMPT, one.free.text[0])


def test_claims_compare_strongest_with_random_keys_in_the_same_places():
    """Every second prompt is lost with either key, but where the key is a sink only every fifth with a random key."""
    axes, size = ("prompt", "part", "pick"), (80, len(PARTS), len(PICKS))
    data = xr.Dataset({name: (axes, np.zeros(size)) for name in MEASURES}, {"part": list(PARTS), "pick": list(PICKS)})
    data["share"], data["base"] = (("prompt", "part"), np.ones(size[:2])), ("prompt", np.ones(80))
    above = {"epsilon": list(EPSILONS), "pick": list(PICKS)}
    zeros = np.zeros((80, len(EPSILONS), len(PICKS)))
    data = data.merge(xr.Dataset(dict.fromkeys(ABOVE, (("prompt", "epsilon", "pick"), zeros)), above))
    data["removed"] = (axes, np.zeros(size))
    data["kl"] = data["kl"] + 1
    data["cost"].loc[{"part": "sink", "pick": "strongest"}] = np.arange(80) % 2
    data["cost"].loc[{"part": "sink", "pick": "random"}] = np.arange(80) % 5 == 1
    data["cost"].loc[{"part": "other"}] = (np.arange(80) % 2)[:, None]
    claims = Necessity().tables({"planted": data})["claims"]
    assert claims.set_index(["measure", "part", "control"]).loc[("cost", "sink", "same_mass"), "estimate"] == 0.5
    claims = claims[claims["control"] == "random"].set_index(["measure", "part"])
    p, most = mcnemar(8, 32), 1.959964**2 / (80 + 1.959964**2)
    sink, other = claims.loc[("cost", "sink")], claims.loc[("cost", "other")]
    assert sink[["estimate", "p", "p_holm"]].tolist() == pytest.approx([0.3, p, 11 * p])
    assert other["high"] == pytest.approx(most, rel=1e-5)
    assert (sink["verdict"], other["verdict"], other["where"]) == ("holds", "cannot tell", "where it is not a sink")
    data["base"] = ("prompt", np.zeros(80))
    nothing_to_lose = Necessity().tables({"planted": data})["claims"].set_index(["measure", "part"])
    assert nothing_to_lose.loc["cost", "verdict"].tolist() == ["not measured"] * 6
