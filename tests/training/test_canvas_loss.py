"""The loss of canvas models: noise, targets and self-conditioning as defined, gradients for every weight."""

from dataclasses import replace

import pytest
import torch

from training import canvas_loss as module
from training.canvas_loss import canvas_logits, canvas_loss, replace_at_random

LENGTH = 24


@pytest.fixture(scope="module")
def toy(noisy_toy):
    return noisy_toy("tiny-canvas")[:2]


def batch():
    ids = torch.randint(3, 600, (8, 20 + LENGTH), generator=torch.Generator().manual_seed(1))
    return ids[:, :20], ids[:, 20:]


def test_conditioned_logits_are_those_of_a_pass_that_reads_the_softmax_of_a_first_one(toy):
    _, model = toy
    text, canvas = batch()
    with torch.no_grad():
        first = model(input_ids=text, decoder_input_ids=canvas).logits
        second = model(input_ids=text, decoder_input_ids=canvas, self_conditioning_logits=first).logits
        torch.testing.assert_close(canvas_logits(model, text, canvas, False), first, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(canvas_logits(model, text, canvas, True), second, atol=1e-5, rtol=1e-5)
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("canvas_length", [24, 8])
def test_the_loss_is_cross_entropy_at_every_position_of_one_canvas_after_the_clean_text(
    canvas_length, toy, monkeypatch
):
    recipe, model = replace(toy[0], block_length=canvas_length), toy[1]
    ids = torch.cat(batch(), dim=1)
    seen = []
    plain = module.canvas_logits
    monkeypatch.setattr(module, "canvas_logits", lambda *given: seen.append(given) or plain(*given))
    starts, conditioned = set(), 0
    for step in range(12):
        with torch.no_grad():
            loss = canvas_loss(model, recipe, ids, 20, 1, step).item()
            _, text, noisy, with_conditioning = seen[-1]
            start = text.shape[1]
            assert torch.equal(text, ids[:, :start])
            logs = plain(model, text, noisy, with_conditioning).log_softmax(dim=-1)
        wanted = [
            [-logs[row, place, ids[row, start + place]].item() for place in range(canvas_length)] for row in range(8)
        ]
        assert loss == pytest.approx(torch.tensor(wanted).mean().item(), rel=1e-4)
        starts.add(start)
        conditioned += with_conditioning
    assert starts == set(range(20, 44, canvas_length))
    assert 2 <= conditioned <= 10


def test_tokens_are_replaced_with_the_probability_of_their_row_by_any_token():
    noisy, t = replace_at_random(torch.full((400, LENGTH), 9), 50, torch.Generator().manual_seed(0))
    assert ((noisy != 9).float().mean(dim=1, keepdim=True) - t * 49 / 50).abs().mean() < 0.09
    assert torch.equal(noisy.unique(), torch.arange(50))
    counts = torch.bincount(noisy[noisy != 9], minlength=50).float()
    counts = counts[torch.arange(50) != 9]
    assert float(counts.std() / counts.mean()) < 0.15
