"""Measure the cost of watching, as ratios within one process.

    python -m benchmarks.run [--quick] [--only tiny sweep ...]

Every figure is the ratio of two implementations of the same work, timed in turn (A B A B …) so that a drift of the
machine affects both; the median of the pairwise ratios is reported with its range. Each result is written to
benchmarks/results.json as soon as it is measured, with the hardware, and replaces the previous result of that name. The
table of all results is printed and written into benchmarks/README.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformer_lens.hook_points import HookPoint
from transformers import LlamaForCausalLM

import sinklens
from benchmarks.caches import (
    against_fast_dllm,
    block_caching,
    block_ratios,
    cache_memory,
    caching,
    leaving,
    products,
    stopping,
)
from benchmarks.interventions import mapping, placing, sweeping
from benchmarks.measuring import (
    HEAD,
    Ratio,
    compare,
    compare_peaks,
    cpu_times,
    hardware,
    peak,
    ratio_of,
    seconds,
    table,
)  # fmt: skip
from benchmarks.modulated import SMALL, SMALLEST_DIT, modulated
from benchmarks.plain import (
    ANSWER,
    MASK,
    TINY,
    blank,
    bridge,
    bridge_sinks,
    nnsight_sinks,
    plain_loop,
    random_llada,
    reference_loop,
    transformers_sinks,
)  # fmt: skip
from sinklens.interventions import MaskSinks
from sinklens.runs import recorder
from sinklens.runs.request import Hooks
from sinklens.sinks import Record
from sinklens.sinks.steps import StoredSteps

RESULTS = Path(__file__).with_name("results.json")
STEPS = 8
SMALLEST = {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab": 643}
DEEP = {"d_model": 64, "n_layers": 32, "n_heads": 4, "vocab": 643}  # bound by calls, as large networks are on a GPU
MIDDLE = {"d_model": 512, "n_layers": 8, "n_heads": 8, "vocab": 32_000}
LAYER = {"d_model": 128, "n_layers": 1, "n_heads": 4, "vocab": 256}
SLOW = (
    "others",
    "middle",
    "wide",
    "compile",
    "caches",
    "fast-dllm",
    "products",
    "block",
    "regional",
    "recorded",
    "lengths",
    "modulated",
)  # left out by --quick
WIDE = {"d_model": 4096, "n_layers": 1, "n_heads": 32, "vocab": 126_464, "d_mlp": 12_288}


def watching(name: str, sizes: dict[str, int], lengths: list[int], pairs: int, steps: int = STEPS) -> Iterator[Ratio]:
    """Nothing watched ÷ plain transformers, sinks recorded ÷ not, sinks masked ÷ not, at each length."""
    five = MaskSinks(top_k=5)
    plain, model = random_llada(**sizes), sinklens.load(random_llada(**sizes))
    for length in lengths:
        prompt = torch.randint(3, sizes["vocab"], (1, length - ANSWER))

        def ours(record: bool, hooks: Hooks = (), prompt: torch.Tensor = prompt) -> object:
            return sinklens.generate(
                model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=steps, record_sinks=record, hooks=hooks,
                progress=False,
            )  # fmt: skip

        def baseline(prompt: torch.Tensor = prompt) -> object:
            return plain_loop(plain, prompt, steps)

        same = torch.equal(ours(False).tokens, baseline())  # type: ignore[attr-defined]
        assert same, "the two loops must do the same work"
        at = f"{name}, S = {length}"
        yield compare(f"nothing watched ÷ plain transformers SDPA ({at})", lambda: ours(False), baseline, pairs)
        yield compare(f"all sinks recorded ÷ not recorded ({at})", lambda: ours(True), lambda: ours(False), pairs)

        def reference(prompt: torch.Tensor = prompt) -> object:
            return reference_loop(plain, prompt, steps)

        same = torch.equal(ours(True).tokens, reference())  # type: ignore[attr-defined]
        assert same, "the reference must decide as sinklens does"
        yield compare(f"all sinks recorded ÷ LLaDA's published procedure ({at})", lambda: ours(True), reference, pairs)
        yield compare(
            f"MaskSinks(5) ÷ unmasked, sinks recorded in both ({at})",
            lambda: ours(True, five),
            lambda: ours(True),
            pairs,
        )
        yield compare(
            f"MaskSinks(5) ÷ unmasked, nothing recorded ({at})", lambda: ours(False, five), lambda: ours(False), pairs
        )


def others(name: str, sizes: dict[str, int], lengths: list[int], pairs: int) -> Iterator[Ratio]:
    """Sinks of every layer and head in one pass: other libraries ÷ sinklens, in time and in memory.

    The other libraries compute no logits; sinklens computes them at the answer's positions. Memory is measured above
    the same pass of the plain transformers model.
    """
    plain = random_llada(**sizes)
    model, lens = sinklens.load(random_llada(**sizes)), bridge(plain)
    eager, traced, cached = transformers_sinks(plain), nnsight_sinks(plain), bridge_sinks(plain)
    for length in lengths:
        canvas = blank(torch.randint(3, sizes["vocab"], (1, length - ANSWER)))
        scores: dict[str, torch.Tensor] = {}

        def ours(canvas: torch.Tensor = canvas) -> torch.Tensor:
            run = sinklens.generate(
                model, canvas[:, :-ANSWER], gen_length=ANSWER, block_length=ANSWER, steps=1, progress=False
            )
            return torch.from_numpy(run.sinks.scores().values[0, 0])  # type: ignore[union-attr]

        def hooked(canvas: torch.Tensor = canvas, scores: dict[str, torch.Tensor] = scores) -> torch.Tensor:
            def keep(value: torch.Tensor, hook: HookPoint) -> None:
                scores[str(hook.name)] = value[0].sum(1)

            hooks = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(lens.cfg.n_layers)]
            lens.run_with_hooks(canvas, return_type=None, fwd_hooks=hooks)
            return torch.stack(list(scores.values()))

        def unwatched(canvas: torch.Tensor = canvas) -> object:
            return plain.model(input_ids=canvas, use_cache=False)

        at = f"{name}, S = {length}"
        with torch.no_grad():
            for other in (eager, traced):
                torch.testing.assert_close(ours(), other(canvas), atol=1e-3, rtol=1e-3)
            works = {
                "TransformerLens run_with_cache": partial(cached, canvas),
                "TransformerLens hooks that reduce": hooked,
                "transformers output_attentions": partial(eager, canvas),
                "nnsight on eager attention": partial(traced, canvas),
            }
            usual = peak(unwatched)
            for library, work in works.items():
                yield compare(f"sinks of one pass: {library} ÷ sinklens ({at})", work, ours, pairs)
                yield compare_peaks(f"memory above a plain pass: {library} ÷ sinklens ({at})", work, ours, usual)


def growing(pairs: int) -> Iterator[Ratio]:
    """Growth of time, memory and files of a recorded run with positions, steps and rows, at tiny-llada's size."""
    model = sinklens.load(random_llada(**TINY))

    def run(length: int, steps: int, rows: int, on_disk: bool = False) -> Callable[[], object]:
        prompt = torch.randint(3, TINY["vocab"], (rows, length - ANSWER))

        def work() -> object:
            with tempfile.TemporaryDirectory() as folder:
                record = Record(out=Path(folder) / "run.zarr") if on_disk else True
                return sinklens.generate(
                    model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=steps, record_sinks=record,
                    progress=False,
                )  # fmt: skip

        return work

    for what, more, less in (
        ("S = 1024 ÷ S = 256", run(1024, 8, 1), run(256, 8, 1)),
        ("S = 4096 ÷ S = 1024", run(4096, 8, 1), run(1024, 8, 1)),
        ("32 steps ÷ 8, S = 1024", run(1024, 32, 1), run(1024, 8, 1)),
        ("32 steps ÷ 8, S = 1024, recorded on disk", run(1024, 32, 1, on_disk=True), run(1024, 8, 1, on_disk=True)),
        ("8 rows ÷ 1, S = 256", run(256, 8, 8), run(256, 8, 1)),
    ):
        yield compare(f"growth of time: {what}", more, less, pairs)
        if "disk" not in what:  # the profiler does not see what the writing thread frees
            yield compare_peaks(f"growth of memory: {what}", more, less)
    yield _on_disk(model)


