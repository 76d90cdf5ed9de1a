"""A difference above its tolerance fails, and two devices may decide differently only where a decision is tied."""

import pytest
import torch
from building import random_ids, random_model, shared_model

from sinklens.devices import agreement
from sinklens.devices.agreement import near, same_tokens

GIVEN = {"gen_length": 8, "block_length": 8, "steps": 8}


def rounded_differently(amount):
    """The shared model with noise of size `amount` on its unembedding, as if a device had added in another order."""
    model = random_model()
    noise = torch.randn(model.tree.W_U.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.tree.W_U.add_(amount * noise)
    return model


def test_a_difference_is_relative_to_the_largest_number():
    wanted = torch.tensor([0.0, 200.0, -torch.inf, torch.nan])
    assert near(wanted + 0.01, wanted, 1e-4).startswith("differs by 5e-05")
    with pytest.raises(AssertionError, match=r"differs by 0.0005; at most 0.0001 is allowed"):
        near(wanted + 0.1, wanted, 1e-4)
    with pytest.raises(AssertionError, match=r"hook_z differs by nan"):
        near(torch.zeros(4), wanted, 1e-4, "hook_z")
    with pytest.raises(AssertionError, match=r"shape \[3\] instead of \[4\]"):
        near(wanted[:3], wanted, 1e-4)


def test_the_same_run_passes():
    result = same_tokens(shared_model(), random_model(), random_ids(length=9), GIVEN)
    assert result == "8 steps, all canvases the same"


def test_a_device_with_different_logits_fails():
    with pytest.raises(
        AssertionError, match=r"step 0: logits differ by .* on the same canvas, which is more than rounding"
    ):
        same_tokens(shared_model(), rounded_differently(0.3), random_ids(length=9), GIVEN)


def test_a_decision_within_the_noise_is_a_tie(monkeypatch):
    monkeypatch.setattr(agreement, "NOISE", 1.0)
    result = same_tokens(shared_model(), rounded_differently(0.1), random_ids(length=9), GIVEN)
    assert result.startswith("the same until step ")
    assert "where decisions are tied" in result


def test_a_different_decision_without_noise_fails(monkeypatch):
    """One sampler decides differently although the logits are the same."""
    original, plain = agreement._run, random_model()

    def remasking_randomly(model, prompt, **given):
        return original(model, prompt, **given, **({"remasking": "random"} if model is plain else {}))

    monkeypatch.setattr(agreement, "_run", remasking_randomly)
    with pytest.raises(AssertionError, match=r"decisions .* apart differ, where logits differ by 0"):
        same_tokens(shared_model(), plain, random_ids(length=9), GIVEN)


def test_decisions_are_separated_by_a_gap_of_logits_or_of_log_odds():
    mask = 9
    logits = torch.tensor([[2.0, 1.5, 0.0], [3.0, 0.0, 0.0], [0.5, 0.2, 0.0]]).double()
    before = torch.tensor([mask, mask, mask])
    odds = [float(row.max() - row[1:].logsumexp(0)) for row in logits]

    def after(**tokens):
        canvas = before.clone()
        for place, token in tokens.items():
            canvas[int(place[1:])] = token
        return torch.stack([before, canvas])

    assert agreement._separation(logits, after(p0=0), after(p0=1)) == pytest.approx(0.5)
    assert agreement._separation(logits, after(p1=0), after(p0=0)) == pytest.approx(odds[1] - odds[0])
    assert agreement._separation(logits, after(p0=0, p1=0), after(p0=1, p2=0)) == pytest.approx(
        max(0.5, odds[1] - odds[2])
    )
