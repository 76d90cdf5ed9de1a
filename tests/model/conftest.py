"""A random model that reads ids; the package is imported once its type checks are in place."""

import pytest


@pytest.fixture
def model(architecture, causal):
    from building import shared_model

    return shared_model(architecture, causal)
