"""The training loss of canvas models, which have no mask token: tokens of the canvas are replaced by random ones.

Each row draws t ~ U(0, 1] and replaces each token of the canvas, with probability t, by one drawn uniformly from the
vocabulary. The model reads the text before the canvas (encoder) and the canvas (decoder) and predicts the original
token at *every* position of the canvas, because it does not know which ones are noise. The loss is the mean
cross-entropy. In every other step on average, a first pass without gradient gives the logits on which the second one is
conditioned (self-conditioning; Chen et al., 2208.04202), as in generation, where they come from the step before.

An answer of several canvases is trained one canvas at a time: each step draws which, and the encoder reads the clean
text before it.

Limitation: in generation, the conditioning logits are divided by a temperature and come from another, noisier canvas.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from training.recipes import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def replace_at_random(
    canvas: Int[Tensor, "batch canvas"], vocabulary: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch canvas"], Float[Tensor, "batch 1"]]:
    """Replace each token, with its row's probability t, by one drawn uniformly from the vocabulary.

    The t of the rows are evenly spaced from one random start (2107.00630, section 5), so every batch has all levels.

    Returns:
        The noisy canvas, and t in (0, 1].
    """
    rows, length = canvas.shape
    spaced = (torch.rand(1, 1, generator=generator) + torch.arange(rows)[:, None] / rows) % 1
    t = 1e-3 + (1 - 1e-3) * spaced
    replaced = torch.rand(rows, length, generator=generator) < t
    return torch.where(replaced, torch.randint(vocabulary, (rows, length), generator=generator), canvas), t


def canvas_logits(
    model: "PreTrainedModel", text: Int[Tensor, "batch pos"], canvas: Int[Tensor, "batch canvas"], conditioned: bool
) -> Float[Tensor, "batch canvas vocab"]:
    """The logits of `canvas` after `text`, conditioned on those of a first pass, or on none.

    The encoder reads `text` once; the decoder does not change what it wrote.
    """
    written = model.get_encoder()(input_ids=text).past_key_values
    before = None
    if conditioned:
        with torch.no_grad():
            before = model(past_key_values=written, decoder_input_ids=canvas).logits
    return model(past_key_values=written, decoder_input_ids=canvas, self_conditioning_logits=before).logits


def canvas_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    """Mean cross-entropy over one canvas of the answer; `mask_id` has no effect."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    length = recipe.block_length
    number = int(torch.randint((ids.shape[1] - prompt_length) // length, (), generator=generator))
    conditioned = bool(torch.rand((), generator=generator) < 0.5)
    start = prompt_length + number * length
    canvas = ids[:, start : start + length]
    noisy, _ = replace_at_random(canvas, model.config.get_text_config().vocab_size, generator)
    logits = canvas_logits(model, ids[:, :start].to(model.device), noisy.to(model.device), conditioned)
    return F.cross_entropy(logits.float().transpose(1, 2), canvas.to(model.device))
