"""Speed of cached keys: policies of bidirectional models, and the exact caches of block diffusion; parts of run.py."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import process_time
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, Qwen2Config, Qwen3Config

import sinklens
from benchmarks.measuring import Ratio, compare, compare_peaks
from benchmarks.plain import ANSWER, MASK, random_llada, twin
from sinklens.hooks.tree import HookTree
from sinklens.hooks.window_cache import WindowCache
from sinklens.sampling.state import State
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


def cache_memory(sizes: dict[str, int]) -> Iterator[Ratio]:
    """Peak memory of the tensors of a run of 320 positions, sinks recorded: cached ÷ exact, excess ÷ formula."""
    model, prompt = sinklens.load(random_llada(**sizes)), torch.randint(3, sizes["vocab"], (1, 288))
    run = partial(sinklens.generate, model, prompt, gen_length=32, block_length=32, steps=8, progress=False)
    formula = 3 * sizes["n_layers"] * 320 * sizes["d_model"] * 4 / 1e6
    for cache in ("prefix", "dual"):
        cached = partial(run, cache=cache)
        found = compare_peaks(f"peak memory: {cache} cache ÷ exact ({_size(sizes)}, S = 320)", cached, run)
        yield found
        more = found.a - found.b
        what = f"peak memory above the exact run: {cache} cache ÷ the formula of its keys ({_size(sizes)}, S = 320)"
        yield Ratio(what, more / formula, more / formula, more / formula, 1, more, formula, "MB")


class BlockKeys(DynamicCache):
    """Keys and values of all positions; passes after the first compute those of `window` again.

    Attributes:
        window: columns that the pass computes; None for all.
    """

    window: slice | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **more: Any) -> Any:
        if self.window is None:
            return super().update(key_states, value_states, layer_idx, *rest, **more)
        layer: Any = self.layers[layer_idx]
        layer.keys[:, :, self.window], layer.values[:, :, self.window] = key_states, value_states
        return layer.keys, layer.values


def dual_cache_loop(hf: LlamaForCausalLM, prompt: Tensor, gen_length: int, block: int, per_step: int) -> Tensor:
    """Fast-dLLM's published procedure with its dual cache, for one row: head and float64 softmax wherever it computes.

    Every block begins with a complete pass; the later ones compute the block over the other positions' stored keys.
    """
    canvas = torch.cat([prompt, torch.full((1, gen_length), MASK)], dim=1)
    places = torch.arange(canvas.shape[1])[None]
    for start in range(prompt.shape[1], canvas.shape[1], block):
        keys, inside = BlockKeys(), slice(start, start + block)
        for step in range(block // per_step):
            window = inside if step else slice(0, canvas.shape[1])
            keys.window = window if step else None
            logits = hf(
                input_ids=canvas[:, window], position_ids=places[:, window], past_key_values=keys, use_cache=True
            ).logits
            probs = logits.to(torch.float64).softmax(-1)
            best = logits.argmax(-1)
            confidence = probs.gather(-1, best[..., None])[..., 0]
            at = slice(start - window.start, start - window.start + block)
            masked = canvas[0, inside] == MASK
            chosen = torch.where(masked, confidence[0, at], -torch.inf).topk(per_step).indices
            canvas[0, start + chosen] = best[0, at][chosen]
    return canvas


def against_fast_dllm(sizes: dict[str, int], pairs: int, gen_length: int = 256) -> Iterator[Ratio]:
    """The dual cache with nothing watched ÷ Fast-dLLM's procedure on a plain transformers model."""
    hf, prompt = random_llada(**sizes), torch.randint(3, sizes["vocab"], (1, 64))
    model = sinklens.load(twin(hf))
    for per_step in (4, 1):

        def ours(per_step: int = per_step) -> Tensor:
            return sinklens.generate(
                model, prompt, cache="dual", gen_length=gen_length, block_length=32, steps=gen_length // per_step,
                record_sinks=False, progress=False,
            ).tokens  # fmt: skip

        def theirs(per_step: int = per_step) -> Tensor:
            with torch.no_grad():
                return dual_cache_loop(hf, prompt, gen_length, 32, per_step)

        assert torch.equal(ours(), theirs()), "both must decide the same tokens"
        what = f"dual cache, nothing watched ÷ Fast-dLLM's published procedure ({_size(sizes)}, {per_step} a step)"
        yield compare(what, ours, theirs, pairs)


