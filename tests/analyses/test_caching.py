"""The caching study: which keys are stale, what they cost, and motion beside the same queries of the exact run."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.analyses.caching import (
    MOTION,
    SOURCES,
    Caching,
    candidates,
    chosen_keys,
    claim_values,
    fresh_keys,
)
from sinklens.experiments import effect
from sinklens.sampling import Planned
from sinklens.sinks import EpsilonOverMean, Record, SinkTrack
from sinklens.sinks.kinds import kinds
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(3)[1:]]
SETTINGS = {"gen_length": 8, "steps": 8}
EVERY = 4
STALE = [1, 2, 3, 5, 6, 7]


@pytest.fixture(scope="module")
def tiny_dream():
    return sinklens.load("tiny-dream")


@pytest.fixture(scope="module")
def run(tiny_dream):
    return sinklens.generate(tiny_dream, PROMPTS[1], **SETTINGS)


@pytest.fixture(scope="module")
def sets(run):
    allowed = candidates(run, EVERY)
    return allowed, chosen_keys(run, allowed, EpsilonOverMean(), EVERY, 0)


@pytest.fixture(scope="module")
def measured(tiny_dream):
    return Caching(every=EVERY).measure(tiny_dream, PROMPTS[1:], SETTINGS).isel(prompt=0)


@pytest.mark.parametrize("condition", [("stale", "sink"), ("fresh", "same_mass"), ("fresh", "none")])
def test_the_cost_of_a_choice_is_the_effect_of_a_policy_with_these_stale_keys(
    tiny_dream, run, sets, measured, condition
):
    fresh = fresh_keys(*condition, sets[1], sets[0])
    found = effect(tiny_dream, PROMPTS[1], cache=Planned(fresh[None]), **SETTINGS)
    age = (np.arange(run.steps_run) % EVERY)[:, None, None]
    np.testing.assert_array_equal(found.replayed.sinks["staleness"].to_numpy()[0], np.where(fresh, 0, age))
    replayed = found.under_replay.isel(batch=0, step=STALE)
    assert float(replayed["kl"].mean()) > 1e-7
    here = measured.sel(dict(zip(("change", "choice"), condition, strict=True)))
    assert float(here["kl"]) == pytest.approx(float(replayed["kl"].mean()), rel=1e-3)
    assert float(here["proposals"]) == pytest.approx(1 - float(replayed["top1_agreement"].mean()), abs=1e-6)


def test_sinks_and_controls_are_chosen_when_an_episode_begins(run):
    """Planted scores: in layer 2, two sinks in different heads; one is undecided, and so never stale."""
    score = np.full_like(run.sinks["score"].to_numpy(), 0.5)
    decided, masked = 10, run.prompt_length + 3
    score[0, 0, 2, 0, decided], score[0, 0, 2, 3, masked] = 9.0, 9.0
    planted = replace(run, sinks=SinkTrack(run.sinks.data.assign(score=(run.sinks["score"].dims, score))))
    allowed = candidates(run, EVERY)
    assert not allowed[[0, 4]].any()
    assert not (allowed[1:4] & run.undecided[0, 0].numpy()).any()
    assert not allowed[1, run.prompt_length - 1], "Dream computes the position before an undecided one"
    found = chosen_keys(planted, allowed, EpsilonOverMean(), EVERY, 0)
    assert [place.tolist() for place in np.nonzero(found["sink"])] == [[1, 2, 3], [2, 2, 2], [decided] * 3]
    mean = score[0, 0, 2].mean(axis=0)
    codes = kinds(run.sinks).to_numpy()[0, 0]
    picked = {name: np.flatnonzero(keys[1, 2]) for name, keys in found.items()}
    assert abs(mean[picked["same_mass"]].sum() - mean[decided]) <= 0.25  # half of a key
    assert codes[picked["same_kind"]].tolist() == codes[picked["sink_of_kind"]].tolist() == [codes[decided]]
    assert (picked["nearest"].tolist(), len(picked["random"])) == ([decided - 1], 1)
    for name in ("same_mass", "same_kind", "nearest", "random"):
        assert not set(picked[name]) & {decided}
        assert (found[name][1] == found[name][3]).all()
        assert not found[name][:, [0, 1, 3]].any()
        assert not found[name][4:].any()


def test_motion_is_compared_with_sums_over_the_same_queries(tiny_dream):
    study, prompt = Caching(), PROMPTS[0]
    run = sinklens.generate(tiny_dream, [prompt], record_sinks=Record(patterns=[(2, 1), (5, 3)]), **SETTINGS)
    members = torch.rand(2, run.steps_run, run.canvas.shape[2], generator=torch.Generator().manual_seed(0)) > 0.5
    sums = study._sums(run, prompt, SETTINGS, members)
    for (step, layer), pattern in run.patterns.items():
        for row in range(2):
            np.testing.assert_allclose(sums[row, step, layer], pattern[0][:, members[row, step]].sum(dim=1), atol=1e-5)


def test_policies_that_compute_everything_cost_nothing_and_move_as_the_exact_run(tiny_llada):
    data = Caching(every=1).measure(tiny_llada, PROMPTS[:1], SETTINGS).isel(prompt=0)
    assert float(data["policy_kl"].max()) < 1e-8
    for measure in MOTION:
        for source in SOURCES:
            np.testing.assert_allclose(data[measure].sel(source=source), data[measure].sel(source="exact"), atol=1e-6)
    assert bool(data["kl"].isnull().all())  # no step has stale keys


def test_planted_differences_are_the_only_claims_that_hold(measured):
    data, noise = xr.concat([xr.zeros_like(measured)] * 30, dim="prompt").copy(deep=True), np.linspace(0.9, 1.1, 30)
    data["kl"].loc[{"change": "stale", "choice": ["sink", "sink_of_kind"]}] = 0.02 * noise[:, None]
    data["sink_jump_share"].loc[{"policy": "dual", "source": "same queries"}] = 0.1 * noise
    data["jump_share"].loc[{"policy": "delayed", "source": "policy"}] = 0.1 * noise
    data["jump_share"].loc[{"source": "exact"}] = 0.5  # sums over other queries do not matter
    data = data.assign(difference=xr.concat([claim_values(data.isel(prompt=row)) for row in range(30)], dim="prompt"))
    table = Caching().tables({"planted": data})["claims"].set_index("claim")
    assert set(table.index[table["verdict"] == "holds"]) == {
        "stale sinks change predictions more than random keys with as much attention",
        "stale sinks change predictions more than random keys of the same kinds of token",
        "stale sinks change predictions more than the nearest keys",
        "stale sinks change predictions more than as many random keys",
        "sinks move less under DualCache",
    }
    assert table.index[table["verdict"] == "no"].tolist() == ["strongest keys move less under DelayedCache"]
