"""Simulated coverage: how often the 95 % interval of a paired difference contains the true difference."""

from functools import partial

import numpy as np
import pytest

from sinklens.utils.estimates import Z, score_interval

STUDIES = 20_000
SIZES = (25, 50, 100, 500)
LOSSES = (0.0, 0.02, 0.05, 0.5)


def simulated(size, loss, gained=0.0):
    """Counts of samples lost, unchanged and gained, [study, 3]: each study draws `size` samples."""
    shares = [loss + gained, 1 - loss - 2 * gained, gained]
    return np.random.default_rng(19).multinomial(size, shares, size=STUDIES)


def coverage(interval, counts, truth):
    """Share of studies whose interval contains `truth`; equal counts are computed once."""
    distinct, of = np.unique(counts, axis=0, return_inverse=True)
    low, high = interval(distinct)
    return float(((low - 1e-9 <= truth) & (truth <= high + 1e-9))[of].mean())


score = partial(score_interval, values=(-1, 0, 1))


@pytest.mark.parametrize("gained", [0.0, 0.05])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_the_paired_interval_covers_the_true_loss_at_every_size(size, loss, gained):
    assert coverage(score, simulated(size, loss, gained), -loss) >= 0.93


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", SIZES)
def test_the_interval_of_a_difference_of_two_costs_covers_it_at_every_size(size, loss):
    """Differences of −2 to 2, from two independent paired losses of 3 % gained and `loss` more lost."""
    rng = np.random.default_rng(7)
    chances = [loss / 2 + 0.03, 0.94 - loss / 2, 0.03]
    one = rng.choice([-1, 0, 1], size=(4000, size), p=chances)
    other = rng.choice([-1, 0, 1], size=(4000, size), p=chances[::-1])
    counts = ((one - other)[..., None] == np.arange(-2, 3)).sum(axis=1)
    assert coverage(lambda rows: score_interval(rows, range(-2, 3)), counts, -loss) >= 0.93


@pytest.mark.parametrize("size", SIZES)
def test_no_loss_among_n_leaves_a_loss_near_three_in_n_possible(size):
    low, high = score(np.array([[0, size, 0]]))
    assert high[0] == -low[0] == pytest.approx(Z**2 / (size + Z**2))
    assert 3 / size <= high[0] + 0.012
    assert high[0] <= 4 / size
