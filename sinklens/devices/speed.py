"""The cost of watching on this device: ratios within one run, absolute figures, distance from the roofline, a profile.

On a GPU the model has LLaDA-8B's shapes with random weights in bfloat16, created on the device, and fewer layers if
memory is short. Other models that share its weights represent the alternatives to sinklens. On a CPU everything is
tiny, and what benchmarks/run.py measures in detail is left out.

Each figure is the ratio of two implementations of the same work, timed in turn; the median over the pairs counts. If
memory or time is not sufficient for a size, that size is not checked.
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from sinklens.devices import roofline
from sinklens.devices.findings import Claim, Measurement, NotChecked
from sinklens.devices.measuring import Ratio, compare, peak, seconds
from sinklens.devices.parts import Setting
from sinklens.devices.plain import ANSWER, LLADA_8B, TINY, blank, plain_loop, random_llada, reference_loop, twin
from sinklens.errors import DeviceMemoryError
from sinklens.hooks import column_sums
from sinklens.interventions import MaskSinks
from sinklens.memory import release
from sinklens.model import Model, load
from sinklens.tracing import generate

SIZES = ((512, 1), (1024, 1), (4096, 1), (512, 8), (1024, 8), (4096, 8))  # positions, rows
SPARE = 24e9  # bytes reserved for activations when choosing the number of layers


class Bench:
    """The compared forms of one model, which share their weights.

    Attributes:
        setting: where it runs.
        sizes: sizes of the model.
        plain: the plain transformers model, with fused attention.
        model: the sinklens model.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.dtype = torch.float32 if setting.small else torch.bfloat16
        self.sizes = dict(TINY if setting.small else LLADA_8B)
        if not setting.small:
            self.sizes["n_layers"] = _layers_that_fit(setting.device)
        self.plain: LlamaForCausalLM = random_llada(**self.sizes, device=setting.device, dtype=self.dtype)
        self.model: Model = load(twin(self.plain))

    def prompt(self, length: int, rows: int) -> Tensor:
        """Random prompt ids; with the answer they make `length` positions."""
        drawn = torch.randint(3, 600, (rows, length - ANSWER), generator=torch.Generator().manual_seed(length))
        return drawn.to(self.setting.device)

    def run(self, prompt: Tensor, steps: int, record: bool, hooks: Any = ()) -> Any:
        """A run of sinklens."""
        return generate(
            self.model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=steps, record_sinks=record, hooks=hooks,
            progress=False,
        )  # fmt: skip

    def ratio(self, what: str, a: Callable[[], object], b: Callable[[], object], aim: float | None) -> Measurement:
        """A ÷ B, timed in turn; the aim applies only to GPUs."""
        return _measured(self._compared(what, a, b), None if self.setting.small else aim)

    def _compared(self, what: str, a: Callable[[], object], b: Callable[[], object]) -> Ratio:
        try:
            return compare(what, a, b, 3 if self.setting.small else 5, device=self.setting.device)
        except (torch.OutOfMemoryError, DeviceMemoryError) as error:
            raise NotChecked(f"not enough memory: {str(error)[:120]}") from error
        finally:
            release()


def claims(setting: Setting) -> Iterator[Claim]:
    """Ratios at every size, then other libraries, the kernels, and the profile."""
    bench = Bench(setting)
    sizes = ((128, 1),) if setting.small else SIZES
    for length, rows in sizes:
        yield from _watching(bench, length, rows)
    for length in (128,) if setting.small else (512, 1024):
        yield from _others(bench, length)
    yield Claim("column sums of 32 heads of 128, S = 4096: plain ÷ kernel", lambda: _kernel(setting))
    yield Claim("profile of a recorded step", lambda: _profile(bench, 128 if setting.small else 1024))