def _on_disk(model: sinklens.Model) -> Ratio:
    """Bytes of a recording ÷ layers × heads × positions × steps × 4, the size of its scores."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "run.zarr"
        prompt = torch.randint(3, TINY["vocab"], (1, 1024 - ANSWER))
        sinklens.generate(
            model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=STEPS, record_sinks=Record(out=store),
            progress=False,
        )  # fmt: skip
        found = sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) / 1e6
    formula = TINY["n_layers"] * TINY["n_heads"] * 1024 * STEPS * 4 / 1e6
    return Ratio(
        "a recording on disk ÷ its scores by the formula (S = 1024, 8 steps)", found / formula, found / formula,
        found / formula, 1, found, formula, "MB",
    )  # fmt: skip


def writing(pairs: int) -> Iterator[Ratio]:
    """Recording on disk: written while the next step is computed ÷ written before it starts."""

    class AtOnce(StoredSteps):
        def append(self, step: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
            kept = super().append(step)
            self.flush()
            return kept

    model = sinklens.load(random_llada(**TINY))
    for length in (256, 1024):
        prompt = torch.randint(3, TINY["vocab"], (1, length - ANSWER))

        def run(store: type[StoredSteps], prompt: torch.Tensor = prompt) -> object:
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(recorder, "StoredSteps", store):
                return sinklens.generate(
                    model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=ANSWER, progress=False,
                    record_sinks=Record(out=Path(folder) / "run.zarr"),
                )  # fmt: skip

        what = f"recorded on disk: in the background ÷ at once (tiny-llada's size, S = {length}, {ANSWER} steps)"
        yield compare(what, lambda: run(StoredSteps), lambda: run(AtOnce), pairs)


def compiling(sizes: dict[str, int], lengths: list[int], pairs: int) -> Iterator[Ratio]:
    """One pass of a plain transformers model with torch.compile ÷ without; excludes compile time."""
    eager, other = random_llada(**sizes), random_llada(**sizes)
    compiled = torch.compile(other.model)
    for length in lengths:
        canvas = blank(torch.randint(3, sizes["vocab"], (1, length - ANSWER)))

        def one(model: Callable[..., object], canvas: torch.Tensor = canvas) -> object:
            with torch.no_grad():
                return model(input_ids=canvas, use_cache=False)

        what = f"torch.compile ÷ eager, plain transformers (d_model {sizes['d_model']}, S = {length})"
        yield compare(what, lambda: one(compiled), lambda: one(eager.model), pairs)


def regional(sizes: dict[str, int], length: int, pairs: int) -> Iterator[Ratio]:
    """CPU time of one pass of plain transformers ÷ the same with every decoder layer compiled alone."""
    models, canvas = (random_llada(**sizes), random_llada(**sizes)), blank(torch.randint(3, 100, (1, length - ANSWER)))
    for layer in models[1].model.layers:
        layer.compile()

    def one(model: LlamaForCausalLM) -> object:
        with torch.no_grad():
            return model.model(input_ids=canvas, use_cache=False)

    what = (
        f"eager ÷ torch.compile of each layer, CPU time, plain transformers (d_model {sizes['d_model']}, S = {length})"
    )
    yield ratio_of(what, *cpu_times([partial(one, model) for model in models], pairs))


def recording(sizes: dict[str, int], length: int, pairs: int) -> Iterator[Ratio]:
    """CPU time of a step with sinks recorded ÷ not recorded."""
    model, prompt = sinklens.load(random_llada(**sizes)), torch.randint(3, sizes["vocab"], (1, length - ANSWER))

    def step(record: bool) -> object:
        return sinklens.generate(
            model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=1, record_sinks=record, progress=False
        )

    what = f"all sinks recorded, exact ÷ not recorded, CPU time (d_model {sizes['d_model']}, S = {length})"
    yield ratio_of(what, *cpu_times([lambda: step(True), lambda: step(False)], pairs))


def lengthening(lengths: list[int], pairs: int) -> Iterator[Ratio]:
    """CPU time of one pass of one layer with points watched ÷ unwatched: each point of the map alone, then all others.

    Beyond 4,096 positions the points that form the map are left out: at 8,192 their pass needs more than 4 GiB.
    """
    hf = random_llada(**LAYER)
    hf.config.max_position_embeddings = max(lengths)
    model = sinklens.load(hf)
    alone = [f"blocks.0.attn.hook_{name}" for name in ("attn_scores", "pattern", "sink_scores")]
    others = [name for name in model.hook_names() if name not in alone and not name.startswith("denoise.")]
    groups = {name.rsplit(".", 1)[1]: [name] for name in alone} | {f"the {len(others)} other points": others}

    for length in lengths:
        ids = torch.full((1, length), MASK)

        def one(names: list[str], ids: torch.Tensor = ids) -> object:
            with torch.no_grad():
                return model.run_with_hooks(ids, fwd_hooks=[(name, lambda value, hook: None) for name in names])

        shown = [*groups][2 if length > 4096 else 0 :]
        works = [partial(one, of) for of in ([], *(groups[name] for name in shown))]
        unwatched, *watched = cpu_times(works, pairs * (5 if length <= 1024 else 1))
        for name, times in zip(shown, watched, strict=True):
            yield ratio_of(f"{name} watched ÷ unwatched, CPU time (one layer, S = {length})", times, unwatched)


def importing(pairs: int) -> Ratio:
    """``import sinklens`` ÷ ``import torch``, each in a fresh process, minus the time of an empty process."""

    def process(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True)

    empty = statistics.median(seconds(process("pass")) for _ in range(pairs))
    return compare("import sinklens ÷ import torch", process("import sinklens"), process("import torch"), pairs, empty)


def parts(quick: bool) -> dict[str, Callable[[], Iterator[Ratio]]]:
    """The measurements by name."""
    pairs, lengths = (5, [256]) if quick else (9, [256, 1024])
    return {
        "import": lambda: iter([importing(3 if quick else 7)]),
        "smallest": lambda: islice(watching("d_model 64, 2 layers", SMALLEST, [128], pairs), 2),
        "tiny": lambda: watching("tiny-llada's size", TINY, lengths, pairs),
        "sweep": lambda: sweeping(3),
        "maps": lambda: mapping(3),
        "places": lambda: placing(15),
        "growth": lambda: growing(3),
        "blocks": lambda: block_caching([256], 5),
        "writing": lambda: writing(pairs),
        "deep": lambda: watching("d_model 64, 32 layers", DEEP, [64, 256], pairs),
        "others": lambda: others("d_model 512, 8 layers", MIDDLE, lengths, 5),
        "middle": lambda: watching("d_model 512, 8 layers, vocabulary 32k", MIDDLE, lengths, pairs),
        "wide": lambda: watching("one layer of LLaDA-8B's width", WIDE, lengths, 3, steps=2),
        "compile": lambda: compiling(MIDDLE, lengths, pairs),
        "caches": lambda: caching(SMALLEST, 1, gen_length=64) if quick else caching(MIDDLE, 5),
        "cache-memory": lambda: cache_memory(SMALLEST if quick else MIDDLE),
        "fast-dllm": lambda: against_fast_dllm(SMALLEST, 1, 64) if quick else against_fast_dllm(MIDDLE, 5),
        "products": lambda: products(SMALLEST, 1) if quick else products(MIDDLE, 5),
        "block": lambda: block_ratios(SMALLEST, 1) if quick else block_ratios(MIDDLE, 3),
        "regional": lambda: regional(SMALLEST, 128, 1) if quick else regional(MIDDLE, 1024, 9),
        "recorded": lambda: recording(SMALLEST, 256, 1) if quick else recording(MIDDLE, 1024, 7),
        "lengths": lambda: lengthening([256] if quick else [256, 1024, 4096, 8192], 3),
        "modulated": lambda: (
            modulated("d 64, 2 blocks", SMALLEST_DIT, 128, 1)
            if quick
            else modulated("d 768, 12 blocks", SMALL, 1024, 2)
        ),
        "stopping": lambda: stopping(2, 2, 1) if quick else stopping(20, 5, 3),
        "leaving": lambda: leaving(2, 2, 1) if quick else leaving(100, 25, 5),
    }


def main() -> None:
    """Measure, write the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and only the smallest cases")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(parts(True)),
        help="measure only these parts (default: all, or the fast ones with --quick)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = parts(options.quick)
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.only or [name for name in known if not (options.quick and name in SLOW)]:
        for ratio in known[name]():
            results[ratio.what] = asdict(ratio) | {"hardware": hardware()}
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{ratio.what}: {ratio.median:.3f}", file=sys.stderr, flush=True)
    markdown = "\n".join(table(results))
    print(f"\n{markdown}")
    if options.out == RESULTS:
        readme = RESULTS.with_name("README.md")
        before, after = readme.read_text().split(HEAD)
        notes = after.split("\n\n", 1)[1]
        readme.write_text(f"{before}{markdown}\n\n{notes}")


if __name__ == "__main__":
    main()
