"""Trains the tiny checkpoints: one data set and loop, eight objectives.

The *masked* objective is LLaDA's: draw t ~ U(0, 1] per row, mask each eligible token with probability t, and compute
the cross-entropy of the masked tokens, weighted by 1/t. In most rows only the answer is eligible; in every eighth row,
all tokens except the start token are. The *shifted* objective predicts the token at position i from position i − 1,
like Dream, which thereby keeps what its initial autoregressive weights have learned. The *causal* objective is
next-token cross-entropy on the same rows, with the same small weight on the prompt. block_loss.py has the objective of
block-causal models, canvas_loss.py that of canvas models, mode_loss.py that of models with two modes, and
noise_losses.py those of MDLM and Duo. Models with experts add their load-balancing loss.

Every batch is a function of (seed, step), so an interrupted and resumed run equals an uninterrupted one. The state is
written to a temporary file and moved into place (run_files.py): a kill at any moment leaves the last complete state.

Limitation: a run resumed with another number of threads or on another device rounds sums differently.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.utils.folders import check_folder
from training.block_loss import block_loss
from training.canvas_loss import canvas_loss
from training.corpus import Corpus, build_corpus
from training.initial import build_model, fit_norms
from training.mode_loss import mode_loss
from training.noise_losses import noise_loss
from training.recipes import DEFAULTS, Recipe
from training.run_files import append_record, read_tensors, write_tensors
from training.text_windows import TextCorpus, text_corpus, text_tokenizer
from training.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def corrupt(
    ids: Int[Tensor, "batch pos"], prompt_length: int, mask_id: int, generator: torch.Generator, spared: int = 1
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"], Float[Tensor, "batch 1"]]:
    """Mask each answer with its row's probability t; in every eighth row, all tokens except the first `spared`.

    Returns:
        The masked rows, which tokens were masked, and t in (0, 1].
    """
    rows, length = ids.shape
    t = 1e-3 + (1 - 1e-3) * torch.rand(rows, 1, generator=generator)
    eligible = (torch.arange(length) >= prompt_length).repeat(rows, 1)
    eligible[::8, spared:] = True
    masked = (torch.rand(rows, length, generator=generator) < t) & eligible
    return ids.masked_fill(masked, mask_id), masked, t


def _masked_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Tensor, prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step + 500_000_003)
    spared = 1 if recipe.start_token == "kept" else 0
    noisy, masked, t = corrupt(ids, prompt_length, mask_id, generator, spared)
    options = {"output_router_logits": True} if recipe.experts else {}
    outputs = model(input_ids=noisy.to(model.device), use_cache=False, **options)
    logits = outputs.logits.float()
    if recipe.objective == "shifted":  # logits at i - 1 predict position i; position 0 keeps its own
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    loss = F.cross_entropy(logits.transpose(1, 2), ids.to(model.device), reduction="none")
    row_weight = torch.ones(len(ids), 1)
    row_weight[::8] = recipe.prompt_weight
    weight = (masked * row_weight / t).to(model.device)
    loss = (loss * weight).sum() / (len(ids) * (ids.shape[1] - prompt_length))
    return loss + recipe.balance_weight * outputs.aux_loss if recipe.experts else loss


def _causal_loss(
    model: "PreTrainedModel", recipe: Recipe, ids: Tensor, prompt_length: int, mask_id: int, step: int
) -> Float[Tensor, ""]:
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    weight = torch.where(torch.arange(1, ids.shape[1]) >= prompt_length, 1.0, recipe.prompt_weight / 8)
    return (loss * weight.to(model.device)).sum() / (len(ids) * (ids.shape[1] - prompt_length))


LOSSES = {
    "masked": _masked_loss,
    "shifted": _masked_loss,
    "causal": _causal_loss,
    "blocks": block_loss,
    "uniform": canvas_loss,
    "mdlm": noise_loss,
    "duo": noise_loss,
    "modes": mode_loss,
}


def make_tokenizer(recipe: Recipe) -> "PreTrainedTokenizerFast":
    """The tokenizer of the recipe's training rows and of its checkpoint."""
    if recipe.windows:
        return text_tokenizer(recipe)
    return train_tokenizer(
        start=recipe.start_token != "absent", with_pictures=recipe.pictures > 0, mask_last=recipe.d_cond > 0
    )


