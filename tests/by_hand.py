"""Shipped models decoded in plain torch, in float64, one row at a time, without padding, batch or cache.

The pass is `building.plain_pass`. So the measurements of docs/papers can be compared with a second implementation of
pass and samplers (tests/papers).

    network = Network("tiny-llada")
    run = network.decode(network.encode("Question: …"))
    run.passes[3].pattern[layer, head]  # [query, key] of step 3
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from building import plain_pass
from torch import Tensor

import sinklens

MASK, END = 1, 0


class Pass(NamedTuple):
    """What one pass over a canvas computes.

    Attributes:
        logits: at position i those of the token at i, [pos, vocab]; of an autoregressive model those of i + 1.
        streams: what enters each layer, and what leaves the last, [layer + 1, pos, d_model].
        pattern: [layer, head, query, key].
        value: [layer, head, key, d_head].
        output: pattern · value of every head, [layer, head, query, d_head].
    """

    logits: Tensor
    streams: Tensor
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
    """A decoded row: the canvas before each step, the pass over it, where it works, and the finished canvas.

    `blocks` has the first and the last position + 1 of each step's block.
    """

    canvases: list[Tensor]
    passes: list[Pass]
    blocks: list[tuple[int, int]]
    tokens: Tensor


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
        streams = torch.cat([stacked("hook_resid_pre"), stacked("hook_resid_post")[-1:]])
        value, output = (stacked(f"attn.hook_{name}").transpose(1, 2) for name in ("v", "z"))
        return Pass(logits, streams, stacked("attn.hook_pattern"), value, output)

    def decode(self, prompt: Tensor, length: int = 24, steps: int = 24, block: int | None = None) -> Run:
        """A run at temperature 0.

        LLaDA and SDAR decide the most probable predictions of a block first, ``length / steps`` at each step, Dream
        those of lowest entropy of all, in numbers that follow its times. An autoregressive model appends one token per
        step until its end token.

        Args:
            block: positions of a block; SDAR's is its own and counted from the first token.
        """
        canvases, passes, blocks = [], [], []
        masks = 0 if self.kind == "causal" else length
        if self.kind == "blocks":
            masks += -(len(prompt) + length) % self.block  # the last block is complete
        ids = torch.cat([prompt, torch.full((masks,), MASK)])
        for step in range(steps if self.kind != "blocks" else len(ids)):
            masked = (ids == MASK).nonzero()[:, 0].tolist()
            if not masked and self.kind != "causal":
                break
            start, stop = self._block(len(prompt), len(ids), masked, block)
            if self.kind == "blocks" and (ids[len(prompt) : start] == END).any():
                break
            canvases.append(ids.clone())
            blocks.append((start, stop))
            passes.append(self(ids))
            if self.kind == "causal":
                ids = torch.cat([ids, passes[-1].logits[-1].argmax()[None]])
                if ids[-1] == END:
                    break
                continue
            here = [place for place in masked if place < stop]
            count = 1 if self.kind == "blocks" else length // steps
            if self.kind == "dream":
                times = torch.linspace(1, 1e-3, steps + 1).tolist()
                count = int(len(here) * (1 - times[step + 1] / times[step])) if step < steps - 1 else len(here)
            probs = passes[-1].logits[here].softmax(-1)
            confidence = (probs * (probs + 1e-10).log()).sum(-1) if self.kind == "dream" else probs.amax(-1)
            for number in confidence.argsort(descending=True)[:count].tolist():
                ids[here[number]] = probs[number].argmax()
        return Run(canvases, passes, blocks, ids)

    def _block(self, prompt: int, total: int, masked: list[int], block: int | None) -> tuple[int, int]:
        """The block that a step works on."""
        if self.kind == "blocks":
            start = masked[0] // self.block * self.block
            return start, start + self.block
        if block is None:
            return prompt, total
        start = prompt + (masked[0] - prompt) // block * block
        return start, start + block
