"""Speed of cached keys: policies of bidirectional models, and the exact caches of block diffusion; parts of run.py."""

from collections.abc import Iterator
from functools import partial

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

import sinklens
from sinklens.devices.measuring import Ratio, compare
from sinklens.devices.plain import ANSWER, random_llada


def caching(sizes: dict[str, int], pairs: int) -> Iterator[Ratio]:
    """The exact run ÷ a run under Fast-dLLM's caches, d_model 512: 64 steps, 256 tokens, blocks of 32."""
    model, prompt = sinklens.load(random_llada(**sizes)), torch.randint(3, sizes["vocab"], (1, 64))
    ours = partial(sinklens.generate, model, prompt, gen_length=256, block_length=32, steps=64, progress=False)
    for cache in ("dual", "prefix"):
        yield compare(f"exact ÷ {cache} cache, sinks recorded in both", ours, partial(ours, cache=cache), pairs)


def block_caching(lengths: list[int], pairs: int) -> Iterator[Ratio]:
    """Block diffusion with cached keys ÷ without, random weights of tiny-llada's size in blocks of 8."""
    families = {"sdar": Qwen3Config, "bd3lm-qwen3": Qwen3Config, "fast-dllm-v2": Qwen2Config}
    for family, config in families.items():
        hf = AutoModelForCausalLM.from_config(config(
            vocab_size=643, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=6, head_dim=32, max_position_embeddings=2048, mask_token_id=642,
        ))  # fmt: skip
        model = sinklens.load(hf.eval(), family=family, block_length=8)
        for length in lengths:
            prompt = torch.randint(3, 642, (1, length - ANSWER))

            def run(cached: bool, model: sinklens.Model = model, prompt: torch.Tensor = prompt) -> sinklens.Generation:
                return sinklens.generate(
                    model, prompt, gen_length=ANSWER, use_cache=cached, stop=False, record_sinks=False, progress=False,
                )  # fmt: skip

            assert torch.equal(run(True).tokens, run(False).tokens), "the cache must not change the tokens"
            what = f"{family}: cached keys ÷ all positions (tiny-llada's size, blocks of 8, S = {length})"
            yield compare(what, lambda: run(True), lambda: run(False), pairs)
