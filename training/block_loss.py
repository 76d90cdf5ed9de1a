"""The training loss of block-causal diffusion models, as in BD3-LM (2503.09573) and SDAR (2510.06303).

Generation fills one block at a time and sees the finished blocks before it. The published training does this for all
blocks in one pass over the doubled row, [clean; noisy], under the *staircase* mask: a clean block sees clean blocks up
to itself, a noisy block sees itself and the clean blocks before it. Both copies have the positions of the row.

Only blocks of the answer are ever noisy here. The pass therefore leaves out the noisy copy of the prompt's blocks,
whose loss is zero and which no other block sees, and the last clean block, which no noisy block sees. The logits and
gradients are those of the complete doubled row, at 80 instead of 112 positions for a prompt of 26 tokens.

Generation completes the last block, so a row is continued with end tokens up to the end of its last block, and these
are masked and predicted like its answer.

Pitfall: blocks are counted from the row's first token, so the first noisy block may begin with tokens of the prompt.
They are never masked.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from training.initial import additive
from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Doubled(NamedTuple):
    """One pass over clean text and, after it, noisy blocks.

    Attributes:
        ids: tokens, [batch, place].
        positions: position of each place in the row.
        sees: whether a place sees another one.
        noisy: number of noisy places, the last ones.
    """

    ids: Int[Tensor, "batch place"]
    positions: Int[Tensor, "1 place"]
    sees: Bool[Tensor, "1 1 place place"]
    noisy: int


def completed(ids: Int[Tensor, "batch pos"], block_length: int) -> Int[Tensor, "batch longer"]:
    """`ids` with their last block completed by repeating the last token, which is an end token."""
    missing = -ids.shape[1] % block_length
    return torch.cat([ids, ids[:, -1:].expand(-1, missing)], dim=1)


def corrupt_blocks(
    ids: Int[Tensor, "batch pos"], prompt_length: int, block_length: int, mask_id: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
    """Mask the answer's tokens in each block with the block's own probability t ~ U(0, 1].

    Returns:
        The masked rows, and the weight of each token's loss: 1/t if it was masked, else 0.
    """
    rows, length = ids.shape
    t = 1e-3 + (1 - 1e-3) * torch.rand(rows, length // block_length, generator=generator)
    t = t.repeat_interleave(block_length, dim=1)
    masked = (torch.rand(rows, length, generator=generator) < t) & (torch.arange(length) >= prompt_length)
    return ids.masked_fill(masked, mask_id), masked / t


def doubled(
    clean: Int[Tensor, "batch pos"], noisy: Int[Tensor, "batch pos"], prompt_length: int, block_length: int
) -> Doubled:
    """The pass that predicts the noisy blocks from the first one with an answer position."""
    length = clean.shape[1]
    start = prompt_length // block_length * block_length
    positions = torch.cat([torch.arange(length - block_length), torch.arange(start, length)])
    is_noisy = torch.arange(len(positions)) >= length - block_length
    block = positions // block_length
    query, key = block[:, None], block[None, :]
    clean_key = ~is_noisy[None, :] & torch.where(is_noisy[:, None], key < query, key <= query)
    itself = is_noisy[:, None] & is_noisy[None, :] & (key == query)
    ids = torch.cat([clean[:, : length - block_length], noisy[:, start:]], dim=1)
    return Doubled(ids, positions[None], (clean_key | itself)[None, None], length - start)


def doubled_logits(model: "PreTrainedModel", given: Doubled, every: bool = False) -> Float[Tensor, "batch place vocab"]:
    """The logits of the noisy places, or of every place."""
    device = model.device
    return model(
        input_ids=given.ids.to(device),
        attention_mask=additive(given.sees).to(device),
        position_ids=given.positions.to(device),
        use_cache=False,
        logits_to_keep=0 if every else given.noisy,
    ).logits


def block_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    """Cross-entropy of the masked tokens, each weighted by 1/t of its block, per position of the answer."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    clean = completed(ids, recipe.block_length)
    noisy, weight = corrupt_blocks(clean, prompt_length, recipe.block_length, mask_id, generator)
    given = doubled(clean, noisy, prompt_length, recipe.block_length)
    logits = doubled_logits(model, given).float()
    loss = weighted_loss(logits, clean[:, -given.noisy :], weight[:, -given.noisy :])
    return loss / clean[:, prompt_length:].numel()


def weighted_loss(
    logits: Float[Tensor, "batch pos vocab"], targets: Int[Tensor, "batch pos"], weight: Float[Tensor, "batch pos"]
) -> Float[Tensor, ""]:
    """The weighted sum of the cross-entropies of `targets`."""
    loss = F.cross_entropy(logits.transpose(1, 2), targets.to(logits.device), reduction="none")
    return (loss * weight.to(logits.device)).sum()
