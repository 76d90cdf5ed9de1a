"""The loss of block-causal models: its one pass computes what sinklens computes block by block."""

import pytest
import torch
import torch.nn.functional as F

import sinklens
from training.block_loss import block_loss, completed, corrupt_blocks, doubled, doubled_logits

BLOCK, PROMPT, MASK = 8, 21, 1


@pytest.fixture(scope="module")
def model(noisy_toy):
    recipe, hf, folder = noisy_toy("tiny-sdar")
    return recipe, hf, sinklens.load(folder)


def rows(count=4):
    """Prompt and answer of the lengths of the training rows; the answer ends with end tokens."""
    ids = torch.randint(3, 600, (count, PROMPT + 24), generator=torch.Generator().manual_seed(1))
    ids[:, -2:] = 0
    return ids


def noisy_rows(seed=2):
    clean = completed(rows(), BLOCK)
    return clean, *corrupt_blocks(clean, PROMPT, BLOCK, MASK, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_each_noisy_block_gets_the_logits_of_the_clean_text_before_it_and_itself(model, implementation):
    _, hf, loaded = model
    hf.set_attn_implementation(implementation)
    clean, noisy, _ = noisy_rows()
    with torch.no_grad():
        found = doubled_logits(hf, doubled(clean, noisy, PROMPT, BLOCK))
        assert found.shape[1] == 32  # of the 48 positions of the completed rows
        for number, start in enumerate(range(16, 48, BLOCK)):
            expected = loaded(torch.cat([clean[:, :start], noisy[:, start : start + BLOCK]], dim=1))[:, start:]
            torch.testing.assert_close(found[:, number * BLOCK : (number + 1) * BLOCK], expected, atol=1e-5, rtol=1e-5)


def naive_doubled_logits(hf, clean, noisy):
    """The published pass, over all blocks of both copies, with its mask written out position by position."""
    length = clean.shape[1]
    sees = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
    for query in range(2 * length):
        for key in range(2 * length):
            a, b = query % length // BLOCK, key % length // BLOCK
            if query < length:  # noisy
                sees[query, key] = a == b if key < length else b < a
            else:
                sees[query, key] = key >= length and b <= a
    positions = torch.arange(length).repeat(2)[None]
    ids = torch.cat([noisy, clean], dim=1)
    return hf(input_ids=ids, attention_mask=sees[None, None], position_ids=positions).logits[:, :length]


def test_the_blocks_that_are_left_out_of_the_pass_change_neither_logits_nor_gradients(model):
    recipe, hf, _ = model
    clean, noisy, weight = noisy_rows(recipe.seed * 1_000_003 + 6 + 500_000_003)
    hf.zero_grad()
    loss = F.cross_entropy(naive_doubled_logits(hf, clean, noisy).transpose(1, 2), clean, reduction="none")
    expected = (loss * weight).sum() / (4 * 27)  # an answer of 24 tokens, continued by 3
    expected.backward()
    gradients = {name: value.grad.clone() for name, value in hf.named_parameters()}
    hf.zero_grad()
    found = block_loss(hf, recipe, rows(), PROMPT, MASK, step=6)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, value in hf.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], atol=1e-4, rtol=1e-3)
    hf.zero_grad(set_to_none=True)


def test_each_block_has_its_own_noise_level_and_the_prompt_is_never_masked():
    ids = completed(torch.full((600, PROMPT + 24), 9), BLOCK)
    noisy, weight = corrupt_blocks(ids, PROMPT, BLOCK, MASK, torch.Generator().manual_seed(0))
    assert torch.equal(noisy == MASK, weight > 0)
    assert not (noisy[:, :PROMPT] == MASK).any()
    complete = weight[:, 24:].unflatten(1, (-1, BLOCK))  # the blocks without prompt tokens
    share = (complete > 0).float().mean(dim=2)
    t = torch.where(share > 0, 1 / complete.amax(dim=2), 0)
    assert (share - t)[share > 0].abs().mean() < 0.15
    assert float(weight.max()) <= 1e3 + 1
    assert torch.corrcoef(share.T).fill_diagonal_(0).abs().max() < 0.15  # levels of a row's blocks are independent
    assert weight.mean(dim=0)[PROMPT:].mean() == pytest.approx(1, abs=0.1)  # masked with t, weighted by 1/t
