"""The training loss of models with two modes: next tokens under causal attention, and masked tokens of a block.

One pass over the doubled row, [clean; noisy], has both. A clean place sees the clean places up to itself, as when the
model decodes from left to right or reads finished text, and predicts the next token. A noisy place sees the clean text
before its block and all of its noisy block, and predicts its own token. Finished blocks are therefore causal among
themselves, unlike in block_loss.py. The two parts are added with equal weight, as in the public configs
(``ar_loss_weight``, ``dlm_loss_weight``).

A block of generation begins where a prompt or an accepted draft ends, anywhere in the text. In training, blocks begin
at a place that is drawn for each batch: up to ``block_length - 1`` tokens of the prompt come first in the first block,
and are never masked, as the decided first token of a block in generation. A row is continued with end tokens up to the
end of its last block.

Pitfall: the end tokens that complete the last block belong to the noisy part only; next tokens are those of the row.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from training.block_loss import Doubled, completed, corrupt_blocks, doubled_logits, weighted_loss
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def two_modes(
    clean: Int[Tensor, "batch pos"], noisy: Int[Tensor, "batch pos"], start: int, block_length: int
) -> Doubled:
    """The pass over `clean` rows and their `noisy` blocks, the first of which begins at `start`."""
    length = clean.shape[1]
    positions = torch.cat([torch.arange(length), torch.arange(start, length)])
    is_noisy = torch.arange(len(positions)) >= length
    block = (positions - start).div(block_length, rounding_mode="floor")
    first = start + block * block_length
    reach = torch.where(is_noisy, first - 1, positions)[:, None]
    itself = is_noisy[:, None] & is_noisy[None, :] & (block[:, None] == block[None, :])
    sees = (~is_noisy[None, :] & (positions[None, :] <= reach)) | itself
    return Doubled(torch.cat([clean, noisy[:, start:]], dim=1), positions[None], sees[None, None], length - start)


def draw_start(recipe: Recipe, prompt_length: int, step: int) -> int:
    """Where the first block of a batch begins: at the end of the prompts, or up to a block less one before it."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 700_000_003)
    before = int(torch.randint(recipe.block_length, (), generator=generator))
    return prompt_length - min(before, prompt_length - 1)


def mode_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    """Cross-entropy of next tokens plus that of masked ones, each weighted by 1/t of its block, per answer position."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    start, size = draw_start(recipe, prompt_length, step), recipe.block_length
    rest = completed(ids[:, start:], size)
    masked, weight = corrupt_blocks(rest, prompt_length - start, size, mask_id, generator)
    before = ids[:, :start]
    clean, noisy = torch.cat([before, rest], dim=1), torch.cat([before, masked], dim=1)
    given = two_modes(clean, noisy, start, size)
    logits = doubled_logits(model, given, every=True).float()
    answers = len(ids) * (ids.shape[1] - prompt_length)
    next_weight = torch.where(torch.arange(1, ids.shape[1]) >= prompt_length, 1.0, recipe.prompt_weight / 8)
    causal = weighted_loss(logits[:, : ids.shape[1] - 1], ids[:, 1:], next_weight.expand(len(ids), -1)) / answers
    return causal + weighted_loss(logits[:, -given.noisy :], rest, weight) / rest[:, prompt_length - start :].numel()