def _layers_that_fit(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    d, mlp = LLADA_8B["d_model"], LLADA_8B["d_mlp"]
    layer, rest = 2 * (4 * d * d + 3 * d * mlp), 4 * d * LLADA_8B["vocab"]
    return max(1, min(LLADA_8B["n_layers"], int((free - SPARE - rest) / layer)))


def _watching(bench: Bench, length: int, rows: int) -> Iterator[Claim]:
    """Ratios with aims, and absolute figures, at one size."""
    steps = 2 if bench.setting.small or length * rows > 4096 else 8
    prompt, five = bench.prompt(length, rows), MaskSinks(top_k=5)
    at = f"{bench.sizes['n_layers']} layers of {bench.sizes['d_model']}, S = {length}, batch {rows}"

    def unwatched() -> object:
        return bench.run(prompt, steps, False)

    def recorded() -> object:
        return bench.run(prompt, steps, True)

    def plain() -> object:
        return plain_loop(bench.plain, prompt, steps)

    def published() -> object:
        return reference_loop(bench.plain, prompt, steps)

    listed: list[tuple[str, Callable[[], object], Callable[[], object], float | None]] = [
        ("nothing watched ÷ plain transformers SDPA", unwatched, plain, 1.02),
        ("sinks recorded ÷ not recorded", recorded, unwatched, 1.05),
        ("MaskSinks(5) ÷ not, nothing recorded", lambda: bench.run(prompt, steps, False, five), unwatched, 1.10),
        ("MaskSinks(5) ÷ not, sinks recorded in both", lambda: bench.run(prompt, steps, True, five), recorded, None),
        ("complete run, sinks recorded ÷ the published procedure", recorded, published, 1.0),
    ]
    for what, a, b, aim in listed:
        yield Claim(f"{what} ({at})", lambda what=what, a=a, b=b, aim=aim: bench.ratio(what, a, b, aim))  # type: ignore[misc]
    yield Claim(f"tokens are the plain loop's ({at})", lambda: _tokens(bench, prompt, steps))
    yield Claim(f"memory above a plain run, sinks recorded, in MB ({at})", lambda: _memory(bench, recorded, plain))
    yield Claim(f"a recorded pass ÷ the card's roofline ({at})", lambda: _roofline(bench, length, rows, steps))


def _tokens(bench: Bench, prompt: Tensor, steps: int) -> Measurement:
    """The share of tokens on which the two loops differ; random weights often tie in bfloat16."""
    found, wanted = bench.run(prompt, steps, True).tokens.cpu(), plain_loop(bench.plain, prompt, steps).cpu()
    return Measurement(float((found != wanted)[:, -ANSWER:].double().mean()), 0.0, "share that differs")


def _memory(bench: Bench, recorded: Callable[[], object], plain: Callable[[], object]) -> Measurement:
    device = bench.setting.device
    recorded(), plain()
    recorded_mb, plain_mb = peak(recorded, device), peak(plain, device)
    return Measurement(
        recorded_mb - plain_mb, None, f"{recorded_mb:.0f} MB, plain {plain_mb:.0f} MB, weights not counted"
    )


def _roofline(bench: Bench, length: int, rows: int, steps: int) -> Measurement:
    device, prompt = bench.setting.device, bench.prompt(length, rows)
    top = roofline.peak_of(device, bench.dtype)
    flops, moved = roofline.pass_of(bench.sizes, rows, length, ANSWER, 4 if bench.setting.small else 2)
    least = max(flops / top.flops, moved / top.bytes)
    times = sorted(seconds(lambda: bench.run(prompt, steps, True), device) / steps for _ in range(3))
    limit = "arithmetic" if flops / top.flops > moved / top.bytes else "memory"
    return Measurement(
        times[1] / least, None,
        f"{times[1] * 1e3:.2f} ms a step; {flops / 1e9:.2f} GFLOP and {moved / 1e9:.2f} GB would take "
        f"{least * 1e3:.2f} ms at {top.flops / 1e12:.2f} TFLOP/s and {top.bytes / 1e12:.2f} TB/s "
        f"({top.source}; limited by {limit})",
    )  # fmt: skip


def _others(bench: Bench, length: int) -> Iterator[Claim]:
    """Sinks of every layer and head in one pass: other libraries ÷ sinklens."""
    canvas = blank(bench.prompt(length, 1))
    at = f"one pass, S = {length}"

    def ours() -> Tensor:
        run = bench.run(canvas[:, :-ANSWER], 1, True)
        return torch.from_numpy(run.sinks.scores().values[0, 0])

    makers = {
        "transformers eager patterns": _transformers, "nnsight on eager attention": _nnsight,
        "TransformerLens run_with_cache": _transformer_lens,
    }  # fmt: skip
    for what, make in makers.items():
        yield Claim(
            f"{what} ÷ sinklens ({at})",
            lambda what=what, make=make: _other(bench, what, make, canvas, ours),  # type: ignore[misc]
        )


def _other(bench: Bench, what: str, make: Any, canvas: Tensor, ours: Callable[[], Tensor]) -> Measurement:
    if bench.setting.small and make is not _transformers:
        raise NotChecked("on a CPU, benchmarks/run.py measures this")
    work, checked = make(bench, canvas)
    try:
        with torch.no_grad():
            if checked:
                found, wanted = work().float().cpu(), ours()
                off = float((found - wanted).abs().max() / wanted.max())
                assert off < (1e-3 if bench.setting.small else 0.1), f"its scores differ by {off:.2g} of the largest"
            ratio = bench.ratio(what, work, ours, None)
            device = bench.setting.device
            usual = peak(lambda: bench.plain.model(input_ids=canvas, use_cache=False), device)
            other_mb, sinklens_mb = peak(work, device) - usual, peak(ours, device) - usual
    finally:
        release()
    return ratio._replace(
        detail=f"{ratio.detail}; memory above a plain pass {other_mb:.0f} MB and {sinklens_mb:.0f} MB"
    )


def _transformers(bench: Bench, canvas: Tensor) -> tuple[Callable[[], Tensor], bool]:
    eager = twin(bench.plain, "eager")

    def work() -> Tensor:
        given = eager.model(input_ids=canvas, use_cache=False, output_attentions=True)
        return torch.stack([pattern[0].float().sum(1) for pattern in given.attentions])

    return work, True


def _nnsight(bench: Bench, canvas: Tensor) -> tuple[Callable[[], Tensor], bool]:
    import nnsight

    traced = nnsight.NNsight(twin(bench.plain, "eager"))

    def work() -> Tensor:
        with traced.trace(input_ids=canvas, use_cache=False, output_attentions=True):
            kept = [layer.self_attn.output[1][0].float().sum(1) for layer in traced.model.layers]
            stacked: Any = torch.stack(kept).save()  # type: ignore[attr-defined]
        return stacked  # has its value once the block has ended

    return work, True


def _transformer_lens(bench: Bench, canvas: Tensor) -> tuple[Callable[[], Tensor], bool]:
    """TransformerLens's bridge attends causally, at equal cost, so its scores are not compared."""
    from transformer_lens.model_bridge import TransformerBridge

    from sinklens.zoo.tokenizer import train_tokenizer

    hf: Any = twin(bench.plain, "eager")
    with tempfile.TemporaryDirectory() as folder:
        hf.config.save_pretrained(folder)
        train_tokenizer(problems=500).save_pretrained(folder)
        lens = TransformerBridge.boot_transformers(folder, hf_model=hf, device=str(bench.setting.device))

    def work() -> Tensor:
        cache = lens.run_with_cache(canvas, return_type=None, names_filter=lambda name: name.endswith("hook_pattern"))[
            1
        ]
        return torch.stack([cache["pattern", layer][0].float().sum(1) for layer in range(lens.cfg.n_layers)])

    return work, False


def _kernel(setting: Setting) -> Measurement:
    if setting.device.type != "cuda":
        raise NotChecked("the kernel is for CUDA devices")
    query, key = (torch.randn(1, 32, 4096, 128, device=setting.device, dtype=torch.bfloat16) for _ in range(2))
    lse = column_sums.log_sum_exp(query, key, 0.1)
    if column_sums._kernels(query, None, False) is None:
        raise NotChecked("the kernel is not used here; see the part `kernels`")
    ratio = compare(
        "plain ÷ kernel", lambda: column_sums.plain_column_sums(query, key, lse, 0.1),
        lambda: column_sums.column_sums(query, key, lse, 0.1), 7, device=setting.device,
    )  # fmt: skip
    return _measured(ratio, None)


def _profile(bench: Bench, length: int) -> str:
    """The operators that take the most time in a recorded run of two steps."""
    from torch.profiler import ProfilerActivity, profile

    gpu = bench.setting.device.type == "cuda"
    prompt = bench.prompt(length, 1)
    bench.run(prompt, 2, True)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiled:
        bench.run(prompt, 2, True)
    by = "self_device_time_total" if gpu else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, by))[:12]
    total = sum(getattr(event, by) for event in profiled.key_averages()) or 1
    return "; ".join(f"{event.key[:60]} {getattr(event, by) / total:.0%} ({event.count}×)" for event in events)


def _measured(ratio: Ratio, aim: float | None) -> Measurement:
    spread = f"{ratio.low:.2f}–{ratio.high:.2f} in {ratio.pairs} pairs"
    return Measurement(ratio.median, aim, f"{spread}; {ratio.a * 1e3:.1f} ms and {ratio.b * 1e3:.1f} ms")
