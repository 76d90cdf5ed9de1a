"""Tiny models with their passes in plain torch: bidirectional, causal, and modulated by the noise level.

An oracle is called with ids and edits of points, and gives logits and values; nothing of sinklens computes.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from building import left_padding, plain_pass, random_hf, random_ids
from dit_oracle import PlainDit
from torch import Tensor

import sinklens

LENGTH, TIME = 6, torch.tensor([0.3, 0.8])
POINTS = ["hook_embed", *(f"blocks.{n}.{p}" for n in range(3) for p in ("attn.hook_z", "hook_mlp_out"))]
"""What writes to the stream of the models with three layers."""
PLAIN = {"llama": ("llama", False, True), "qwen3": ("qwen3", False, False), "causal": ("qwen2", True, True)}
"""Architecture, whether causal, and whether the first row is padded; all other oracles are modulated networks."""


def bent(logits: Tensor) -> Tensor:
    """A nonlinear metric."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (weights * logits.log_softmax(dim=-1)).sum() / 50


class Oracle:
    """A model in double precision, and the same network in plain torch.

    Attributes:
        model: the model.
        given: what experiments on two rows are given besides their ids.
        real: where the rows are no padding; None for everywhere.
    """

    def __init__(self, name: str, references: Path) -> None:
        self.dit, self.real = None, None
        self.given: dict[str, Any] = {}
        if name in PLAIN:
            architecture, causal, padded = PLAIN[name]
            self.model = sinklens.load(random_hf(architecture, causal, dtype=torch.float64))
            self.real = left_padding(2, LENGTH, 2) if padded else None
            self.given = {"attention_mask": self.real}
        else:
            self.dit, self.given = PlainDit(references / name, torch.float64), {"time": TIME}
            self.model = sinklens.load(references / name, dtype="float64")

    def of_row(self, ids: Tensor, time: Any, edits: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> Any:
        """A pass over rows without padding, at a noise level where the network has one."""
        return plain_pass(self.model, ids, None, edits) if self.dit is None else self.dit(ids, time, edits)

    def __call__(self, ids: Tensor, edits: Mapping[str, Callable[[Tensor], Tensor]] | None = None) -> Any:
        """A pass over two rows."""
        return plain_pass(self.model, ids, self.real, edits) if self.dit is None else self.dit(ids, TIME, edits)

    def passed(self, _: Any, ids: Tensor, edits: Any = None) -> Any:
        """As `brute_force` calls it."""
        return self(ids, edits)

    def bent(self, logits: Tensor) -> Tensor:
        """A nonlinear metric of the logits at real positions."""
        return bent(logits if self.real is None else torch.where(self.real[..., None], logits, 0.0))

    def output(self, layer: int, head: int) -> Tensor:
        """What maps a head's output to the stream, [d_head, d_model]."""
        if self.dit is not None:
            return self.dit.weights[f"blocks.{layer}.attn_out.weight"].T.unflatten(0, (self.dit.heads, -1))[head]
        hf: Any = self.model.tree.hf
        return hf.model.layers[layer].self_attn.o_proj.weight.T.unflatten(0, (hf.config.num_attention_heads, -1))[head]

    def normalized(self, stream: Tensor) -> Tensor:
        """A stream after a norm, without its weights."""
        stream = stream if self.dit is None else stream - stream.mean(-1, keepdim=True)
        eps = self.model.tree.hf.config.rms_norm_eps if self.dit is None else 1e-5
        return stream / (stream.pow(2).mean(-1, keepdim=True) + eps).sqrt()


oracle_of = cache(Oracle)


def two_inputs(batch: int = 2) -> tuple[Tensor, Tensor]:
    """Rows of ids, and the same with two tokens changed."""
    clean = random_ids(batch, LENGTH)
    corrupted = clean.clone()
    corrupted[0, 1], corrupted[-1, 4] = (clean[0, 1] + 7) % 60, (clean[-1, 4] + 11) % 60
    return clean, corrupted
