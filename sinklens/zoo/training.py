"""Train the tiny twins: one architecture, tokenizer, data set and step budget, two objectives.

The *masked* objective is LLaDA's: draw t ~ U(0, 1] per row, mask each eligible token with probability t, and score
the masked ones by cross-entropy weighted with 1/t. In most rows only the answer is eligible; in one of eight, all but
the start token is. The *causal* objective is next-token cross-entropy on the same rows, the prompt weighted as lightly.

Every batch is a function of (seed, step), so a run that was stopped and resumed equals one that was not. The state is
written to a temporary file and moved into place: a kill at any moment leaves the last whole state.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.tasks import word_problems
from sinklens.zoo.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ANSWER_LENGTH = 24


@dataclass(frozen=True)
class Recipe:
    """All that decides what a run produces.

    Attributes:
        name: folder and model name.
        objective: "masked" trains a diffusion model, "causal" its autoregressive twin.
        seed: of the weights, the problems and every batch.
        cycles: optimizer steps of each cosine cycle of the learning rate; every cycle peaks at half the one before.
        batch: rows per step.
        problems: size of the training set; none of them is held out.
        prompt_weight: weight of the loss on prompt tokens, relative to the answer's.
    """

    name: str
    objective: Literal["masked", "causal"]
    seed: int = 1
    cycles: tuple[int, ...] = (2800, 1400)
    batch: int = 128
    problems: int = 300_000
    learning_rate: float = 2e-3
    warmup: int = 200
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.1
    prompt_weight: float = 0.3
    d_model: int = 192
    n_layers: int = 4
    n_heads: int = 6
    d_mlp: int = 512
    context: int = 128

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(self.cycles)


RECIPES = {recipe.name: recipe for recipe in (Recipe("tiny-llada", "masked"), Recipe("tiny-llama", "causal"))}


@dataclass(frozen=True)
class Corpus:
    """Training rows grouped by prompt length, so that no batch needs padding.

    Attributes:
        groups: per prompt length, prompt and answer ids side by side, [row, pos] int16.
    """

    groups: dict[int, Int[Tensor, "row pos"]]

    def batch(self, seed: int, step: int, size: int) -> tuple[int, Int[Tensor, "batch pos"]]:
        """The prompt length and rows of one step; a function of its arguments alone."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        lengths = sorted(self.groups)
        weights = torch.tensor([float(len(self.groups[n])) for n in lengths])
        length = lengths[int(torch.multinomial(weights, 1, generator=generator))]
        rows = torch.randint(len(self.groups[length]), (size,), generator=generator)
        return length, self.groups[length][rows].long()


def build_corpus(tokenizer: "PreTrainedTokenizerFast", seed: int, size: int) -> Corpus:
    """Tokenize `size` problems; answers are filled up to `ANSWER_LENGTH` with the end token, as LLaDA pads."""
    groups: dict[int, list[list[int]]] = {}
    problems = word_problems.training(seed, size)
    prompts = tokenizer([p.prompt for p in problems]).input_ids
    answers = tokenizer([" " + p.answer for p in problems], add_special_tokens=False).input_ids
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(answer) >= ANSWER_LENGTH:
            raise ValueError(f"an answer of {len(answer)} tokens leaves no room for the end token in {ANSWER_LENGTH}.")
        padding = [tokenizer.eos_token_id] * (ANSWER_LENGTH - len(answer))
        groups.setdefault(len(prompt), []).append(prompt + answer + padding)
    return Corpus({length: torch.tensor(rows, dtype=torch.int16) for length, rows in groups.items()})


def corrupt(
    ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], Float[Tensor, "batch 1"]]:
    """Mask each row with its own probability t; every eighth row everywhere but at the start token.

    Returns:
        The masked rows, which tokens were masked, and t in (0, 1].
    """
    rows, length = ids.shape
    t = 1e-3 + (1 - 1e-3) * torch.rand(rows, 1, generator=generator)
    eligible = (torch.arange(length) >= prompt_length).repeat(rows, 1)
    eligible[::8, 1:] = True
    masked = (torch.rand(rows, length, generator=generator) < t) & eligible
    return ids.masked_fill(masked, mask_id), masked, t


