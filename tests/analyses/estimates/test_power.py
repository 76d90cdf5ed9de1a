"""Power against simulations, the smallest effect shown, and equivalence."""

import math

import numpy as np
import pytest
import xarray as xr

from sinklens.analyses import interval_table
from sinklens.analyses.estimates.power import (
    equivalence_power,
    equivalent_p,
    paired_power,
    smallest_mean,
    smallest_paired,
)
from sinklens.analyses.estimates.tables import judged
from sinklens.errors import SettingError
from sinklens.utils.estimates import mcnemar


@pytest.mark.parametrize(("effect", "number", "against"), [(0.2, 40, 0.0), (0.15, 60, 0.05), (0.0, 50, 0.1)])
def test_power_is_the_share_of_simulated_studies_that_mcnemars_test_finds(effect, number, against):
    draws = np.random.default_rng(3).multinomial(
        number, [effect + against, 1 - effect - 2 * against, against], size=4000
    )
    distinct, of = np.unique(draws, axis=0, return_inverse=True)
    found = np.array([mcnemar(int(lost), int(gained)) <= 0.01 for lost, _, gained in distinct])[of.ravel()]
    assert paired_power(effect, number, 0.01, against) == pytest.approx(found.mean(), abs=0.025)


def test_the_smallest_effect_is_found_in_four_of_five_studies():
    assert paired_power(smallest_paired(80, 0.05, 0.05), 80, 0.05, 0.05) == pytest.approx(0.8, abs=0.01)
    assert smallest_paired(5, 0.05 / 20) == math.inf
    values = np.random.default_rng(0).normal(smallest_mean(60, 2.0, 0.05), 2.0, size=(4000, 60))
    t = values.mean(1) / values.std(1, ddof=1) * math.sqrt(60)
    assert (abs(t) > 1.96).mean() == pytest.approx(0.8, abs=0.03)
    assert smallest_mean(4, 1.0, 0.05) == math.inf  # random signs of 4 prompts give p values from 1 / 8


def test_impossible_shares_are_refused():
    with pytest.raises(SettingError, match=r"got 50 prompts, level 0.05, 0.900 lost and 0.200 gained"):
        paired_power(0.7, 50, 0.05, 0.2)


@pytest.mark.parametrize("differing", [0.0, 0.04])
def test_a_difference_at_the_smallest_of_interest_is_rarely_called_equivalent(differing):
    """Error rate by simulation: the true difference is exactly the smallest one of interest."""
    chances = [0.05 + differing / 2, 0.95 - differing, differing / 2]
    lost, _, gained = np.random.default_rng(5).multinomial(300, chances, size=2000).T
    assert (equivalent_p(lost, gained, 300, 0.05) <= 0.05).mean() <= 0.07


def test_no_difference_is_found_equivalent_with_enough_prompts_only():
    assert [equivalence_power(number, 0.05, 0.0) for number in (40, 200)] == [0.0, 1.0]
    lost, _, gained = np.random.default_rng(7).multinomial(200, [0.02, 0.96, 0.02], size=2000).T
    simulated = (equivalent_p(lost, gained, 200, 0.05) <= 0.05).mean()
    assert equivalence_power(200, 0.05, 0.04) == pytest.approx(simulated, abs=0.03)


def verdicts(lost, gained, number):
    values = np.zeros(number)
    values[:lost], values[lost : lost + gained] = 1, -1
    return judged(interval_table({"planted": xr.Dataset({"cost": ("prompt", values)})}, ["cost"], null=0.0)).iloc[0]


@pytest.mark.parametrize(
    ("lost", "gained", "number", "verdict", "why"),
    [
        (30, 2, 100, "holds", ""),
        (0, 0, 200, "equivalent", ""),
        (0, 0, 20, "cannot tell", "too few prompts: they show differences from 0.37, and 0.05 is of interest"),
        (0, 0, 4, "cannot tell", "too few prompts: they show no difference, and 0.05 is of interest"),
        (9, 1, 400, "holds", ""),
        (21, 10, 400, "cannot tell", "not the number of prompts: they show differences from 0.04"),
    ],
)
def test_a_table_says_whether_the_number_of_prompts_is_why(lost, gained, number, verdict, why):
    row = verdicts(lost, gained, number)
    assert (row["verdict"], row["why"]) == (verdict, why)
