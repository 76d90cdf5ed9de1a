"""Baselines for sinklens: models without hook points, and the sampling loop written out for them."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

MASK = 1
ANSWER = 32  # positions to decide
LLADA_8B = {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab": 126_464, "d_mlp": 12_288}
TINY = {"d_model": 192, "n_layers": 4, "n_heads": 6, "vocab": 643}


def random_llada(
    d_model: int,
    n_layers: int,
    n_heads: int,
    vocab: int,
    d_mlp: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A bidirectional Llama with random weights, created on `device`; `d_mlp` defaults to 8/3 of `d_model`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=d_model, intermediate_size=d_mlp or int(d_model * 8 / 3) // 64 * 64,
        num_hidden_layers=n_layers, num_attention_heads=n_heads, max_position_embeddings=4096,
        tie_word_embeddings=False, mask_token_id=MASK,
    )  # fmt: skip
    config.is_causal = False
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).eval()
    return _bidirectional(model)


def twin(model: LlamaForCausalLM, attention: str = "sdpa") -> LlamaForCausalLM:
    """Another model that shares the weights of `model` without copying them."""
    config: Any = copy.deepcopy(model.config)
    first = next(model.parameters())
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=first.dtype)
    other.load_state_dict(model.state_dict(), assign=True)
    rotary: Any = type(other.model.rotary_emb)
    other.model.rotary_emb = rotary(config=config).to(first.device)
    return _bidirectional(other.eval())


def _bidirectional(model: LlamaForCausalLM) -> LlamaForCausalLM:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def blank(prompt: Tensor) -> Tensor:
    """The canvas before the first step."""
    return torch.cat([prompt, torch.full((len(prompt), ANSWER), MASK, device=prompt.device)], dim=1)


def plain_loop(hf: LlamaForCausalLM, prompt: Tensor, steps: int) -> Tensor:
    """LLaDA's greedy loop on a plain transformers model, with head and softmax only at the masked positions."""
    with torch.no_grad():
        canvas = blank(prompt)
        for _ in range(steps):
            plain_step(hf, canvas, ANSWER // steps)
        return canvas


def plain_step(hf: LlamaForCausalLM, canvas: Tensor, count: int) -> Tensor:
    """A step of it, which writes `count` tokens in each row; returns the logits of the masked positions."""
    where = canvas == MASK
    logits = hf.lm_head(hf.model(input_ids=canvas, use_cache=False).last_hidden_state[where]).float()
    candidates = logits.argmax(-1)
    confidence = logits.softmax(-1, dtype=torch.float64).gather(-1, candidates[:, None])[:, 0]
    proposed = canvas.masked_scatter(where, candidates)
    blocked = torch.full(canvas.shape, -torch.inf, dtype=torch.float64, device=canvas.device)
    _commit(canvas, proposed, blocked.masked_scatter(where, confidence), count)
    return logits


def reference_loop(hf: LlamaForCausalLM, prompt: Tensor, steps: int) -> Tensor:
    """The same loop as in LLaDA's published sampling script: head and float64 softmax at every position."""
    with torch.no_grad():
        canvas = blank(prompt)
        for _ in range(steps):
            where = canvas == MASK
            logits = hf(input_ids=canvas, use_cache=False).logits
            candidates = logits.argmax(-1)
            confidence = logits.to(torch.float64).softmax(-1).gather(-1, candidates[..., None])[..., 0]
            proposed = torch.where(where, candidates, canvas)
            _commit(canvas, proposed, torch.where(where, confidence, -torch.inf), ANSWER // steps)
        return canvas


def _commit(canvas: Tensor, proposed: Tensor, confidence: Tensor, count: int) -> None:
    """Put the `count` most confident tokens of each row on the canvas."""
    for row in range(len(canvas)):
        chosen = confidence[row].topk(count).indices
        canvas[row, chosen] = proposed[row, chosen]


def transformers_sinks(plain: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """Column sums [layer, head, key] of the first row of a canvas, from the patterns of eager attention."""
    eager = twin(plain, "eager")

    def work(canvas: Tensor) -> Tensor:
        given = eager.model(input_ids=canvas, use_cache=False, output_attentions=True)
        return torch.stack([pattern[0].float().sum(1) for pattern in given.attentions])

    return work


def nnsight_sinks(plain: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """The same with nnsight."""
    import nnsight

    traced = nnsight.NNsight(twin(plain, "eager"))

    def work(canvas: Tensor) -> Tensor:
        with traced.trace(input_ids=canvas, use_cache=False, output_attentions=True):
            kept = [layer.self_attn.output[1][0].float().sum(1) for layer in traced.model.layers]
            stacked: Any = torch.stack(kept).save()  # type: ignore[attr-defined]
        return stacked  # has its value once the block has ended

    return work


def bridge(plain: LlamaForCausalLM) -> Any:
    """TransformerLens's bridge; it attends causally, at equal cost."""
    from transformer_lens.model_bridge import TransformerBridge

    import sinklens

    hf: Any = twin(plain, "eager")
    with tempfile.TemporaryDirectory() as folder:
        hf.config.save_pretrained(folder)
        tokenizer: Any = sinklens.load("tiny-llada").tokenizer
        tokenizer.save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=hf, device=str(hf.device))


def bridge_sinks(plain: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """The same from TransformerLens's cache."""
    lens = bridge(plain)

    def work(canvas: Tensor) -> Tensor:
        patterns = lambda name: name.endswith("hook_pattern")  # noqa: E731
        cache = lens.run_with_cache(canvas, return_type=None, names_filter=patterns)[1]
        return torch.stack([cache["pattern", layer][0].float().sum(1) for layer in range(lens.cfg.n_layers)])

    return work
