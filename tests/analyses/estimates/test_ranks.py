"""Rank correlations against scipy, and a planted confounder."""

import numpy as np
import pytest
from scipy.stats import rankdata, spearmanr

from sinklens.analyses.estimates.ranks import partial_rank_correlation, rank_correlation, ranks


def test_correlations_equal_scipy_s_on_the_known_entries():
    noise = np.random.default_rng(0)
    x, y = noise.integers(0, 6, (5, 12)).astype(float), noise.normal(size=(5, 12))
    x[1, :3], y[2, 4] = np.nan, np.nan
    found = rank_correlation(x, y)
    for row in range(5):
        known = ~np.isnan(x[row] + y[row])
        assert found[row] == pytest.approx(spearmanr(x[row][known], y[row][known]).statistic)


def test_a_partial_correlation_is_that_of_the_residuals_of_the_ranks():
    x, y, z = np.random.default_rng(1).normal(size=(3, 40))
    x, y = x + z, y + 2 * z
    z[5] = np.nan
    known = ~np.isnan(z)
    rank = [rankdata(part[known]) for part in (x, y, z)]
    line = np.stack([np.ones(known.sum()), rank[2]], axis=1)
    residuals = [part - line @ np.linalg.lstsq(line, part, rcond=None)[0] for part in rank[:2]]
    assert partial_rank_correlation(x, y, z) == pytest.approx(np.corrcoef(*residuals)[0, 1])


def test_what_is_constant_too_short_or_determined_has_no_correlation():
    assert np.isnan(rank_correlation(np.ones(5), np.arange(5.0)))
    assert np.isnan(rank_correlation(np.arange(3.0), np.arange(3.0)))
    assert np.isnan(partial_rank_correlation(np.array([3.0, 1, 2, 5, 4]), np.arange(5.0), np.arange(5.0)))
    np.testing.assert_allclose(ranks(np.array([[5, np.nan, 1, 5, 9]])), [[0.5, np.nan, 0, 0.5, 1]])
    assert np.isnan(ranks(np.array([[np.nan, 3.0]]))).all()
