"""Models that the tests of likelihoods share; the package is imported once its type checks are in place."""

from functools import cache

import pytest


@pytest.fixture(scope="session")
def llada():
    from building import random_model

    return random_model()


@pytest.fixture(scope="session")
def family_model(tmp_path_factory):
    """A tiny random checkpoint of a family in its published layout."""
    from layouts import arguments, write_family, write_tokenizer

    import sinklens

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp("families") / name
        write_family(folder, name)
        return sinklens.load(write_tokenizer(folder), **arguments(name))

    return make
