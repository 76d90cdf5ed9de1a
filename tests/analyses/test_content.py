"""The content study: every cell changes the keys of its kind and part, and equals a separate run."""

import numpy as np
import pytest
import xarray as xr
from asked import PROMPT

from sinklens.analyses.answers import unchanged
from sinklens.analyses.content import CHANGES, MEASURES, PARTS, Content
from sinklens.analyses.mass import attended, matched, removed, with_same_mass
from sinklens.experiments import effect
from sinklens.interventions import AblateValues, MaskSinks
from sinklens.sinks import EpsilonOverMean, StrongestKeys
from sinklens.sinks.kinds import Kind, kinds

SETTINGS = {"gen_length": 6, "steps": 6}
KINDS = ["any", "digit", "not digit"]


@pytest.fixture(scope="module")
def measured(tiny_llada):
    return Content().measure(tiny_llada, [PROMPT], SETTINGS).isel(prompt=0)


def test_controls_of_one_kind_are_of_that_kind_no_sinks_and_have_the_mass(tiny_llada):
    study = Content()
    track = unchanged(study, tiny_llada, PROMPT, SETTINGS)
    mass, sinks = attended(study, tiny_llada, PROMPT, SETTINGS, track), EpsilonOverMean().detect(track)
    keys = study.keys("digit", "other").detect(track)
    marked = with_same_mass(track, {"cell": keys}, sinks, mass, 0, study._among(track))
    digit = (kinds(track) == Kind.DIGIT).broadcast_like(keys).transpose(*keys.dims)
    wanted = removed(keys, mass)[0]
    for among, of_kind in (("kind", digit), ("rest", ~digit)):
        control = marked[f"cell same_mass {among}"].transpose(*keys.dims)
        assert control.any()
        assert not (control & (sinks | keys | ~of_kind)).any()
        assert abs(removed(control, mass)[0] - wanted) < 0.2 * wanted
        assert (control == matched(track, keys, of_kind & ~sinks, mass)).all()


def test_every_cell_equals_a_separate_run(tiny_llada, measured):
    track = unchanged(Content(), tiny_llada, PROMPT, SETTINGS)
    rest = {"pick": "random", "persistent": True}
    for kind, part, change, hook, more in (
        ("digit", "other", "mask", MaskSinks, {}),
        ("not digit", "all", "mask_kind", MaskSinks, rest | {"pick": "same_kind"}),
        ("any", "sink", "value", AblateValues, {}),
        ("digit", "all", "value_random", AblateValues, rest),
    ):
        keys = StrongestKeys(1, () if kind == "any" else kind, part, overall=True)
        one = effect(tiny_llada, [PROMPT], hook(top_k=None, detector=keys, source=track, **more), **SETTINGS)
        got = measured["changed"].sel(kind=kind, part=part, change=change)
        assert float(got) == float(not one.free_running["same_answer"].item())
    assert set(measured["changed"].to_numpy().ravel()) == {0, 1}


def test_shares_count_heads_and_steps_with_such_a_key(tiny_llada, measured):
    track = unchanged(Content(), tiny_llada, PROMPT, SETTINGS)
    scores, digit = track.scores().to_numpy()[0, :-1], kinds(track).to_numpy()[0, :-1] == Kind.DIGIT
    others = (scores.sum(-1, keepdims=True) - scores) / (scores.shape[-1] - 1)
    best, sinks = scores.argmax(-1)[..., None], scores > others + EpsilonOverMean().epsilon
    is_digit = np.take_along_axis(np.broadcast_to(digit[:, None, None], scores.shape), best, -1)
    share = measured["share"]
    assert float(share.sel(kind="digit", part="all")) == pytest.approx(float(is_digit.mean()))
    found = (is_digit & np.take_along_axis(sinks, best, -1)).mean()
    assert float(share.sel(kind="digit", part="sink")) == pytest.approx(float(found))
    np.testing.assert_allclose(share.sel(kind="digit") + share.sel(kind="not digit"), share.sel(kind="any"))
    np.testing.assert_allclose(share.sel(part="sink") + share.sel(part="other"), share.sel(part="all"))


def test_claims_are_paired_differences_of_costs():
    sizes = (40, len(KINDS), len(PARTS), len(CHANGES))
    data = xr.Dataset(
        {name: (("prompt", "kind", "part", "change"), np.zeros(sizes)) for name in MEASURES},
        {"kind": KINDS, "part": list(PARTS), "change": list(CHANGES)},
    ).assign(base=("prompt", np.ones(40)))
    number = np.arange(40)
    lost = {("sink", "mask"): 32, ("sink", "value"): 16, ("other", "mask"): 10, ("sink", "mask_mass_kind"): 12}
    for (part, change), count in lost.items():
        data["cost"].loc[{"kind": "digit", "part": part, "change": change}] = number < count
    table = Content().claims({"planted": data}).set_index("measure")
    where = "digit, where it is a sink:"
    expected = {
        f"{where} with as much attention to keys that are no sinks, digit keys cost more than others": 0.3,
        f"{where} masking costs more than replacing the value": 0.4,
        "a digit that is a sink costs more than one that is not": 0.55,
        "among sinks, a digit costs more than another token": 0.8,
    }
    assert table["estimate"][[*expected]].to_dict() == pytest.approx(expected)
    assert set(table["verdict"][[*expected]]) == {"holds"}
    assert table.loc["another token that is a sink costs more than one that is not", "verdict"] == "cannot tell"
    data["base"] = ("prompt", np.zeros(40))
    assert set(Content().claims({"planted": data})["verdict"]) == {"not measured"}