def learning_rate(recipe: Recipe, step: int) -> float:
    """In each cycle, a linear warm-up and then cosine decay to one hundredth of the cycle's peak."""
    cycle = recipe.cycle(step)
    peak, step = recipe.peak(cycle), step - sum(recipe.cycles[:cycle])
    if step < recipe.warmup:
        return peak * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.cycles[cycle] - recipe.warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def _save_state(
    path: Path, model: "PreTrainedModel", optimizer: torch.optim.Optimizer, recipe: Recipe, step: int
) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "recipe": asdict(recipe)}
    write_tensors(state, path)


def train(recipe: Recipe, out: Path, *, save_every: int = 100, keep_every: int = 400) -> Iterator[dict[str, float]]:
    """Start or resume a training run in `out`; yield a log record every 20 steps.

    A run can be resumed with a recipe that is equal up to the step reached, such as one with an additional cycle.

    Args:
        recipe: what to train.
        out: folder of `state.pt` (to resume from), `log.jsonl` and `weights-<step>.pt` (kept for later study).
        save_every: steps between two writes of the state.
        keep_every: steps between two kept copies of the weights, in bfloat16. Text models also keep the weights of
            steps 1, 2, 4, 8 and so on.

    Raises:
        SettingError: `out` contains a run whose steps differ from those of this recipe.
        CheckpointError: the state of the run is truncated or corrupt.
        SinklensError: `out` cannot be written, or holds something else.
    """
    check_folder(out, "a training run")
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    state_file = out / "state.pt"
    state = _read_state(state_file, recipe, device)  # before making the rows, which takes minutes
    tokenizer = make_tokenizer(recipe)
    corpus = text_corpus(tokenizer, recipe) if recipe.windows else build_corpus(tokenizer, recipe)
    model = build_model(recipe, tokenizer).to(device)
    if device == "cpu" and recipe.attention == "softmax":
        model.set_attn_implementation("eager")  # for rows this short, 1.6 times as fast as the fused attention
    if state is None and isinstance(corpus, Corpus):
        fit_norms(model, recipe, tokenizer, corpus)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    started = time.perf_counter()
    for step in range(_resume(state, model, optimizer), recipe.steps):
        loss = _update(recipe, corpus, model, optimizer, tokenizer.mask_token_id, step)
        done = step + 1
        if done % 20 == 0 or done == recipe.steps:
            record = {"step": done, "loss": loss, "seconds": time.perf_counter() - started}
            append_record(out / "log.jsonl", record)
            yield record
        if done % keep_every == 0 or (recipe.windows and done.bit_count() == 1):
            weights = {name: value.bfloat16() for name, value in model.state_dict().items()}
            write_tensors(weights, out / f"weights-{done}.pt")
        if done % save_every == 0 or done == recipe.steps:
            _save_state(state_file, model, optimizer, recipe, done)


def _read_state(file: Path, recipe: Recipe, device: str) -> dict[str, Any] | None:
    """The state of an interrupted run, or None.

    Raises:
        SettingError, CheckpointError: see `train`.
    """
    if not file.exists():
        return None
    state = read_tensors(file, device)
    saved = Recipe(**{**DEFAULTS, **state["recipe"]})  # the state may be older than the newest setting
    found, requested = asdict(saved.until(state["step"])), asdict(recipe.until(state["step"]))
    if found != requested:
        other = ", ".join(
            f"{name} {found[name]!r}, not {requested[name]!r}" for name in found if found[name] != requested[name]
        )
        raise SettingError(
            f"{file} belongs to another recipe: up to its step {state['step']} it has {other}. Give this run another "
            f"folder (--run), or resume with that recipe."
        )
    return state


def _resume(state: dict[str, Any] | None, model: "PreTrainedModel", optimizer: torch.optim.Optimizer) -> int:
    """Restore a state, if there is one, and return the step to continue from."""
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def _update(
    recipe: Recipe,
    corpus: Corpus | TextCorpus,
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    mask_id: int,
    step: int,
) -> float:
    """Do one optimizer step and return its loss."""
    problems_only = recipe.cycle(step) < recipe.problems_first
    prompt_length, ids = corpus.batch(recipe.seed, step, recipe.batch, problems_only)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        loss = LOSSES[recipe.objective](model, recipe, ids, prompt_length, mask_id, step)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()
