"""Speed of cached keys: policies of bidirectional models, and the exact caches of block diffusion; parts of run.py."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import process_time
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

import sinklens
from sinklens.devices.measuring import Ratio, compare
from sinklens.devices.plain import ANSWER, random_llada
from sinklens.hooks.held_keys import HeldKeys
from sinklens.tasks.word_problems import held_out


def caching(sizes: dict[str, int], pairs: int, gen_length: int = 256) -> Iterator[Ratio]:
    """The exact run ÷ a run under Fast-dLLM's caches, blocks of 32: four tokens a step; the dual cache also one."""
    model, prompt = sinklens.load(random_llada(**sizes)), torch.randint(3, sizes["vocab"], (1, 64))
    for cache, per_step in (("dual", 4), ("prefix", 4), ("dual", 1)):
        ours = partial(
            sinklens.generate, model, prompt, gen_length=gen_length, block_length=32, steps=gen_length // per_step,
            progress=False,
        )  # fmt: skip
        what = f"exact ÷ {cache} cache, sinks recorded in both ({_size(sizes)}, {gen_length} tokens, {per_step} a step)"
        yield compare(what, ours, partial(ours, cache=cache), pairs)


def _size(sizes: dict[str, int]) -> str:
    return f"d_model {sizes['d_model']}, {sizes['n_layers']} layers"


def block_ratios(sizes: dict[str, int], blocks: int) -> Iterator[Ratio]:
    """CPU time of a block of 32 positions at S = 320: exact ÷ dual cache, four tokens a step and one; its parts."""
    model, prompt = sinklens.load(random_llada(**sizes)), torch.randint(3, sizes["vocab"], (1, 288))

    def spent(steps: int, cache: str | None) -> float:
        started = process_time()
        sinklens.generate(model, prompt, cache=cache, gen_length=32, block_length=32, steps=steps, progress=False)
        return process_time() - started

    spent(2, None), spent(2, "dual")
    for steps in (8, 32):
        times = [(spent(steps, None), spent(steps, "dual")) for _ in range(blocks)]
        ratios = sorted(exact / cached for exact, cached in times)
        a, b = (median(column) for column in zip(*times, strict=True))
        what = f"exact ÷ dual cache, CPU time of a block in {steps} steps ({_size(sizes)}, S = 320)"
        yield Ratio(what, median(ratios), ratios[0], ratios[-1], blocks, a, b)
    yield from _block_parts(model, prompt, _size(sizes), blocks)


def _block_parts(model: sinklens.Model, prompt: torch.Tensor, size: str, blocks: int) -> Iterator[Ratio]:
    """CPU time of the parts of one block of 32 positions in 8 steps ÷ that of the block, dual cache."""
    spent: Counter[str] = Counter()
    settings = {"gen_length": 32, "block_length": 32, "steps": 8, "progress": False}

    def timed(part: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = process_time()
            found = function(*given)
            spent[part(*given)] += process_time() - started
            return found

        return call

    def width(keys: HeldKeys, canvas: torch.Tensor, window: slice, *_: object) -> str:
        return "complete pass" if window.stop - window.start == canvas.shape[1] else "windows"

    passes, head = timed(width, HeldKeys.hidden), timed(lambda *_: "head", model.tree.head)
    sinklens.generate(model, prompt, cache="dual", **settings)
    started = process_time()
    with (
        mock.patch.object(HeldKeys, "hidden", lambda *given: passes(*given)),
        mock.patch.object(type(model.tree), "head", lambda _, hidden: head(hidden)),
    ):
        for _ in range(blocks):
            sinklens.generate(model, prompt, cache="dual", **settings)
    every = process_time() - started
    for part, seconds in spent.items():
        share = seconds / every
        yield Ratio(
            f"dual cache: {part} ÷ block, CPU time ({size}, S = 320)",
            share,
            share,
            share,
            1,
            seconds / blocks,
            every / blocks,
        )


def stopping(problems: int, batch: int, pairs: int) -> Iterator[Ratio]:
    """Rows that end at their end-of-text token ÷ rows decided to the last position: held-out problems, 48 positions."""
    model, prompts = sinklens.load("tiny-llada"), [problem.prompt for problem in held_out(problems)]
    parts = [prompts[start : start + batch] for start in range(0, problems, batch)]

    def run(stop: bool) -> list[sinklens.Generation]:
        given = {"gen_length": 48, "block_length": 8, "record_sinks": False, "progress": False}
        return [sinklens.generate(model, part, stop_at_eos=stop, **given) for part in parts]

    def row_steps(runs: list[sinklens.Generation]) -> int:
        return sum(int(one.undecided[:, :-1].any(dim=2).sum()) for one in runs)

    stopped, complete = run(True), run(False)
    assert [one.text for one in stopped] == [one.text for one in complete], "stopping must not change the answers"
    ratio, what = row_steps(stopped) / row_steps(complete), f"{problems} held-out problems, {batch} rows, gen_length 48"
    yield Ratio(
        f"stop_at_eos ÷ without, row-steps (tiny-llada, {what})", ratio, ratio, ratio, 1, row_steps(stopped),
        row_steps(complete), "row-steps",
    )  # fmt: skip
    yield compare(f"stop_at_eos ÷ without (tiny-llada, {what})", lambda: run(True), lambda: run(False), pairs)


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
