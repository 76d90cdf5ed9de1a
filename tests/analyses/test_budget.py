"""The budget study: how many keys a query sees, and that a larger budget changes less."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses.budget import BUDGETS, KEY_KINDS, Budget, restricted
from sinklens.experiments import effect
from sinklens.sinks import Record
from sinklens.tasks.word_problems import held_out

PROMPT = held_out(1)[0].prompt
STEPS = 6


@pytest.mark.parametrize("kind", KEY_KINDS)
@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_every_query_sees_itself_and_the_budgeted_number_of_keys(name, kind, request):
    model = request.getfixturevalue(name)
    base = sinklens.generate(model, [PROMPT], gen_length=STEPS)
    places = [(step, 1) for step in range(STEPS)]
    hooks = restricted(kind, 8, STEPS, base.sinks)
    run = sinklens.generate(model, [PROMPT], hooks=hooks, gen_length=STEPS, record_sinks=Record(patterns=places))
    for (step, _), pattern in run.patterns.items():
        seen = (pattern[0] > 0).sum(-1)
        if step == 0:
            assert torch.equal(seen.amax(-1), torch.full((6,), pattern.shape[-1]))
            continue
        query = seen if not run.model.config.is_causal else seen[:, -1:]
        if kind == "same_mass":  # as many as it takes
            assert int(query.max()) > 9
            continue
        assert int(query.max()) <= 9
        middle = query[:, 10:-10] if kind == "near" else query  # fewer neighbours near the ends
        least = {"near": 9, "mixed": 5}.get(kind, 8)  # the query itself, or a neighbour, may be among the strongest
        assert middle.numel() == 0 or int(middle.min()) >= least
        if kind in ("strongest", "weakest"):
            score = base.sinks.scores().isel(batch=0, step=step - 1, layer=1).to_numpy()
            for head in range(6):
                order = np.argsort(-score[head][~np.isnan(score[head])], kind="stable")
                kept = set(order[:8].tolist()) if kind == "strongest" else set(order[-8:].tolist())
                rows = pattern[0, head] if not run.model.config.is_causal else pattern[0, head, -1:]
                for row, weights in enumerate(rows):
                    itself = pattern.shape[-1] - len(rows) + row
                    assert set(weights.nonzero()[:, 0].tolist()) <= kept | {itself}


def test_a_prompt_shorter_than_the_budget_keeps_all_keys(tiny_llama):
    """A prompt of a few tokens has fewer than 32 keys."""
    data = Budget().measure(tiny_llama, ["Tom has"], {"gen_length": 3}).isel(prompt=0)
    assert data["kl"].shape == (len(BUDGETS), len(KEY_KINDS))
    assert float(abs(data["kl"].sel(budget=32, kind="near"))) < 1e-9
    assert data["kl"].notnull().all()
    assert data["right"].isnull().all()


def test_every_number_is_stored_under_its_budget_and_kind(tiny_llada):
    settings = {"gen_length": STEPS}
    data = Budget().measure(tiny_llada, [PROMPT], settings).isel(prompt=0)
    track = sinklens.generate(tiny_llada, [PROMPT], **settings).sinks
    for kind, keys in (("strongest", 4), ("near", 16)):
        one = effect(tiny_llada, [PROMPT], restricted(kind, keys, STEPS, track), **settings)
        got = data.sel(kind=kind, budget=keys)
        assert float(got["kl"]) == pytest.approx(float(one.under_replay["kl"].mean()), abs=1e-4)
        assert float(got["changed"]) == float(not one.free_running["same_answer"].item())
    assert float(data["kl"].sel(kind="strongest", budget=32)) < float(data["kl"].sel(kind="strongest", budget=2))
