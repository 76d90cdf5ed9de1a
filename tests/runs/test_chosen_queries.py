"""Sink scores that sum over chosen queries equal sums of the pattern's rows."""

import numpy as np
import pytest
import torch
from asked import WORDS as PROMPTS

import sinklens
from sinklens.errors import SettingError
from sinklens.sinks import Record

SETTINGS = {"gen_length": 6, "cfg_scale": 0.5}


@pytest.fixture(scope="module")
def base(worded):
    return sinklens.generate(worded("llama"), PROMPTS, **SETTINGS)


@pytest.fixture(scope="module")
def queries(base):
    return torch.rand(base.canvas[:, :-1].shape, generator=torch.Generator().manual_seed(0)) < 0.4


@pytest.mark.parametrize("explicit", [False, True])
def test_scores_are_sums_of_the_chosen_real_rows_and_logits_do_not_change(worded, base, queries, explicit):
    model, patterns = worded("llama"), {}

    def keep(value, hook):
        patterns[hook.step, hook.layer()] = value.clone()

    hooks = [(lambda name: name.endswith("hook_pattern"), keep)] if explicit else []
    kept = Record(queries=queries.numpy(), patterns=[(2, 1)])
    run = sinklens.generate(model, PROMPTS, hooks=hooks, record_sinks=kept, **SETTINGS)
    assert torch.equal(run.canvas, base.canvas)
    counted = (queries & base.real[:, None]).numpy()
    assert np.array_equal(run.sinks["computed"].to_numpy(), counted)
    rows = run.patterns[2, 1].numpy() * counted[:, 2, None, :, None]
    score = run.sinks["score"].isel(step=2, layer=1).to_numpy()
    np.testing.assert_allclose(score, rows.sum(axis=2), atol=1e-5)
    np.testing.assert_allclose(run.sinks.scores("percent").isel(step=2, layer=1).sum("pos").to_numpy(), 100, rtol=1e-4)
    assert model.tree.watch.forward_pass.counted is None
    for (step, layer), pattern in patterns.items():
        score = run.sinks["score"].isel(step=step, layer=layer).to_numpy()
        np.testing.assert_allclose(score, (pattern.numpy() * counted[:, step, None, :, None]).sum(axis=2), atol=1e-5)


OTHERS = "queries= is for bidirectional models without a cache policy"


@pytest.mark.parametrize(("change", "causal", "given", "text"), [
    *((change, False, SETTINGS, r"queries must be a boolean array \[batch, step, pos\]; got")
      for change in (lambda queries: queries[0], lambda queries: queries.float(), lambda queries: [[True]])),
    (lambda queries: queries[:1], False, SETTINGS, "queries has 1 rows of .* positions, this run 2 of .*; give those"),
    (lambda queries: queries[:, :3], False, SETTINGS, "has 3 steps, and the run goes on; give queries for more"),
    (lambda queries: queries, True, {"gen_length": 6}, OTHERS),
    (lambda queries: queries, False, {"gen_length": 6, "cache": "dual"}, OTHERS),
])  # fmt: skip
def test_queries_that_do_not_fit_are_refused(model, queries, change, given, text):
    with pytest.raises(SettingError, match=text):
        sinklens.generate(model, PROMPTS, record_sinks=Record(queries=change(queries)), **given)
    assert model.tree.watch.forward_pass.counted is None