def _masked_loss(
    model: "LlamaForCausalLM", recipe: Recipe, ids: Tensor, prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    noisy, masked, t = corrupt(ids, prompt_length, mask_id, generator)
    logits = model(input_ids=noisy.to(model.device), use_cache=False).logits.float()
    loss = F.cross_entropy(logits.transpose(1, 2), ids.to(model.device), reduction="none")
    row_weight = torch.ones(len(ids), 1)
    row_weight[::8] = recipe.prompt_weight
    weight = (masked * row_weight / t).to(model.device)
    return (loss * weight).sum() / (len(ids) * ANSWER_LENGTH)


def _causal_loss(
    model: "LlamaForCausalLM", recipe: Recipe, ids: Tensor, prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    weight = torch.where(torch.arange(1, ids.shape[1]) >= prompt_length, 1.0, recipe.prompt_weight / 8)
    return (loss * weight.to(model.device)).sum() / (len(ids) * ANSWER_LENGTH)


LOSSES = {"masked": _masked_loss, "causal": _causal_loss}


def build_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    """A freshly initialised Llama of the recipe's size; bidirectional for the masked objective."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.n_layers,
        num_attention_heads=recipe.n_heads,
        max_position_embeddings=recipe.context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.config.is_causal = recipe.objective == "causal"
    for layer in model.model.layers:
        layer.self_attn.is_causal = model.config.is_causal
    return model


def learning_rate(recipe: Recipe, step: int) -> float:
    """In each cycle a linear warm-up, then a cosine down to a hundredth of the cycle's peak."""
    peak, cycles = recipe.learning_rate, list(recipe.cycles)
    while len(cycles) > 1 and step >= cycles[0]:
        step, peak = step - cycles.pop(0), peak / 2
    if step < recipe.warmup:
        return peak * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, cycles[0] - recipe.warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def _save_state(
    path: Path, model: "LlamaForCausalLM", optimizer: torch.optim.Optimizer, recipe: Recipe, step: int
) -> None:
    temporary = path.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "recipe": asdict(recipe)}
    torch.save(state, temporary)
    os.replace(temporary, path)


def train(recipe: Recipe, out: Path, *, save_every: int = 100, keep_every: int = 400) -> Iterator[dict[str, float]]:
    """Run, or go on with, one training run in `out`; yields a log record every 20 steps.

    Args:
        recipe: what to train.
        out: holds `state.pt` (to resume from), `log.jsonl` and `weights-<step>.pt` (kept for later study).
        save_every: steps between two writes of the state.
        keep_every: steps between two kept copies of the weights, in bfloat16.

    Raises:
        ValueError: `out` holds a run of another recipe.
    """
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = train_tokenizer()
    corpus = build_corpus(tokenizer, recipe.seed, recipe.problems)
    model = build_model(recipe, tokenizer).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    state_file, started = out / "state.pt", time.perf_counter()
    for step in range(_resume(state_file, recipe, model, optimizer, device), recipe.steps):
        loss = _update(recipe, corpus, model, optimizer, tokenizer.mask_token_id, step)
        done = step + 1
        if done % 20 == 0 or done == recipe.steps:
            record = {"step": done, "loss": loss, "seconds": time.perf_counter() - started}
            with (out / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            yield record
        if done % keep_every == 0:
            weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
            torch.save(weights, out / f"weights-{done}.pt")
        if done % save_every == 0 or done == recipe.steps:
            _save_state(state_file, model, optimizer, recipe, done)


def _resume(
    file: Path, recipe: Recipe, model: "LlamaForCausalLM", optimizer: torch.optim.Optimizer, device: str
) -> int:
    """Load the state of an interrupted run, if there is one; the step to go on from."""
    if not file.exists():
        return 0
    state = torch.load(file, weights_only=True, map_location=device)
    if state["recipe"] != asdict(recipe):
        raise ValueError(f"{file} belongs to another recipe; give this run a folder of its own.")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _update(
    recipe: Recipe, corpus: Corpus, model: "LlamaForCausalLM", optimizer: torch.optim.Optimizer, mask_id: int, step: int
) -> float:
    """One optimizer step; its loss."""
    prompt_length, ids = corpus.batch(recipe.seed, step, recipe.batch)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        loss = LOSSES[recipe.objective](model, recipe, ids, prompt_length, mask_id, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
