"""Shipped models decoded in plain torch, in float64, one row at a time, without padding, batch or cache.

The pass is `building.plain_pass`, the decisions are those of `published_rules`. So the measurements of docs/papers can
be compared with a second implementation of pass and samplers (tests/papers).

    network = Network("tiny-llada")
    run = network.decode(network.encode("Question: …"))
    run.passes[3].pattern[layer, head]  # [query, key] of step 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import published_rules as rules
import torch
from building import plain_pass
from torch import Tensor

import sinklens

MASK, END = 1, 0
GREEDY: rules.Settings = {
    "temperature": 0.0, "top_p": None, "top_k": None, "cfg_scale": 0.0, "logits_eos_inf": False,
    "confidence_eos_eot_inf": False, "remasking": "low_confidence", "threshold": None, "factor": None,
    "by_quota": True, "eps": 1e-3, "alg": "entropy", "alg_temp": None, "tokens_per_step": None, "stop": True,
    "remasking_strategy": "low_confidence_static", "confidence_of": "model",
}  # fmt: skip


class Pass(NamedTuple):
    """What one pass over a canvas computes.

    Attributes:
        logits: at position i those of the token at i, [pos, vocab]; of an autoregressive model those of i + 1.
        pattern: [layer, head, query, key].
        value: [layer, head, key, d_head].
        output: pattern · value of every head, [layer, head, query, d_head].
    """

    logits: Tensor
    pattern: Tensor
    value: Tensor
    output: Tensor


@dataclass(frozen=True)
class Change:
    """What a pass does differently.

    Attributes:
        skipped: layers that add nothing to the stream.
        factor: what values are multiplied by, [layer, head, key].
    """

    skipped: Sequence[int] = ()
    factor: Tensor | None = None

    def edits(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The same as edits of points."""
        found: dict[str, Callable[[Tensor], Tensor]] = {}
        for layer in self.skipped:
            found |= {f"blocks.{layer}.hook_{part}_out": torch.zeros_like for part in ("attn", "mlp")}
        for layer, factor in enumerate(() if self.factor is None else self.factor):
            found[f"blocks.{layer}.attn.hook_v"] = lambda x, factor=factor: x * factor.T[..., None]
        return found


class Run(NamedTuple):
    """A decoded row: the canvas before each step, the pass over it, and the finished canvas."""

    canvases: list[Tensor]
    passes: list[Pass]
    tokens: Tensor


class _Kept(rules.Oracle):
    """What the published rules ask; the canvases and passes of a network, its first field, are kept."""

    def logits(self, ids: rules.Ids, seen: rules.Seen | None = None) -> list[list[float]]:
        network, canvases, passes = self.hf
        canvases.append(torch.tensor(ids))
        passes.append(network(canvases[-1]))
        rows = passes[-1].logits.tolist()
        return [*rows[1:], rows[-1]] if network.kind == "dream" else rows  # the rules shift Dream's


class Network:
    """A shipped Llama-like model, by name."""

    def __init__(self, name: str) -> None:
        self.model = sinklens.load(name, dtype="float64")
        self.kind = {"llada": "llada", "dream": "dream", "llama": "causal", "sdar": "blocks"}[self.model.family]
        self.layers, self.heads, self.block = self.model.cfg.n_layers, self.model.cfg.n_heads, self.model.block_length

    def encode(self, text: str) -> Tensor:
        """Token ids, with the start token."""
        return torch.tensor(self.model.tokenizer(text).input_ids)

    def text(self, tokens: Tensor) -> str:
        """The text up to the end token."""
        ids = tokens.tolist()
        return str(self.model.tokenizer.decode(ids[: ids.index(END)] if END in ids else ids))

    @torch.no_grad()
    def __call__(self, ids: Tensor, change: Change | None = None) -> Pass:
        """One pass over a row of ids."""
        found = plain_pass(self.model, ids[None], edits=(change or Change()).edits())

        def stacked(point: str) -> Tensor:
            return torch.stack([found.values[f"blocks.{layer}.{point}"][0] for layer in range(self.layers)])

        logits = found.logits[0]
        if self.kind == "dream":  # position i predicts the token at i + 1
            logits = torch.cat([logits[:1], logits[:-1]])
        value, output = (stacked(f"attn.hook_{name}").transpose(1, 2) for name in ("v", "z"))
        return Pass(logits, stacked("attn.hook_pattern"), value, output)

    def decode(self, prompt: Tensor, length: int = 24, steps: int = 24, block: int | None = None) -> Run:
        """A run at temperature 0 by the published rules.

        LLaDA and SDAR decide the most probable predictions of a block first, ``length / steps`` at each step, Dream
        those of lowest entropy of all, in numbers that follow its times. An autoregressive model appends one token per
        step until its end token.

        Args:
            block: positions of a block; SDAR's is its own and counted from the first token.
        """
        rule = {"llada": rules.llada, "dream": rules.dream, "causal": rules.autoregressive, "blocks": rules.sdar}
        size = self.block or block or length
        length = steps if self.kind == "causal" else length
        given = GREEDY | {"gen_length": length, "steps": steps, "block_length": size, "denoising_steps": size}
        canvases, passes = list[Tensor](), list[Pass]()
        oracle, noise = _Kept((self, canvases, passes), MASK, (END,)), rules.Noise(torch.Generator())
        *_, last = rule[self.kind](oracle, prompt.tolist(), noise, given)
        return Run(canvases, passes, torch.tensor(last))
