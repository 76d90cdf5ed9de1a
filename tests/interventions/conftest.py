"""Models that several files of this folder need."""

from collections.abc import Callable
from functools import cache

import pytest
from building import random_hf
from layouts import word_tokenizer, write_family

import sinklens
from sinklens import Model


@pytest.fixture(scope="session")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Random models that read words, so that prompts of different length can be given: ``worded("qwen3", True)``.

    "dream" has Dream's sampler and shift.
    """

    @cache
    def make(architecture: str = "llama", causal: bool = False) -> Model:
        folder = tmp_path_factory.mktemp("model")
        words = word_tokenizer(folder / "words")
        if architecture != "dream":
            return sinklens.load(random_hf(architecture, causal), tokenizer=words)
        write_family(folder, "dream")
        return sinklens.load(folder, tokenizer=words)

    return make
