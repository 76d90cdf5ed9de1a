"""Estimates over seeds: coverage on a planted two-level model, agreement of signs, and the table."""

import numpy as np
import pytest
import xarray as xr

from sinklens.analyses import seeds
from sinklens.analyses.dynamics import Dynamics
from sinklens.analyses.nulls import COMPARED
from sinklens.analyses.results import Findings
from sinklens.analyses.seeds import Seeds, hierarchical, seeds_table, write_seeds
from sinklens.errors import SettingError

NAN = float("nan")


def share_covered(number, between, studies=150, prompts=40, truth=0.4):
    """Binary outcomes; a seed's chance is truth + N(0, between), a prompt's N(0, 0.1) more in every seed."""
    rng, inside = np.random.default_rng(1), 0
    for study in range(studies):
        difficulty = rng.normal(0, 0.1, prompts)
        chances = [np.clip(truth + rng.normal(0, between) + difficulty, 0, 1) for _ in range(number)]
        found = hierarchical([(rng.random(prompts) < chance).astype(float) for chance in chances], seed=study)
        inside += found.low <= truth <= found.high
    return inside / studies


@pytest.fixture
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(seeds, "RESAMPLES", 500)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("number", [3, 5])
@pytest.mark.parametrize("between", [0.0, 0.15])
def test_the_interval_over_seeds_and_prompts_covers_the_mean_of_all_seeds(number, between):
    assert share_covered(number, between) >= 0.93


def test_an_interval_over_prompts_alone_would_not_cover_it():
    """The reason for the second level: with three seeds that differ, prompts alone cover it in half of the studies."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(300):
        values = rng.normal(rng.normal(0.4, 0.15, 3)[:, None], 0.5, (3, 40))
        half = 1.96 * values.mean(axis=0).std() / np.sqrt(40)
        inside += abs(values.mean() - 0.4) <= half
    assert inside / 300 < 0.75


def test_the_estimate_is_the_mean_of_the_seeds_means():
    values = [np.array([1.0, 3.0]), np.array([4.0]), np.array([NAN, 6.0, 7.0, 8.0])]
    found = hierarchical(values, paired=False)
    assert found.by_seed == (2.0, 4.0, 7.0)
    assert found.estimate == pytest.approx(13 / 3)
    assert found.low < 2 < 7 < found.high  # three seeds say little
    assert hierarchical(values, paired=False) == found


def test_the_same_prompts_are_drawn_for_all_seeds_if_they_are_paired(monkeypatch):
    """Prompts that differ, in two equal seeds: paired, their variation does not average out."""
    monkeypatch.setattr(seeds, "RESAMPLES", 4000)
    values = np.random.default_rng(0).normal(size=30)
    paired, apart = (hierarchical([values, values], paired=way) for way in (True, False))
    widths = [found.high - found.low for found in (paired, apart)]
    assert widths[0] / widths[1] == pytest.approx(np.sqrt(2), rel=0.1)
    assert widths[0] == pytest.approx(2 * 1.96 * values.std() / np.sqrt(30), rel=0.05)


def test_a_verdict_requires_that_the_interval_and_every_seed_agree():
    assert Seeds(2.0, 1.0, 3.0, (1.5, 2.0, 2.5)).verdict("more", "less") == "more"
    assert Seeds(-2.0, -3.0, -1.0, (-1.5, -2.5)).verdict("more", "less") == "less"
    assert Seeds(2.0, 0.5, 3.0, (-0.1, 2.0, 4.1)).verdict("more", "less") == "cannot tell"
    assert Seeds(2.0, -0.5, 3.0, (1.9, 2.1)).verdict("more", "less") == "cannot tell"
    assert Seeds(2.0, 1.0, 3.0, (1.5, 2.5)).verdict("more", "less", threshold=1.6) == "cannot tell"
    assert Seeds(2.0, NAN, NAN, (2.0,)).verdict("more", "less") == "cannot tell"
    assert not Seeds(1.0, 0.5, 2.0, (0.0, 2.0)).agree()
    assert not Seeds(NAN, NAN, NAN, (NAN, NAN)).agree()


def test_the_table_has_a_row_per_entry_with_every_seed():
    rng = np.random.default_rng(4)
    models = {
        f"seed-{at}": xr.Dataset(
            {"cost": (("prompt", "pick"), rng.normal([at, 0.2 * (-1) ** at], 0.01, (20, 2)))}, {"pick": ["one", "two"]}
        )
        for at in (1, 2, 3)
    }
    table = seeds_table(models, ["cost"]).set_index("pick")
    assert table.loc["one", ["measure", "seeds", "agree"]].tolist() == ["cost", 3, "yes"]
    assert table.loc["one", "estimate"] == pytest.approx(2, abs=0.02)
    assert table["agree"].tolist() == ["yes", "no"]
    assert [float(value) for value in table.loc["one", "by_seed"].split()] == pytest.approx([1, 2, 3], abs=0.02)


def test_entries_are_matched_by_label_although_models_have_different_ones():
    values = {"1": (["0", "a", "b"], [0.0, 1.0, 2.0]), "2": (["0", "9", "a", "b"], [0.0, 5.0, 1.0, 3.0])}
    models = {
        name: xr.Dataset({"x": (("prompt", "token"), [numbers] * 4)}, {"token": labels})
        for name, (labels, numbers) in values.items()
    }
    for given in (models, dict(reversed(models.items()))):
        table = seeds_table(given, ["x"]).set_index("token")
        assert sorted(table.index) == ["0", "9", "a", "b"]
        assert table["agree"].to_dict() == {"0": "", "9": "", "a": "yes", "b": "yes"}
        assert table.loc["a", "by_seed"] == "1 1"
        assert table.loc["b", "estimate"] == 2.5
        assert np.isnan(table.loc["9", "estimate"])


def test_differences_within_each_seed_are_summarized_beside_the_measurements(tmp_path):
    """Motion beyond the null, which each seed has on the same prompts: its noise over prompts cancels."""
    rng = np.random.default_rng(5)

    def moving(beyond):
        null = rng.random(20)
        values = dict.fromkeys(COMPARED, ("prompt", null + beyond))
        return xr.Dataset(values | {f"null_{name}": ("prompt", null) for name in COMPARED})

    measured = {f"seed-{at}": moving(0.1 * at) for at in (1, 2, 3)}
    table, file = write_seeds(Dynamics(), Findings(measured, {}, {}, {}), tmp_path)
    assert file == tmp_path / "dynamics-seeds.csv"
    differences = table[table["compared"] == "difference"].set_index("measure")
    assert set(differences.index) == set(COMPARED)
    assert differences["by_seed"].tolist() == ["0.1 0.2 0.3"] * 3
    assert differences["estimate"].tolist() == pytest.approx([0.2] * 3)
    assert set(table.loc[table["compared"] == "measurement", "measure"]) == set(measured["seed-1"])


def test_impossible_seeds_are_refused():
    with pytest.raises(SettingError, match=r"at least one seed; got none"):
        hierarchical([])
    with pytest.raises(SettingError, match=r"the same prompts; got 2 and 3 prompts.*paired=False"):
        hierarchical([np.zeros(2), np.zeros(3)])
