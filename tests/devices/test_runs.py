"""Two devices may decide differently where a decision is tied, and nowhere else."""

import pytest
import torch
from building import random_ids, random_model, shared_model

from sinklens.devices import runs
from sinklens.devices.runs import same_tokens

GIVEN = {"gen_length": 8, "block_length": 8, "steps": 8}


def rounded_differently(amount):
    """The shared model with its head's weights off by `amount`, as if another device had added in another order."""
    model = random_model()
    noise = torch.randn(model.tree.W_U.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.tree.W_U.add_(amount * noise)
    return model


def test_the_same_run_passes():
    said = same_tokens(shared_model(), random_model(), random_ids(length=9), GIVEN)
    assert said == "8 steps, all canvases the same"


def test_a_device_that_computes_something_else_fails():
    with pytest.raises(AssertionError, match=r"step 0: logits differ by .* on the same canvas, which is no rounding"):
        same_tokens(shared_model(), rounded_differently(0.3), random_ids(length=9), GIVEN)


def test_a_decision_that_differs_by_no_more_than_the_noise_is_a_tie(monkeypatch):
    monkeypatch.setattr(runs, "NOISE", 1.0)
    said = same_tokens(shared_model(), rounded_differently(0.1), random_ids(length=9), GIVEN)
    assert said.startswith("the same until step ")
    assert "where decisions are tied" in said


def test_a_decision_that_differs_without_noise_fails(monkeypatch):
    """The sampler of one decides otherwise although its logits are the same."""
    own, plain = runs._run, random_model()

    def unsure(model, prompt, **given):
        return own(model, prompt, **given, **({"remasking": "random"} if model is plain else {}))

    monkeypatch.setattr(runs, "_run", unsure)
    with pytest.raises(AssertionError, match=r"decisions differ that are .* apart, where logits differ by 0"):
        same_tokens(shared_model(), plain, random_ids(length=9), GIVEN)


def test_what_separates_decisions_is_a_gap_of_logits_or_of_log_odds():
    mask = 9
    logits = torch.tensor([[2.0, 1.5, 0.0], [3.0, 0.0, 0.0], [0.5, 0.2, 0.0]]).double()
    before = torch.tensor([mask, mask, mask])
    odds = [float(row.max() - row[1:].logsumexp(0)) for row in logits]

    def after(**tokens):
        canvas = before.clone()
        for place, token in tokens.items():
            canvas[int(place[1:])] = token
        return torch.stack([before, canvas])

    assert runs._separation(logits, after(p0=0), after(p0=1)) == pytest.approx(0.5)
    assert runs._separation(logits, after(p1=0), after(p0=0)) == pytest.approx(odds[1] - odds[0])
    assert runs._separation(logits, after(p0=0, p1=0), after(p0=1, p2=0)) == pytest.approx(max(0.5, odds[1] - odds[2]))
