"""Estimates over seeds: coverage on a planted two-level model, agreement of signs, and the table."""

import numpy as np
import pytest
import xarray as xr
from scipy.special import expit, logit
from scipy.stats import sem, t

from sinklens.analyses.dynamics import Dynamics
from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, LOG, SHARE
from sinklens.analyses.estimates.seeds import hierarchical, over_seeds, scale_of, seeds_table
from sinklens.analyses.estimates.tables import verdict
from sinklens.analyses.nulls import COMPARED
from sinklens.analyses.results import Findings
from sinklens.analyses.seeds import write_seeds
from sinklens.utils import estimates


def share_covered(number, between, studies=150, prompts=40, truth=0.4):
    """Binary outcomes; a seed's chance is truth + N(0, between), a prompt's N(0, 0.1) more in every seed."""
    rng, inside = np.random.default_rng(1), 0
    for study in range(studies):
        difficulty = rng.normal(0, 0.1, prompts)
        chances = [np.clip(truth + rng.normal(0, between) + difficulty, 0, 1) for _ in range(number)]
        found = hierarchical([(rng.random(prompts) < chance).astype(float) for chance in chances], seed=study)
        inside += found.low <= truth <= found.high
    return inside / studies


@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("between", [0.0, 0.15])
def test_the_interval_over_seeds_and_prompts_covers_the_mean_of_all_seeds(number, between, monkeypatch):
    monkeypatch.setattr(estimates, "RESAMPLES", 200)
    assert share_covered(number, between) >= 0.93


def judged(found, threshold=0.0):
    return verdict(found.value, found.low, found.high, threshold, "more", "less")


@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("shared", [True, False])
def test_the_rule_errs_in_at_most_five_percent_however_much_seeds_vary(number, times, shared):
    """The mean of all seeds is 0. Each seed's mean has a prompt error of 1, shared by all or its own, and varies by
    `times` over seeds.
    """
    noise, found = np.random.default_rng(0), 0
    for _ in range(1500):
        prompt = noise.normal(size=(1 if shared else number))
        means = (noise.normal(0, times, number) + prompt).tolist()
        found += judged(over_seeds(means, 1.0 if shared else 1 / number)) != "cannot tell"
    assert found / 1500 <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 1500)


@pytest.mark.parametrize(
    ("name", "declared", "difference", "scale"),
    [
        ("jump_share", {}, False, SHARE),
        ("right", {}, False, SHARE),
        ("cost", {}, False, DIFFERENCE),
        ("jump_share", {}, True, DIFFERENCE),
        ("value_ratio", {"value_ratio": LOG}, False, LOG),
        ("value_ratio", {"value_ratio": LOG}, True, LINEAR),
        ("drift", {}, False, LINEAR),
    ],
)
def test_scales_are_declared_or_known_by_name(name, declared, difference, scale):
    assert scale_of(name, declared, difference=difference) is scale


def test_the_interval_is_the_t_interval_of_the_seeds_on_the_scale():
    found = over_seeds([0.367, 0.852, 0.748], 0.0, SHARE)
    expected = t.interval(0.95, 2, logit([0.367, 0.852, 0.748]).mean(), sem(logit([0.367, 0.852, 0.748])))
    np.testing.assert_allclose([found.low, found.high], expit(expected))
    assert 0 < found.low < found.value < found.high < 1  # on the linear scale, it would end at 1.28
    ratio = over_seeds([1.5, 3.0, 6.0], 0.0, LOG)
    assert ratio.value == pytest.approx(3)
    np.testing.assert_allclose([ratio.low, ratio.high], np.exp(t.interval(0.95, 2, np.log(3), np.log(2) / np.sqrt(3))))
    assert judged(ratio, 1.0) == "cannot tell"
    assert over_seeds([0.0, 0.5], 0.0, SHARE, resolution=0.01).low > 0  # moved inwards by half a prompt


def test_p_values_invert_the_interval():
    for values in ([1.0, 2.0, 3.0], [1.9, 2.0, 2.1], [4.0, 4.4, 4.1]):
        found = over_seeds(values)
        for threshold in (0.0, found.low - 1e-6, found.low + 1e-6, found.high + 1e-6):
            assert (over_seeds(values, threshold=threshold).p < 0.05) == (judged(found, threshold) != "cannot tell")
    assert np.isnan(over_seeds([1.0]).p)


def test_the_table_and_its_file_resample_the_groups_of_the_prompts(tmp_path):
    """Four groups of ten equal prompts are four observations, in the measurements and in the differences."""
    values, groups = np.repeat([0.1, 0.3, 0.5, 0.9], 10), list(np.repeat([*"abcd"], 10))
    zero = np.zeros(40)
    given = dict.fromkeys(COMPARED, ("prompt", values)) | {f"null_{name}": ("prompt", zero) for name in COMPARED}
    alone = {str(at): xr.Dataset(given) for at in (1, 2, 3)}
    grouped = {name: data.assign_coords(prompt_group=("prompt", groups)) for name, data in alone.items()}
    name = COMPARED[0]
    expected = hierarchical([values] * 3, scale=scale_of(name, {}), group=groups)
    (row,) = seeds_table(grouped, [name]).itertuples()
    assert (row.low, row.high) == (expected.low, expected.high)
    for measured, wide in ((grouped, True), (alone, False)):
        table, file = write_seeds(Dynamics(), Findings(measured, {}, {}, {}), tmp_path)
        assert file == tmp_path / "dynamics-seeds.csv"
        differences = table[table["compared"] == "difference"]
        assert set(differences["measure"]) == set(COMPARED)
        assert differences["p_holm"].tolist() == pytest.approx([min(1, 3 * p) for p in differences["p"]])
        assert ((table["high"] - table["low"] > 0.8) == wide)[table["measure"].isin(COMPARED)].all()


def test_entries_are_matched_by_label_although_models_have_different_ones():
    values = {"1": (["0", "a", "b"], [0.0, 1.0, 2.0]), "2": (["0", "9", "a", "b"], [0.0, 5.0, 1.0, 3.0])}
    models = {
        name: xr.Dataset({"x": (("prompt", "token"), [numbers] * 4)}, {"token": labels})
        for name, (labels, numbers) in values.items()
    }
    for given in (models, dict(reversed(models.items()))):
        table = seeds_table(given, ["x"]).set_index("token")
        assert (sorted(table.index), table.loc["a", "by_seed"]) == (["0", "9", "a", "b"], "1 1")
        assert table.loc["b", "estimate"] == 2.5
        assert np.isnan(table.loc["9", "estimate"])
