"""How a query's scores become its attention weights. Every public checkpoint takes their softmax.

The two other ways are controls for what sinks are for. A softmax has to give one unit of attention away, also where a
head has nothing to look for; both take that need from it:

- *sigmoid*: w_ij = σ(s_ij − ln n_i), where n_i is the number of keys that query i may see. Each key is weighed by
  itself, so a row sums to what it will, about 1 while scores are near 0 (Ramapuram et al., arXiv 2409.04431).
- *off-by-one*: w_ij = exp(s_ij) / (1 + Σ_j exp(s_ij)), a softmax beside a key of score 0 and value 0 that is no
  token. A row sums to at most 1; the rest went nowhere (Gu et al., arXiv 2410.10781, give such a key to a model).

config.json names the way under ``sinklens_attention``; a config that does not means softmax. Keys hidden by a score of
−inf weigh 0 each way. n_i counts the keys that the model's own mask shows: a key that an intervention hides does not
raise the weights of the others.

One way this fails: column sums have mean 1 under softmax alone, so thresholds on them (ε, a multiple of the mean) say
another thing under sigmoid. Compare shares of a row's sum there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

CONFIG_KEY = "sinklens_attention"

Scores = Float[Tensor, "batch head query key"]
Visible = Int[Tensor, "#batch #head #query 1"]
Normalizer = Callable[[Scores, Visible], Scores]


def softmax(scores: Scores, visible: Visible) -> Scores:
    """exp(s_ij) / Σ_j exp(s_ij), in float32; zeros where a query sees no key, as in the fused kernels."""
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    filled = scores.masked_fill(blind, 0.0)  # whose gradient is no NaN
    return torch.softmax(filled, dim=-1, dtype=torch.float32).masked_fill(blind, 0.0)


def sigmoid(scores: Scores, visible: Visible) -> Scores:
    """σ(s_ij − ln n_i), in float32."""
    return torch.sigmoid(scores.float() - visible.clamp(min=1).log())


def off_by_one(scores: Scores, visible: Visible) -> Scores:
    """exp(s_ij) / (1 + Σ_j exp(s_ij)), in float32."""
    nowhere = scores.new_zeros(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, nowhere], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


NORMALIZERS: Mapping[str, Normalizer] = {"softmax": softmax, "sigmoid": sigmoid, "off-by-one": off_by_one}


def normalizer_name(config: Any) -> str:
    """Name of the way, in `NORMALIZERS`, that a transformers config asks for."""
    return str(getattr(config, CONFIG_KEY, "softmax"))


def normalizer_of(module: Any) -> Normalizer:
    """The function that the config of a transformers module asks for; `softmax` where it asks for none."""
    return NORMALIZERS[normalizer_name(getattr(module, "config", None))]
