"""Models and prompts for the check: the shipped models, and small ones with random weights.

Both are loaded twice, on the CPU and on the device under test; the CPU's are the reference, in float32 or float64.
"""

from functools import cache

import torch
from building import random_hf
from torch import Tensor

from sinklens.model import Model, load

PROMPTS = [
    "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:",
    "Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:",
    "Question: Ben has 9 eggs. How many eggs does Ben have?\nAnswer:",
]
SHIPPED = ("tiny-llada", "tiny-llama", "tiny-dream", "tiny-mmada", "tiny-sdar")
VOCABULARY = 97


@cache
def shipped(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Model:
    """A shipped model."""
    return load(name, device=device, dtype=dtype)


@cache
def random_model(
    architecture: str,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    d_head: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
) -> Model:
    """A two-layer model with random weights, the same on every device and in every dtype up to rounding."""
    hf = random_hf(
        architecture, causal, vocab_size=VOCABULARY, hidden_size=d_head * heads, intermediate_size=2 * d_head * heads,
        num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=d_head,
        max_position_embeddings=1024, initializer_range=0.05, mask_token_id=VOCABULARY - 1, tie_word_embeddings=False,
    )  # fmt: skip
    return load(hf.to(device=device, dtype=dtype))


def random_ids(batch: int, length: int, vocabulary: int = VOCABULARY) -> Tensor:
    """Reproducible random token ids, without the last id of the vocabulary."""
    return torch.randint(0, vocabulary - 1, (batch, length), generator=torch.Generator().manual_seed(length))
