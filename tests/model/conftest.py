"""A random model that reads ids, and ids; the package is imported once its type checks are in place."""

import pytest


@pytest.fixture
def model(architecture, causal):
    from building import shared_model

    return shared_model(architecture, causal)


@pytest.fixture
def ids():
    """Two rows of seven."""
    from building import random_ids

    return random_ids()