def _size(sizes: dict[str, int]) -> str:
    return f"d_model {sizes['d_model']}, {sizes['n_layers']} layers"


def products(sizes: dict[str, int], pairs: int) -> Iterator[Ratio]:
    """The linear layers of one block of 32 positions alone: exact ÷ dual cache at S = 320, four tokens a step and one.

    No cache can be faster than this ratio: it leaves out attention, small operations and the interpreter.
    """
    hf = random_llada(**sizes)
    layers = [part for part in hf.model.modules() if isinstance(part, torch.nn.Linear)]
    rows = {(part, count): torch.randn(count, part.in_features) for part in layers for count in (32, 320)}

    def block(per_step: int, window: int) -> None:
        for step in range(32 // per_step):
            for part in layers:
                part(rows[part, window if step else 320])
            hf.lm_head(rows[layers[0], 32][: 32 - per_step * step])

    with torch.no_grad():
        for per_step in (4, 1):
            what = f"exact ÷ dual cache, linear layers alone ({_size(sizes)}, S = 320, {per_step} a step)"
            yield compare(what, partial(block, per_step, 320), partial(block, per_step, 32), pairs)


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
    spent = defaultdict[str, float](float)
    settings = {"gen_length": 32, "block_length": 32, "steps": 8, "progress": False}

    def timed(part: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = process_time()
            found = function(*given)
            spent[part(*given)] += process_time() - started
            return found

        return call

    def width(keys: WindowCache, canvas: torch.Tensor, window: slice, *_: object) -> str:
        return "complete pass" if window.stop - window.start == canvas.shape[1] else "windows"

    passes, head = timed(width, WindowCache.hidden), timed(lambda *_: "head", model.tree.head)
    sinklens.generate(model, prompt, cache="dual", **settings)
    started = process_time()
    with (
        mock.patch.object(WindowCache, "hidden", lambda *given: passes(*given)),
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


def leaving(problems: int, batch: int, pairs: int) -> Iterator[Ratio]:
    """Rows that have ended leave the passes of tiny-llama ÷ they stay, as they do while a hook watches."""
    model, prompts = sinklens.load("tiny-llama"), [problem.prompt for problem in held_out(problems)]
    parts = [prompts[start : start + batch] for start in range(0, problems, batch)]
    rows = Counter[str]()

    def run(name: str) -> list[str]:
        stays, counted = name == "stay", type(model.tree).hidden

        def hidden(tree: HookTree, ids: Tensor, *given: Any) -> Tensor:
            rows[name] += len(ids)
            return counted(tree, ids, *given)

        with (
            mock.patch.object(State, "running", (lambda *_: None) if stays else State.running),
            mock.patch.object(type(model.tree), "hidden", hidden),
        ):
            given = {"gen_length": 48, "record_sinks": False, "progress": False}
            return [text for part in parts for text in sinklens.generate(model, part, **given).text]

    assert run("leave") == run("stay"), "leaving must not change the answers"
    what, share = f"{problems} held-out problems, {batch} rows", rows["leave"] / rows["stay"]
    yield Ratio(
        f"ended rows leave ÷ stay, row-steps (tiny-llama, {what})", share, share, share, 1, rows["leave"], rows["stay"],
        "row-steps",
    )  # fmt: skip
    yield compare(f"ended rows leave ÷ stay (tiny-llama, {what})", lambda: run("leave"), lambda: run("stay"), pairs)


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
