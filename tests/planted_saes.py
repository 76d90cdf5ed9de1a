"""Sparse autoencoders for tests: a perfect one, and one with random weights."""

import torch
from torch import Tensor

from sinklens.features import SparseAutoencoder

POINT = "blocks.1.hook_resid_post"


class Perfect:
    """Features are the positive and the negative parts of an activation, so decoding gives it back exactly."""

    def encode(self, x: Tensor) -> Tensor:
        """[place, 2 d]."""
        return torch.cat([x.relu(), (-x).relu()], dim=-1)

    def decode(self, features: Tensor) -> Tensor:
        """[place, d]."""
        positive, negative = features.chunk(2, dim=-1)
        return positive - negative


def random_sae(d_in: int = 24, d_sae: int = 40, architecture: str = "topk", **more: object) -> SparseAutoencoder:
    """Always the same weights, with rows of W_dec of different lengths."""
    made = torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made)

    own = {"topk": {"k": 6}, "jumprelu": {"threshold": drawn(d_sae).abs() * 2}, "standard": {}}[architecture]
    weights = (drawn(d_in, d_sae), drawn(d_sae), drawn(d_sae, d_in) / 3, drawn(d_in))
    return SparseAutoencoder(*weights, architecture, **own | more)
