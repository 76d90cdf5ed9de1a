"""Normalizers: functions that turn a query's scores into its attention weights.

Every public checkpoint uses *softmax*. The two other normalizers are controls for the question of what sinks are for.
Softmax must distribute one unit of attention even where a head has nothing to look for; the other two need not:

- *sigmoid*: w_ij = σ(s_ij − ln n_i), where n_i is the number of keys that query i may see. Each weight depends on its
  own score only, so the sum of a row is free; it is about 1 while scores are near 0 (Ramapuram et al., arXiv
  2409.04431).
- *off-by-one*: w_ij = exp(s_ij) / (1 + Σ_j exp(s_ij)), a softmax with an additional key of score 0 and value 0 that
  does not belong to a token. A row sums to at most 1; that key takes the rest (Gu et al., arXiv 2410.10781, add such a
  key to a model).

config.json names the normalizer under ``sinklens_attention``; without that key it is softmax. A key whose score is −inf
is hidden and has weight 0 under each normalizer. n_i counts the keys that the model's mask allows: hiding a key in an
intervention does not raise the weights of the others.

Pitfall: column sums have mean 1 under softmax only, so a threshold on them (ε, a multiple of the mean) has another
meaning under sigmoid. Compare shares of a row's sum there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CONFIG_KEY = "sinklens_attention"

AttentionScores = Float[Tensor, "batch head query key"]
Visible = Int[Tensor, "#batch #head #query 1"]
Normalizer = Callable[[AttentionScores, Visible], AttentionScores]


def softmax(scores: AttentionScores, visible: Visible) -> AttentionScores:
    """exp(s_ij) / Σ_j exp(s_ij), in float32; zeros where a query sees no key, as in the fused kernels."""
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    filled = scores.masked_fill(blind, 0.0)  # keeps the gradient free of NaN
    return torch.softmax(filled, dim=-1, dtype=torch.float32).masked_fill(blind, 0.0)


def sigmoid(scores: AttentionScores, visible: Visible) -> AttentionScores:
    """σ(s_ij − ln n_i), in float32."""
    return torch.sigmoid(scores.float() - visible.clamp(min=1).log())


def off_by_one(scores: AttentionScores, visible: Visible) -> AttentionScores:
    """exp(s_ij) / (1 + Σ_j exp(s_ij)), in float32."""
    extra_key = scores.new_zeros(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra_key], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


NORMALIZERS: Mapping[str, Normalizer] = {"softmax": softmax, "sigmoid": sigmoid, "off-by-one": off_by_one}


def normalizer_name(config: Any) -> str:
    """Name, in `NORMALIZERS`, of the normalizer that a transformers config names; "softmax" by default."""
    return "softmax" if config is None else str(config.__dict__.get(CONFIG_KEY, "softmax"))


def normalizer_of(module: Any) -> Normalizer:
    """The normalizer that the config of a transformers module names; `softmax` by default."""
    return NORMALIZERS[normalizer_name(getattr(module, "config", None))]
