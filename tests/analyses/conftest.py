"""One untrained model of each kind that is not shipped."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from sinklens import Model, load
from training import RECIPES, write_untrained

TINY = {"problems": 200, "d_model": 16, "n_layers": 2, "n_heads": 1, "d_mlp": 24}


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The initial model of a recipe at toy size: blocks and canvases of 8, 4 experts."""

    @cache
    def make(name: str) -> Model:
        full = RECIPES[name]
        sizes = {"d_expert": min(8, full.d_expert), "experts": min(4, full.experts)}
        recipe = replace(full, **TINY, **sizes, block_length=min(8, full.block_length))
        return load(write_untrained(recipe, tmp_path_factory.mktemp(name)))

    return make
