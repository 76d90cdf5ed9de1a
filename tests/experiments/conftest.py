"""What the tests of experiments share; the package is imported once its type checks are in place."""

import pytest


@pytest.fixture
def passed(monkeypatch):
    """The ids of every pass."""
    from sinklens.hooks.tree import HookTree

    seen, hidden = [], HookTree.hidden

    def keep(self, ids, *args, **options):
        seen.append(ids)
        return hidden(self, ids, *args, **options)

    monkeypatch.setattr(HookTree, "hidden", keep)
    return seen


@pytest.fixture(params=["llama", "qwen3", "causal", "mdlm", "duo", "gidd"])
def oracle(request, conformance):
    """A model, and its pass in plain torch."""
    from oracles import oracle_of

    return oracle_of(request.param, conformance)
