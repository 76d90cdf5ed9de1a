"""The numbers of docs/papers/causal-tracing.md against edited passes in plain torch."""

import pytest
import torch
from building import plain_pass, put

import sinklens

TEXT = "Question: Ana has 4 boxes of 6 eggs and finds 9"  # the country's place is that of the last 6


@pytest.mark.parametrize(("name", "early"), [("tiny-llada", 0), ("tiny-dream", 1), ("tiny-llama", 1)])
def test_each_probability_is_that_of_a_pass_with_this_noise_and_this_output_restored(script, name, early):
    tracing, model = script("causal_tracing"), sinklens.load(name, dtype="float64")
    ids = model.encode(TEXT).ids[0]
    end, capital = len(ids), 77
    if model.mask_token_id is not None:
        ids = torch.cat([ids, torch.tensor([model.mask_token_id, 5])])
    noise = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(4)) * 3 * model.W_E.detach().std()

    def probability(changed=None, kept=(), place=None):
        edits = {at: put((0, place), lambda value, at=at: clean[at][0, place]) for at in kept}
        if changed is not None:
            edits["hook_embed"] = put((0, changed), lambda value: value[0, changed] + noise)
        found = plain_pass(model, ids[None], edits=edits)
        return float(found.logits[0, end - early].softmax(-1)[capital]), found.values

    with torch.no_grad():
        found = tracing.traced(model, tracing.Fact(ids, end, capital), 4)
        right, clean = probability()
        assert found["clean"] == pytest.approx(right, rel=1e-5)
        for place in ("map", "country"):
            noisy, _ = probability(end + tracing.PLACES[place])
            assert found[f"noise: {place}"] == pytest.approx(noisy, rel=1e-4)
            assert abs(noisy - right) > 1e-3 * right
        cells = [cell for cell in found if isinstance(cell, tuple)]
        assert len(cells) == 2 * (10 + len(tracing.PLACES) - (model.mask_token_id is None))
        for kind, place, first, count in cells:
            points = [f"blocks.{layer}.hook_{kind}" for layer in range(first, min(first + count, model.cfg.n_layers))]
            wanted, _ = probability(end + tracing.PLACES["country"], points, end + tracing.PLACES[place])
            assert found[kind, place, first, count] + noisy == pytest.approx(wanted, rel=1e-4)
