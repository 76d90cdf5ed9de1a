"""Recipes at toy size, and the toy checkpoints that some of them start from."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from training import RECIPES, Recipe, loop, train
from training.export import export, write_checkpoint

SMALL = {
    "cycles": (6,),
    "batch": 8,
    "problems": 400,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 2,
    "d_mlp": 48,
    "warmup": 2,
    "code": 0,
    "skills": 0,
    "problems_first": 0,
    "peaks": (),
}


@pytest.fixture(scope="session", autouse=True)
def _each_tokenizer_once() -> Iterator[None]:
    """Caches tokenizers: training one takes seconds and always gives the same result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_tokenizer", cache(loop.train_tokenizer))
        yield


@pytest.fixture(scope="session")
def _toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Toy checkpoints trained so far, by name."""
    return {"folder": tmp_path_factory.mktemp("toys")}


@pytest.fixture(scope="session")
def small(_toys: dict[str, Path]) -> Callable[[str], Recipe]:
    """A recipe at toy size; one that starts from another model starts from that model's toy."""

    def make(name: str) -> Recipe:
        full = RECIPES[name]
        recipe = replace(full, **SMALL, pictures=min(200, full.pictures), d_expert=min(16, full.d_expert))
        if recipe.start_from is None:
            return recipe
        first = recipe.start_from
        if first not in _toys:
            run = _toys["folder"] / first
            list(train(make(first), run))
            _toys[first] = export(make(first), run, run / "checkpoint")
        return replace(recipe, start_from=str(_toys[first]))

    return make


@pytest.fixture(scope="session")
def noisy_toy(small: Callable[[str], Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple]:
    """A recipe, its initial model with noise on weights and buffers, and the checkpoint of that model.

    Without noise, several of these models hardly depend on their input.
    """

    @cache
    def make(name: str) -> tuple:
        recipe = small(name)
        hf = loop.build_model(recipe, loop.make_tokenizer(recipe))
        generator = torch.Generator().manual_seed(4)
        state = hf.state_dict()
        with torch.no_grad():
            for key, value in state.items():
                if key not in (hf.all_tied_weights_keys or ()):
                    value.copy_((value + 0.2 * torch.randn(value.shape, generator=generator)).bfloat16().float())
        return recipe, hf.eval(), write_checkpoint(recipe, state, tmp_path_factory.mktemp(name))

    return make
