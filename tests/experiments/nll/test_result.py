"""Standard errors and paired differences, on losses with known results."""

import math

import numpy as np
import pytest

from sinklens.errors import SettingError
from sinklens.experiments import Likelihood, likelihood_difference


def planted(losses, shares, kind="estimate", batch=1, blocks=None):
    """A likelihood with these losses of each draw and position, None where not masked."""
    losses = np.array([[np.nan if loss is None else loss for loss in row] for row in losses], dtype=float)
    shares = np.broadcast_to(np.array(shares, dtype=float).reshape(len(losses), -1), losses.shape)
    blocks = np.zeros(losses.shape[1], dtype=int) if blocks is None else np.array(blocks)
    return Likelihood(kind, tuple(range(losses.shape[1])), losses, shares, 1 / (shares * len(losses)), blocks, batch)


def random_estimate(rng, draws=32, batch=8, length=4, offset=0.0, common=None):
    masked = common if common is not None else rng.random((draws, length)) < 0.5
    losses = np.where(masked, 2.0 + offset + rng.normal(size=(draws, 1)), np.nan)
    return planted(losses.tolist(), np.full(draws, 0.5), batch=batch)


def test_the_value_is_the_mean_over_draws_of_losses_divided_by_shares():
    one = planted([[1.0, None], [2.0, 4.0]], [0.5, 1.0])
    assert one.value == pytest.approx(-(1 / 0.5 + (2 + 4)) / 2)
    np.testing.assert_allclose(one.positions, [-(1 / 0.5 + 2) / 2, -2.0])
    np.testing.assert_allclose(one.draws, [-1.0, -3.0])
    assert planted([[1.0, 2.0]], [1.0], "likelihood").standard_error == 0.0


def test_standard_errors_come_from_the_spread_between_batches():
    one = planted([[1.0], [3.0], [5.0], [7.0]], [1.0, 1.0, 1.0, 1.0], batch=2)
    assert one.standard_error == pytest.approx(np.std([-2.0, -6.0], ddof=1) / math.sqrt(2))
    assert math.isnan(planted([[1.0], [3.0]], [1.0, 1.0], batch=2).standard_error), "one batch has no spread"


def test_standard_errors_are_those_of_repeated_estimates():
    rng = np.random.default_rng(0)
    repeated = [random_estimate(rng) for _ in range(400)]
    spread = np.std([one.value for one in repeated], ddof=1)
    assert np.sqrt(np.mean([one.standard_error**2 for one in repeated])) == pytest.approx(spread, rel=0.1)


def test_a_difference_of_one_answer_is_paired_by_its_draws():
    base = random_estimate(np.random.default_rng(1))
    shifted = planted((base.losses + 0.25).tolist(), np.full(32, 0.5), batch=8)
    found = likelihood_difference(base, shifted)
    per_batch = (shifted.draws - base.draws).reshape(4, 8).sum(1) * 4
    assert found.value == pytest.approx(per_batch.mean())
    reach = 3.182446 * per_batch.std(ddof=1) / 2  # Student's t, 3 degrees of freedom
    assert (found.low, found.high, found.n) == pytest.approx((found.value - reach, found.value + reach, 1))


@pytest.mark.extended
def test_intervals_of_differences_over_answers_cover_the_truth():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(300):
        masks = [rng.random((8, 4)) < 0.5 for _ in range(10)]
        base = [random_estimate(rng, 8, 4, common=mask) for mask in masks]
        found = likelihood_difference(base, [random_estimate(rng, 8, 4, offset=0.5, common=mask) for mask in masks])
        covered += found.low <= -2.0 <= found.high  # 0.5 nats at 2 of 4 positions, divided by the share 0.5
    assert 0.91 < covered / 300 < 0.99


ONE = planted([[1.0, None]], [0.5])


@pytest.mark.parametrize(("one", "other", "text"), [
    (ONE, planted([[None, 1.0]], [0.5]), "answer 0 has other mask draws in the two conditions"),
    (ONE, planted([[1.0, None, 2.0]], [0.5]), "answer 0 has other tokens"),
    ([], [], "need the same answers, at least one; got 0 and 0"),
])  # fmt: skip
def test_other_answers_or_other_masks_cannot_be_paired(one, other, text):
    with pytest.raises(SettingError, match=text):
        likelihood_difference(one, other)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("estimate", "Likelihood(-4.000 ± 2.000 nats, estimate, 2 tokens, 2 draws)"),
        ("bound", "Likelihood(-4.000 nats, bound, 2 tokens, 2 masks)"),
        ("likelihood", "Likelihood(-4.000 nats, likelihood, 2 tokens)"),
    ],
)
def test_a_likelihood_prints_on_one_line(kind, text):
    """Of two draws that contribute 3 and 1 nats, the sum has a standard error of 2."""
    losses = np.array([[2.0, np.nan], [np.nan, 1.0]])
    weights = np.array([[1.5, 1.5], [1.0, 1.0]])
    one = Likelihood(kind, (1, 2), losses, np.full((2, 2), 0.5), weights, np.zeros(2, dtype=int))
    assert repr(one) == str(one) == text
