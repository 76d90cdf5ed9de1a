"""The loss of two modes: its one pass computes what sinklens computes pass by pass, in both modes."""

import pytest
import torch

import sinklens
from training.block_loss import corrupt_blocks, doubled_logits
from training.mode_loss import draw_start, mode_loss, two_modes

BLOCK, PROMPT, MASK, LENGTH = 8, 21, 1, 45


@pytest.fixture(scope="module")
def model(noisy_toy):
    recipe, hf, folder = noisy_toy("tiny-two-modes")
    return recipe, hf, sinklens.load(folder)


def rows(count=3):
    """Prompt and answer of the lengths of the training rows; the answer ends with end tokens."""
    ids = torch.randint(3, 600, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, -2:] = 0
    return ids


def extended(ids, start):
    """Rows continued with their end token to the end of their last block."""
    return torch.cat([ids, ids[:, -1:].repeat(1, (start - ids.shape[1]) % BLOCK)], dim=1)


@pytest.mark.parametrize("start", [21, 18, 14])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_one_pass_has_the_logits_of_a_causal_pass_and_of_a_denoising_pass_over_each_block(model, implementation, start):
    _, hf, loaded = model
    hf.set_attn_implementation(implementation)
    clean = extended(rows(), start)
    noisy, _ = corrupt_blocks(clean, PROMPT, clean.shape[1], MASK, torch.Generator().manual_seed(2))
    with torch.no_grad():
        given = two_modes(clean, noisy, start, BLOCK)
        found = doubled_logits(hf, given, every=True)
        length = clean.shape[1]
        assert (given.noisy, found.shape[1]) == (length - start, 2 * length - start)
        torch.testing.assert_close(found[:, :length], loaded(clean, mode="causal"), atol=1e-5, rtol=1e-5)
        for first in range(start, length, BLOCK):
            text = torch.cat([clean[:, :first], noisy[:, first : first + BLOCK]], dim=1)
            expected = loaded(text, mode="denoise", block_start=first)[:, first:]
            here = found[:, length + first - start : length + first - start + BLOCK]
            torch.testing.assert_close(here, expected, atol=1e-5, rtol=1e-5)


def naive_loss(recipe, loaded, ids, step):
    """Token by token: −log p of each next token, and of each masked token with the weight 1/t of its block."""
    start = draw_start(recipe, PROMPT, step)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    clean = extended(ids, start)
    blocks = (clean.shape[1] - start) // BLOCK
    t = 1e-3 + (1 - 1e-3) * torch.rand(len(ids), blocks, generator=generator)
    drawn = torch.rand(len(ids), clean.shape[1] - start, generator=generator)
    causal = denoise = 0.0
    for row in range(len(ids)):
        logs = loaded(clean[[row]], mode="causal")[0].log_softmax(-1)
        for place in range(1, ids.shape[1]):
            weight = 1.0 if place >= PROMPT else recipe.prompt_weight / 8
            causal -= weight * float(logs[place - 1, clean[row, place]])
        for block in range(blocks):
            first, text = start + block * BLOCK, clean[[row]].clone()
            masked = [
                place for place in range(max(first, PROMPT), first + BLOCK) if drawn[row, place - start] < t[row, block]
            ]
            text[0, masked] = MASK
            logs = loaded(text[:, : first + BLOCK], mode="denoise", block_start=first)[0].log_softmax(-1)
            denoise -= sum(float(logs[place, clean[row, place]]) for place in masked) / float(t[row, block])
    return causal / (len(ids) * (LENGTH - PROMPT)) + denoise / (len(ids) * (clean.shape[1] - PROMPT))


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_loss_is_that_of_both_modes_token_by_token(model, step):
    recipe, hf, loaded = model
    with torch.no_grad():
        found = float(mode_loss(hf, recipe, rows(), PROMPT, MASK, step))
        assert found == pytest.approx(naive_loss(recipe, loaded, rows(), step), rel=1e-4)


def test_blocks_begin_at_every_place_up_to_a_block_before_the_answer(small):
    recipe = small("tiny-two-modes")
    assert {draw_start(recipe, PROMPT, step) for step in range(200)} == set(range(PROMPT - BLOCK + 1, PROMPT + 1))
    assert {draw_start(recipe, 3, step) for step in range(200)} == {1, 2, 3}  # a noisy block follows a clean token
