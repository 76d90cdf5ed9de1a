"""Controls of equal mass on planted scores, and a cost that the control of equal number misreads."""

import numpy as np
import pytest
import xarray as xr
from planting import planted

from sinklens.analyses import interval_table
from sinklens.analyses.estimates.tables import judged
from sinklens.analyses.mass import acting, curve, matched, removed, with_same_mass
from sinklens.sinks import EpsilonOverMean, StrongestKeys

PROMPTS, STEPS, LAYERS, HEADS, LENGTH = 40, 4, 2, 3, 30


def track_of(seed=0):
    """Uneven scores with a mean of 1 in every head, and one sink in every second head."""
    rng = np.random.default_rng(seed)
    score = rng.gamma(2.0, size=(PROMPTS, STEPS, LAYERS, HEADS, LENGTH))
    score[..., ::2, 3] += 12
    score *= LENGTH / score.sum(-1, keepdims=True)
    return planted(score, token_id=rng.integers(3, 90, size=(PROMPTS, STEPS, LENGTH)))


@pytest.fixture(scope="module")
def found():
    track = track_of()
    return track, EpsilonOverMean().detect(track), acting(track)


def test_the_mass_of_a_mask_is_that_of_the_step_at_which_it_acts(found):
    track, sinks, mass = found
    score, keys = track.scores().to_numpy(), sinks.to_numpy()
    expected = (score[:, 1:] * keys[:, :-1]).sum((1, 2, 3, 4)) / score[:, 1:].sum((1, 2, 3, 4))
    np.testing.assert_allclose(removed(sinks, mass), expected, rtol=1e-5)


def test_a_curve_has_the_attention_of_a_mask_whose_cost_is_the_same_in_all_groups():
    at = {"prompt_group": ("prompt", list("aaabbb"))}
    data = xr.Dataset({"cost": ("prompt", np.zeros(6)), "gone": ("prompt", np.arange(6.0))}, at)
    assert curve({"m": data}, "cost", "gone")["removed"].tolist() == [2.5]


def test_matched_keys_are_no_sinks_and_have_the_mass_of_every_step_and_layer(found):
    track, sinks, mass = found
    control = matched(track, sinks, ~sinks, mass)
    assert not (control & sinks).any()
    over = ("head", "pos")
    wanted, got = (mass.where(keys).sum(over).isel(step=slice(0, -1)) for keys in (sinks, control))
    assert (abs(wanted - got) <= mass.where(~sinks).max(over).isel(step=slice(0, -1)) / 2 + 1e-6).all()
    assert float(abs(wanted - got).mean() / wanted.mean()) < 0.05
    assert (control.sum() > 3 * sinks.sum()).item()  # many weak keys for a strong one


def test_matched_keys_last_and_depend_on_the_prompt_and_the_seed(found):
    track, sinks, mass = found
    one, again, other = (matched(track, sinks, ~sinks, mass, seed).to_numpy() for seed in (0, 0, 1))
    assert (one == again).all()
    assert (one != other).any()
    first, second = one[:, 0], one[:, 1]
    assert (first & second).sum() / (first | second).sum() > 0.8
    assert (one[0] != one[1]).any()


def test_a_cost_of_attention_alone_looks_like_one_of_sinks_unless_the_mass_is_equal(found):
    """Planted: a prompt is lost with a probability of three times the attention removed, whatever the keys are."""
    track, sinks, mass = found
    keys = StrongestKeys(1).detect(track)
    marked = with_same_mass(track, {"strongest": keys}, sinks, mass)
    rng = np.random.default_rng(1)
    as_many = np.zeros(keys.shape, dtype=bool)
    as_many[..., 5] = True  # one ordinary key of each head: the same number
    limits = rng.random(PROMPTS)
    lost = {
        name: (3 * removed(chosen, mass) > limits).astype(float)
        for name, chosen in (
            ("strongest", marked["strongest"]), ("random", keys.copy(data=as_many)),
            ("same_mass", marked["strongest same_mass"]),
        )
    }  # fmt: skip
    claims = {
        control: judged(
            interval_table(
                {"planted": xr.Dataset({"cost": ("prompt", lost["strongest"] - lost[control])})}, ["cost"], null=0.0
            )
        ).iloc[0]
        for control in ("random", "same_mass")
    }
    assert claims["random"]["verdict"] == "holds"  # errs: sinks do nothing here beyond their attention
    assert claims["same_mass"]["verdict"] != "holds"
    assert abs(claims["same_mass"]["estimate"]) < 0.05
