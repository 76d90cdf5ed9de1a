"""Recipes: models that are compared differ in one setting."""

from dataclasses import replace

import pytest

from sinklens.zoo import RECIPES, Recipe, training


def test_the_twins_differ_only_in_the_objective():
    diffusion, causal = RECIPES["tiny-llada"], RECIPES["tiny-llama"]
    assert replace(diffusion, name="", objective="causal") == replace(causal, name="")


def test_the_skilled_twins_share_all_steps_that_both_have():
    diffusion, causal = RECIPES["tiny-llada-skills"], RECIPES["tiny-llama-skills"]
    both = min(diffusion.steps, causal.steps)
    assert replace(diffusion, name="", objective="causal").until(both) == replace(causal, name="").until(both)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
def test_the_skilled_twins_continue_from_the_end_of_the_others(name):
    complete = RECIPES[f"{name}-skills"]
    assert replace(complete.until(RECIPES[name].steps), name=name) == RECIPES[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no-start", {"start_token": "absent"}),
        ("masked-start", {"start_token": "maskable"}),
        ("weight-decay-0", {"weight_decay": 0.0}),
        ("weight-decay-0.5", {"weight_decay": 0.5}),
        ("sigmoid", {"attention": "sigmoid"}),
        ("off-by-one", {"attention": "off-by-one"}),
        ("seed-2", {"seed": 2}),
        ("seed-3", {"seed": 3}),
    ],
)
def test_a_variant_changes_one_setting_of_the_first_cycle(name, change):
    assert replace(RECIPES["tiny-llada"].until(2800), name=name, **change) == RECIPES[name]
    assert RECIPES[name].changes() == {"cycles": (2800,), **change}


def test_a_variant_has_the_learning_rates_of_its_reference_model():
    variant, complete = RECIPES["seed-2"], RECIPES["tiny-llada"]
    for step in range(0, variant.steps, 7):
        assert training.learning_rate(variant, step) == training.learning_rate(complete, step)


def test_steps_depend_on_the_cycles_up_to_them_and_their_data():
    complete = Recipe("mixed", "masked", cycles=(30, 20, 10), peaks=(1.0, 0.5, 0.5), code=9, skills=5, problems_first=2)
    for step in (0, 1, 30):
        assert complete.until(step) == Recipe("mixed", "masked", cycles=(30,))
    for step in (31, 50):
        assert complete.until(step) == Recipe("mixed", "masked", cycles=(30, 20))
    for step in (51, 60, 99):
        assert complete.until(step) == complete
    assert replace(complete, peaks=(1.0, 0.25, 0.5)).until(31) != complete.until(31)
    assert replace(complete, peaks=(1.0, 0.25, 0.5)).until(30) == complete.until(30)
    assert replace(complete, problems_first=1).until(31) != complete.until(31)


def test_a_cycle_peaks_at_half_the_previous_peak_unless_the_recipe_sets_another():
    halved = Recipe("plain", "masked", cycles=(10, 10, 10), learning_rate=0.8)
    assert [halved.peak(cycle) for cycle in range(3)] == [0.8, 0.4, 0.2]
    assert [replace(halved, peaks=(1.0, 0.5, 0.5)).peak(cycle) for cycle in range(3)] == [0.8, 0.4, 0.4]
    assert [halved.cycle(step) for step in (0, 9, 10, 19, 20, 29, 30)] == [0, 0, 1, 1, 2, 2, 2]


def test_all_recipes_have_the_same_size_and_each_its_family():
    sizes = {(r.d_model, r.n_layers, r.n_heads, r.context) for r in RECIPES.values()}
    assert len(sizes) == 1
    assert {r.d_mlp for r in RECIPES.values() if r.objective != "uniform"} == {512}  # the canvas model has experts too
    shipped = [name for name in RECIPES if name.startswith("tiny-") and "skills" not in name and "seed" not in name]
    named = {name: RECIPES[name].family for name in shipped}
    assert named == {
        "tiny-llada": "llada", "tiny-llama": "llama", "tiny-dream": "dream", "tiny-mmada": "mmada",
        "tiny-sdar": "sdar", "tiny-llada-moe": "llada-moe", "tiny-canvas": "diffusion-gemma",
        "tiny-text": "llada", "tiny-text-causal": "llama", "tiny-two-modes": "nemotron-diffusion",
    }  # fmt: skip
    others = {
        r.family for name, r in RECIPES.items() if name not in (*named, "tiny-llama-skills") and "-seed-" not in name
    }
    assert others == {"llada"}


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama", "tiny-dream", "tiny-mmada", "tiny-two-modes"])
def test_a_recipe_with_another_seed_is_otherwise_the_same(name, seed):
    recipe = RECIPES[f"{name}-seed-{seed}"]
    begins = {"tiny-dream": "tiny-llama", "tiny-mmada": "tiny-llada", "tiny-two-modes": "tiny-llama"}.get(name)
    start = begins and f"runs/{begins}-seed-{seed}/checkpoint"
    assert recipe == replace(RECIPES[name], name=recipe.name, seed=seed, start_from=start)
