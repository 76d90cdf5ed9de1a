"""Recipes: models that are compared differ in one setting."""

from dataclasses import replace

import pytest

from training import RECIPES, Recipe


def test_the_twins_differ_only_in_the_objective():
    diffusion, causal = RECIPES["tiny-llada"], RECIPES["tiny-llama"]
    assert replace(diffusion, name="", objective="causal") == replace(causal, name="")


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


def test_steps_depend_on_the_cycles_up_to_them_and_their_data():
    complete = Recipe("mixed", "masked", cycles=(30, 20, 10), peaks=(1.0, 0.5, 0.5), code=9, skills=5, problems_first=2)
    first, second = (Recipe("mixed", "masked", cycles=cycles) for cycles in ((30,), (30, 20)))
    expected = (
        dict.fromkeys((0, 1, 30), first) | dict.fromkeys((31, 50), second) | dict.fromkeys((51, 60, 99), complete)
    )
    assert {step: complete.until(step) for step in expected} == expected
    assert replace(complete, peaks=(1.0, 0.25, 0.5)).until(31) != complete.until(31)
    assert replace(complete, peaks=(1.0, 0.25, 0.5)).until(30) == complete.until(30)
    assert replace(complete, problems_first=1).until(31) != complete.until(31)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama", "tiny-dream", "tiny-mmada", "tiny-two-modes"])
def test_a_recipe_with_another_seed_is_otherwise_the_same(name, seed):
    recipe = RECIPES[f"{name}-seed-{seed}"]
    begins = {"tiny-dream": "tiny-llama", "tiny-mmada": "tiny-llada", "tiny-two-modes": "tiny-llama"}.get(name)
    start = begins and f"runs/{begins}-seed-{seed}/checkpoint"
    assert recipe == replace(RECIPES[name], name=recipe.name, seed=seed, start_from=start)
