"""The head study compared with single runs, and its table on planted effects."""

import numpy as np
import pytest
import xarray as xr

import sinklens
from sinklens.analyses.answers import unchanged
from sinklens.analyses.heads import WAYS, Heads, _confirmed
from sinklens.experiments import effect, head_outputs
from sinklens.interventions import AblateHeads, MaskSinks
from sinklens.tasks import held_out
from sinklens.tasks.word_problems import training

PROMPT = held_out(1)[0].prompt
SETTINGS = {"gen_length": 2}


@pytest.fixture(scope="module")
def measured(tiny_llada):
    return Heads(top_k=2, reference=3).measure(tiny_llada, [PROMPT], SETTINGS)


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (2, 5)])
def test_every_number_is_stored_under_its_intervention_layer_and_head(tiny_llada, measured, layer, head):
    place = {"layers": [layer], "heads": [head]}
    reference = head_outputs(tiny_llada, [problem.prompt for problem in training(0, 3)], **SETTINGS)
    listed = {
        "strongest": MaskSinks(top_k=2, **place),
        "zero": AblateHeads(**place),
        "mean": AblateHeads(by="mean", reference=reference, **place),
    }
    for way, hooks in listed.items():
        one = effect(tiny_llada, [PROMPT], hooks, **SETTINGS)
        got = measured.sel(way=way, layer=layer, head=head).isel(prompt=0)
        assert float(got["kl"]) == pytest.approx(float(one.under_replay["kl"].mean()), abs=1e-4)
        assert float(got["changed"]) == float(not one.free_running["same_answer"].item())
    assert measured["kl"].shape == (1, len(WAYS), 4, 6)


def test_steps_are_averaged_over_heads_and_exclude_all_heads_at_once(tiny_llada, measured):
    np.testing.assert_allclose(measured["kl_step"].mean("step"), measured["kl"].mean("head"), rtol=1e-6)
    assert (measured["kl_step"].isel(step=0).sel(way=["strongest", "steady"]) < 1e-9).all()  # no previous step
    one = effect(tiny_llada, [PROMPT], MaskSinks(top_k=2), **SETTINGS)
    every = measured["all_kl"].sel(together="strongest")
    assert float(every.item()) == pytest.approx(float(one.under_replay["kl"].mean()), abs=1e-4)


def test_mean_outputs_belong_to_the_given_model_even_if_another_had_its_name():
    study, models = Heads(reference=2), [sinklens.load("tiny-llama") for _ in range(2)]
    models[1].tree.hf.model.layers[0].self_attn.v_proj.weight.data *= 2
    listed = [study.interventions(one, unchanged(study, one, PROMPT, SETTINGS), SETTINGS) for one in models]
    first, second = (float(found["mean 0 0"].reference.mean[0, 0].norm()) for found in listed)
    assert second == pytest.approx(2 * first, rel=0.2)


def test_the_table_names_the_head_with_the_largest_effect():
    values = np.zeros((3, len(WAYS), 2, 2))
    values[:, 1, 1, 0] = [1, 2, 3]
    axes = ("prompt", "way", "layer", "head")
    right = 1 - values / 3
    data = xr.Dataset(
        {"kl": (axes, values), "changed": (axes, values / 3), "right": (axes, right)},
        coords={"way": list(WAYS), "layer": [0, 1], "head": [0, 1], "together": ["strongest", "steady"], "step": [0]},
    )
    for name in ("kl", "changed", "right"):
        data[f"all_{name}"] = (("prompt", "together"), np.full((3, 2), 0.5))
    data["kl_step"] = (("prompt", "way", "layer", "step"), np.zeros((3, len(WAYS), 2, 1)))
    table = Heads().tables({"planted": data})["ways"].set_index(["measure", "way", "heads"])["estimate"]
    assert table["kl", "steady", "one, the strongest: 1.0"] == 2
    assert table["right", "steady", "one, the strongest: 1.0"] == pytest.approx(1 / 3)
    assert table["kl", "steady", "one, mean over all"] == 0.5
    assert table["changed", "strongest", "all at once"] == 0.5


def test_the_strongest_head_is_confirmed_on_prompts_that_did_not_pick_it():
    """Effects are noise of mean 1: the maximum of 24 heads is far above 1, the same head on other prompts is not."""
    rng = np.random.default_rng(5)
    axes, places = ("prompt", "way", "layer", "head"), {"layer": range(4), "head": range(6), "way": list(WAYS)}
    noise = rng.exponential(size=(60, len(WAYS), 4, 6))
    coins = (rng.random((60, len(WAYS), 4, 6)) < 0.3).astype(float)
    data = xr.Dataset({"kl": (axes, noise), "changed": (axes, coins), "right": (axes, coins)}, places)
    found = _confirmed({"noise": data}, seed=0)
    assert len(found) == 3 * len(WAYS)
    assert set(found["prompts"]) == {30}
    for row in found.itertuples():
        values = data[row.measure].sel(way=row.way)
        first = values[::2].mean("prompt")
        assert float(first[row.layer, row.head]) == float(first.min() if row.measure == "right" else first.max())
        assert row.estimate == pytest.approx(float(values[1::2].mean("prompt")[row.layer, row.head]))
    assert (
        found.set_index("measure").loc["kl", "estimate"].mean()
        < 1.2
        < float(noise[::2].mean(0).max(axis=(1, 2)).mean())
    )
    assert _confirmed({"noise": data.isel(prompt=[0])}, seed=0)["estimate"].isna().all()
