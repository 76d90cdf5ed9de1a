"""Shipped models from their weights alone: the pass, the samplers and the answers in plain torch, in float64.

Nothing here is from sinklens: a folder's ``model.safetensors``, ``config.json`` and ``tokenizer.json`` are read, and
rows are computed one at a time, without padding, batch or cache. So the measurements of docs/papers can be compared
with a second implementation (tests/papers).

    network = Network("tiny-llada")
    run = network.decode(network.encode("Question: …"))
    run.passes[3].pattern[layer, head]  # [query, key] of step 3
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

SHIPPED = Path(__file__).resolve().parents[1] / "sinklens" / "model" / "shipped"
MASK, END = 1, 0
LLADA = {
    "embed": "model.transformer.wte", "norm": "model.transformer.ln_f", "unembed": "model.transformer.ff_out",
    "layer": "model.transformer.blocks.{}.", "ln1": "attn_norm", "ln2": "ff_norm", "q": "q_proj", "k": "k_proj",
    "v": "v_proj", "o": "attn_out", "gate": "ff_proj", "up": "up_proj", "down": "ff_out",
}  # fmt: skip
LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "unembed": "lm_head", "layer": "model.layers.{}.",
    "ln1": "input_layernorm", "ln2": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "qn": "self_attn.q_norm", "kn": "self_attn.k_norm",
}  # fmt: skip


class Pass(NamedTuple):
    """What one pass over a canvas computes.

    Attributes:
        logits: at position i those of the token at i, [pos, vocab]; of an autoregressive model those of i + 1.
        streams: what enters each layer, and what leaves the last, [layer + 1, pos, d_model].
        pattern: [layer, head, query, key].
        value: before any change, [layer, head, key, d_head].
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
        hidden: True where a query may not see a key, broadcast to [layer, head, query, key].
        factor: what values are multiplied by, broadcast to [layer, head, key].
    """

    skipped: Sequence[int] = ()
    hidden: Tensor | None = None
    factor: Tensor | None = None


class Run(NamedTuple):
    """A decoded row: the canvas before each step, the pass over it, where it works, and the finished canvas.

    `blocks` has the first and the last position + 1 of each step's block.
    """

    canvases: list[Tensor]
    passes: list[Pass]
    blocks: list[tuple[int, int]]
    tokens: Tensor

    def decided(self) -> list[int]:
        """The step at which each position got its token; −1 of the prompt."""
        after = [*self.canvases[1:], self.tokens]
        masked = torch.stack([canvas == MASK for canvas in self.canvases])
        changed = masked & torch.stack([canvas != MASK for canvas in after])
        return [int(column.int().argmax()) if column.any() else -1 for column in changed.T]


Rule = Callable[[int, list[Pass], Tensor, tuple[int, int]], Change]
"""The change of a step, from its number, the passes before it, its canvas and its block."""


class Network:
    """A shipped Llama-like model.

    Args:
        name: folder of the checkpoint.
    """

    def __init__(self, name: str) -> None:
        config = json.loads((SHIPPED / name / "config.json").read_text())
        weights = load_file(SHIPPED / name / "model.safetensors")
        self.weights = {key: value.double() for key, value in weights.items()}
        self.names = LLADA if config["model_type"] == "llada" else LLAMA
        self.kind = {"llada": "llada", "Dream": "dream", "llama": "causal", "sdar": "blocks"}[config["model_type"]]
        self.layers = config.get("n_layers") or config["num_hidden_layers"]
        self.heads = config.get("n_heads") or config["num_attention_heads"]
        self.eps, self.block = config["rms_norm_eps"], config.get("block_size")
        rope: Any = config.get("rope_parameters") or config
        self.theta = rope["rope_theta"]
        self.tokenizer = Tokenizer.from_file(str(SHIPPED / name / "tokenizer.json"))

    def encode(self, text: str) -> Tensor:
        """Token ids, with the start token."""
        return torch.tensor(self.tokenizer.encode(text).ids)

    def text(self, tokens: Tensor) -> str:
        """The text up to the end token."""
        ids = tokens.tolist()
        return str(self.tokenizer.decode(ids[: ids.index(END)] if END in ids else ids, skip_special_tokens=False))

    def __call__(self, ids: Tensor, change: Change | None = None) -> Pass:
        """One pass over a row of ids."""
        change, length = change or Change(), len(ids)
        place = torch.arange(length)
        hidden = torch.zeros(self.layers, self.heads, length, length, dtype=torch.bool)
        if self.kind == "causal":
            hidden = hidden | (place > place[:, None])
        if self.block:
            hidden = hidden | (place // self.block > place[:, None] // self.block)
        if change.hidden is not None:
            hidden = hidden | change.hidden
        factor = torch.ones(1) if change.factor is None else change.factor
        factor = factor.double().expand(self.layers, self.heads, length)
        stream = self.weights[self.names["embed"] + ".weight"][ids]
        streams, patterns, values, outputs = [stream], [], [], []
        for layer in range(self.layers):
            x = self._norm(layer, "ln1", stream)
            q, k, v = (self._linear(layer, part, x).unflatten(1, (self.heads, -1)).transpose(0, 1) for part in "qkv")
            if self._name(layer, "qn") in self.weights:
                q, k = self._norm(layer, "qn", q), self._norm(layer, "kn", k)
            scores = self._rotated(q) @ self._rotated(k).transpose(1, 2) / math.sqrt(q.shape[-1])
            exp = (scores - scores.amax(-1, keepdim=True)).exp().masked_fill(hidden[layer], 0)
            pattern = exp / exp.sum(-1, keepdim=True)
            output = pattern @ (v * factor[layer][..., None])
            after = stream + self._linear(layer, "o", output.transpose(0, 1).flatten(1))
            x = self._norm(layer, "ln2", after)
            gate = self._linear(layer, "gate", x)
            after = after + self._linear(layer, "down", gate / (1 + (-gate).exp()) * self._linear(layer, "up", x))
            stream = stream if layer in change.skipped else after
            for kept, value in zip((streams, patterns, values, outputs), (stream, pattern, v, output), strict=True):
                kept.append(value)
        final = self._scaled(stream, self.weights[self.names["norm"] + ".weight"])
        logits = final @ self.weights[self.names["unembed"] + ".weight"].T
        if self.kind == "dream":  # position i predicts the token at i + 1
            logits = torch.cat([logits[:1], logits[:-1]])
        return Pass(logits, *map(torch.stack, (streams, patterns, values, outputs)))

    def _name(self, layer: int, part: str) -> str:
        return self.names["layer"].format(layer) + self.names.get(part, part) + ".weight"

    def _linear(self, layer: int, part: str, x: Tensor) -> Tensor:
        name = self._name(layer, part)
        bias = self.weights.get(name.removesuffix("weight") + "bias", torch.zeros(1).double())
        return x @ self.weights[name].T + bias

    def _norm(self, layer: int, part: str, x: Tensor) -> Tensor:
        return self._scaled(x, self.weights[self._name(layer, part)])

    def _scaled(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotary positions: dimension i is turned with i + d/2."""
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).double()[:, None] * self.theta ** (-torch.arange(half).double() / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def decode(
        self, prompt: Tensor, length: int = 24, steps: int = 24, block: int | None = None, rule: Rule | None = None
    ) -> Run:
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
            change = None if rule is None else rule(step, passes, ids, (start, stop))
            passes.append(self(ids, change))
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
