"""Kaplan–Meier lifetimes compared with loops, a worked example and planted lifetimes cut off by the end of a run."""

import math

import numpy as np
import pytest
from tracks import planted

from sinklens.errors import TrackError
from sinklens.sinks.survival import life_table, lifetime, median_lifetime, restricted_mean, survival


def track_of(sinks):
    """A track of one head: `sinks` [step, pos] says which positions are sinks; position 0 never is."""
    return planted((1.0 + 19.0 * np.asarray(sinks, dtype=float)).tolist())


def naive(lives, ages):
    """S at ages 1 to `ages` of (length, censored) pairs, by the product over deaths."""
    found = []
    for age in range(1, ages + 1):
        product = 1.0
        for before in range(1, age + 1):
            at_risk = sum(length >= before for length, _ in lives)
            ended = sum(length == before and not censored for length, censored in lives)
            product *= 1 - ended / at_risk if at_risk else 1
        found.append(product)
    return found


def test_survival_and_means_equal_loops_over_lives():
    rng = np.random.default_rng(3)
    lives = [(int(rng.integers(1, 9)), bool(rng.random() < 0.4)) for _ in range(60)]
    ended = np.array([[sum(n == a and not c for n, c in lives) for a in range(1, 9)]], dtype=float)
    at_risk = np.array([[sum(n >= a for n, _ in lives) for a in range(1, 9)]], dtype=float)
    expected = naive(lives, 8)
    np.testing.assert_allclose(survival(ended, at_risk)[0], expected)
    assert restricted_mean(ended, at_risk)[0] == pytest.approx(1 + sum(expected[:7]))
    assert median_lifetime(ended, at_risk)[0] == next(age for age, s in enumerate(expected, 1) if s <= 0.5)


def test_freireichs_remission_times():
    """6-MP arm of Freireich et al. (1963): the Kaplan–Meier curve of the textbooks, median 23 weeks."""
    times = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    lives = [(time, number >= 9) for number, time in enumerate(times)]
    ended = np.array([[sum(n == a and not c for n, c in lives) for a in range(1, 36)]], dtype=float)
    at_risk = np.array([[sum(n >= a for n, _ in lives) for a in range(1, 36)]], dtype=float)
    curve = survival(ended, at_risk)[0]
    np.testing.assert_allclose(
        curve[[5, 6, 9, 12, 15, 21, 22]], [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=6e-4
    )
    assert median_lifetime(ended, at_risk)[0] == 23


def test_lives_that_last_to_the_end_are_censored_in_the_table():
    """Position 1 is a sink for two steps and again at the last; position 2 from step 1 to the end."""
    track = track_of([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0]])
    table = life_table(track).isel(batch=0)
    assert table["at_risk"].to_numpy().tolist() == [2, 2, 0, 0]
    assert table["ended"].to_numpy().tolist() == [0, 1, 0, 0]
    assert table["lives"] == 3
    assert median_lifetime(table["ended"].to_numpy(), table["at_risk"].to_numpy()) == 2
    found = lifetime(track)
    assert found.n == 3
    assert found.value == pytest.approx(1 + 1 + 0.5 + 0.5)


def test_a_life_that_began_before_the_first_recorded_step_is_censored():
    track = track_of([[0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert life_table(track)["ended"].sum() == 1
    assert life_table(track.isel(step=slice(1, None)))["ended"].sum() == 0


def simulated(rng, steps=12, positions=400, ending=0.15):
    """Sinks that start at any step and end with a probability of 0.15 per step; the run ends after `steps`."""
    sinks = np.zeros((steps, positions))
    for place in range(positions):
        start = int(rng.integers(0, steps))
        sinks[start : start + int(rng.geometric(ending)), place] = 1
    return track_of(np.hstack([np.zeros((steps, 4 * positions)), sinks]))


def test_planted_lifetimes_cut_off_by_the_end_are_recovered():
    """Geometric lives: E[min(T, 12)] = (1 − 0.85^12) / 0.15; the plain mean of observed lengths is far smaller."""
    truth = (1 - 0.85**12) / 0.15
    rng, inside, means, plain = np.random.default_rng(11), 0, [], []
    for _ in range(20):
        track = simulated(rng)
        found = lifetime(track)
        inside += found.low <= truth <= found.high
        means.append(found.value)
        table = life_table(track).sum("batch")
        plain.append(float(track.detect().sum() / table["lives"]))
    assert np.mean(means) == pytest.approx(truth, abs=0.2)
    assert np.mean(plain) < truth - 1.5
    assert inside >= 17


def test_without_a_sink_there_is_no_lifetime():
    found = lifetime(track_of(np.zeros((3, 4))))
    assert math.isnan(found.value)
    assert found.n == 0


def test_too_few_ages_are_refused():
    with pytest.raises(TrackError, match=r"ages is 2, but lives can last 4 steps; give at least that"):
        life_table(track_of(np.zeros((4, 3))), ages=2)
