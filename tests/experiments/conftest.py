"""What the tests of experiments share; the package is imported once its type checks are in place."""

import pytest


@pytest.fixture(params=["llama", "qwen3", "causal", "mdlm", "duo", "gidd"])
def oracle(request, conformance):
    """A model, and its pass in plain torch."""
    from oracles import oracle_of

    return oracle_of(request.param, conformance)
