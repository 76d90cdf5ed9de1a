"""The features study: contrasts and moves with planted truth, and every measure of a run by hand."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses.feature_places import by_place, by_step_and_kind, contrast, moves
from sinklens.analyses.features import CLAIMED, MEASURES, ROLES, Features, claims, matched
from sinklens.errors import SettingError
from sinklens.experiments import effect
from sinklens.features import SparseAutoencoder, SpliceSAE, load_sae, read_features, save_sae
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
SETTINGS = {"gen_length": 12, "steps": 6, "block_length": 12}
EVERYWHERE = np.ones((3, 5), dtype=bool)


@pytest.fixture(scope="module")
def study(tiny_llada):
    study = Features(problems=4, chosen=3, batch=2)
    return study, study.measure(tiny_llada, PROMPTS, SETTINGS)


def test_contrasts_compare_within_a_step_and_kind_or_within_a_place():
    kind = np.array([[0, 0, 1, 1, 1]] * 3)
    sinks = np.zeros((3, 5), dtype=bool)
    sinks[0, 0] = sinks[0, 2] = sinks[1, 2] = True
    fires = np.zeros((3, 5, 3), dtype=bool)
    fires[..., 0] = sinks  # follows the sinks
    fires[:, [0, 2], 1] = True  # follows the places
    fires[..., 2] = kind == 1  # follows the kind
    difference, count = contrast(fires, sinks, EVERYWHERE, by_step_and_kind(kind))
    assert (difference.tolist(), count) == ([1.0, 1.0, 0.0], 3)
    difference, count = contrast(fires, sinks, EVERYWHERE, by_place(kind))
    assert (difference.tolist(), count) == ([1.0, 0.0, 0.0], 3)
    part = EVERYWHERE.copy()
    part[0, 1] = part[:, 3:] = False  # the sinks have no other position of their kind left
    difference, count = contrast(fires, sinks, part, by_step_and_kind(kind))
    assert (np.isnan(difference).all(), count) == (True, 0)


def test_features_that_go_with_a_moving_sink_arrive_and_leave():
    strongest = np.array([[1], [1], [3]])
    sinks = np.zeros((3, 1, 5), dtype=bool)
    sinks[[0, 1, 2], 0, [1, 1, 3]] = True
    fires = np.zeros((3, 5, 3), dtype=bool)
    fires[..., 0] = sinks[:, 0]  # goes with it
    fires[:, [1, 3], 1] = True  # fires at both places all the time
    arrives, leaves, count = moves(fires, sinks, strongest, EVERYWHERE)
    assert (arrives.tolist(), leaves.tolist(), count) == ([1, 0, 0], [1, 0, 0], 1)
    outside = EVERYWHERE.copy()
    outside[1, 3] = False
    arrives, leaves, count = moves(fires, sinks, strongest, outside)
    assert np.isnan(arrives).all()
    assert leaves.tolist() == [1, 0, 0]
    sinks[2] = False  # the strongest key moves, but is no longer a sink
    assert moves(fires, sinks, strongest, EVERYWHERE)[2] == 0


def test_controls_have_the_nearest_rate_among_features_that_sinks_do_not_explain():
    difference = np.array([0.9, 0.8, 0.5, 0.01, -0.02, 0.0, 0.01, 0.0])
    rate = np.array([0.3, 0.1, 0.1, 0.11, 0.32, 0.5, 0.09, 0.0])
    found = matched(difference, rate, 2)
    assert found.feature.tolist() == [[0, 1], [4, 3]]
    assert found.rate.tolist() == [[0.3, 0.1], [0.32, 0.11]]


def test_measures_of_an_ablation_equal_those_of_separate_runs(tiny_llada, study):
    chosen, data = study[0].choice(tiny_llada, SETTINGS), study[1]
    for scope, states, role in (("masked", "masked", 0), ("decided", "decided", 1)):
        sae, features = load_sae(f"tiny-llada-{scope}"), chosen[scope].feature[role].tolist()
        splice = SpliceSAE(sae, sae.point, features=features, error=True, scope=states)
        one = effect(tiny_llada, PROMPTS, splice, **SETTINGS)
        got = data.sel(sae=scope, role=list(ROLES)[role])
        np.testing.assert_allclose(got["kl"], one.under_replay["kl"].mean("step"), rtol=1e-3, atol=1e-8)
        np.testing.assert_array_equal(got["changed"], ~one.free_running["same_answer"])
        inside = one.base.undecided[:, :-1] if scope == "masked" else ~one.base.undecided[:, :-1]
        inside = (inside & one.base.real[:, None]).numpy()
        before, after = (run.sinks.detect().isel(layer=3).to_numpy() for run in (one.base, one.replayed))
        for row in range(2):
            at = before[row] & inside[row][:, None]
            expected = np.nan if not at.any() else (at & ~after[row]).sum() / at.sum()
            assert float(got["gone"][row]) == pytest.approx(expected, nan_ok=True)
            values = np.nan_to_num(read_features(one.base, sae, sae.point).to_numpy()[row])[inside[row]]
            lengths = [np.linalg.norm(sum(place[f] * sae.W_dec[f].numpy() for f in features)) for place in values]
            assert float(got["removed"][row]) == pytest.approx(np.mean(lengths), rel=1e-3)
    assert np.isfinite(data["gone"]).any()


def test_features_are_chosen_on_other_prompts_and_once(tiny_llada, study):
    chosen = study[0].choice(tiny_llada, SETTINGS)
    assert study[0].choice(tiny_llada, SETTINGS) is chosen
    for found in chosen.values():
        assert len(set(found.feature.ravel().tolist())) == 6
        assert found.excess[0].min() > abs(found.excess[1]).max()
    tables = study[0].tables({"tiny-llada": study[1]})
    assert tables["chosen"]["feature"].tolist() == [int(f) for found in chosen.values() for f in found.feature.ravel()]
    assert set(tables["measures"]["measure"]) == set(MEASURES)


def test_claims_are_paired_differences_of_chosen_and_control_features():
    sizes = (30, 2, 2)
    data = xr.Dataset(
        {name: (("prompt", "sae", "role"), np.zeros(sizes)) for name in MEASURES},
        {"sae": ["masked", "decided"], "role": list(ROLES)},
    )
    data["gone"].loc[{"sae": "masked", "role": "sink"}] = 0.5 + np.linspace(0, 0.1, 30)
    table = claims({"planted": data}, 0)
    assert len(table) == 2 * len(CLAIMED)
    held = table[table["verdict"] == "holds"]
    assert held[["measure", "sae"]].values.tolist() == [["gone", "masked"]]
    assert float(held["estimate"].iloc[0]) == pytest.approx(0.55)


def test_models_without_an_sae_are_refused(tiny_llama, tmp_path):
    with pytest.raises(
        SettingError, match="the SAE for masked positions belongs to 'tiny-llada'; tiny-llama cannot be"
    ):
        Features().run([tiny_llama], PROMPTS)
    sae = load_sae("tiny-llada-masked")
    other = SparseAutoencoder(
        sae.W_enc, sae.b_enc, sae.W_dec, torch.zeros(192), k=4, point="blocks.1.hook_mlp_out", model="tiny-llada"
    )
    save_sae(other, tmp_path)
    with pytest.raises(SettingError, match=r"must be at one hook_resid_post; got blocks.1.hook_mlp_out, blocks.2"):
        Features(masked=str(tmp_path)).saes()


@dataclass
class Counted(Features):
    asked: ClassVar[int] = 0

    def measure(self, model, prompts, settings):
        Counted.asked += len(prompts)
        return xr.Dataset({"one": ("prompt", np.ones(len(prompts)))})

    def tables(self, measured):
        return {}

    def figures(self, measured, examples):
        return {}


def test_a_folder_whose_sae_was_replaced_is_measured_again(tiny_llada, tmp_path):
    sae, out = load_sae("tiny-llada-masked"), tmp_path / "out"
    save_sae(sae, tmp_path / "sae")
    study = Counted(masked=str(tmp_path / "sae"))
    before = study.run(tiny_llada, PROMPTS, out).manifest
    study.run(tiny_llada, PROMPTS, out)
    assert Counted.asked == 2  # finished prompts are not measured again
    save_sae(replace(sae, b_dec=sae.b_dec + 1), tmp_path / "sae")
    with pytest.warns(UserWarning, match="holds another run of this study"):
        after = study.run(tiny_llada, PROMPTS, out).manifest
    assert Counted.asked == 4
    assert after["inputs"]["masked"] != before["inputs"]["masked"]
    assert after["inputs"]["decided"] == before["inputs"]["decided"]
