"""The cost of watching on this device: ratios within one run, and absolute figures.

On a GPU the model has LLaDA-8B's shapes with random weights in bfloat16, created on the device, and fewer layers if
memory is short. Other models that share its weights represent the alternatives to sinklens. On a CPU everything is
tiny, and what benchmarks/run.py measures in detail is left out.

Each figure is the ratio of two implementations of the same work, timed in turn; the median over the pairs counts. If
memory or time is not sufficient for a size, that size is not checked.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from gpu.agreement import decisions
from torch import Tensor
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from benchmarks.measuring import Ratio, compare, in_turn, ratio_of, seconds, settle
from benchmarks.plain import (
    ANSWER,
    LLADA_8B,
    TINY,
    plain_loop,
    random_llada,
    reference_loop,
    twin,
)  # fmt: skip
from sinklens.errors import DeviceMemoryError
from sinklens.evaluation.cards import CARDS
from sinklens.hooks import captured
from sinklens.hooks.attention import column_sums
from sinklens.interventions import MaskSinks
from sinklens.model import Model, load
from sinklens.runs import generate
from sinklens.utils.memory import release

SPARE = 24e9  # bytes reserved for activations when choosing the number of layers


@contextmanager
def enough_memory() -> Iterator[None]:
    """Skip the test if its work takes more memory than there is."""
    try:
        yield
    except (torch.OutOfMemoryError, DeviceMemoryError) as error:
        pytest.skip(f"not enough memory: {str(error)[:120]}")
    finally:
        release()


class Size(NamedTuple):
    """The size of a canvas."""

    length: int
    rows: int

    def __str__(self) -> str:
        return f"S = {self.length}, batch {self.rows}"


class Bench:
    """The compared forms of one model, which share their weights.

    Attributes:
        device: where it runs.
        small: whether the sizes are those for a CPU.
        sizes: sizes of the model.
        plain: the plain transformers model, with fused attention.
        model: the sinklens model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.small = device, device.type == "cpu"
        self.dtype = torch.float32 if self.small else torch.bfloat16
        self.sizes = dict(TINY if self.small else LLADA_8B)
        if not self.small:
            self.sizes["n_layers"] = _layers_that_fit(device)
        self.plain: LlamaForCausalLM = random_llada(**self.sizes, device=device, dtype=self.dtype)
        self.model: Model = load(twin(self.plain))

    def __str__(self) -> str:
        return f"{self.sizes['n_layers']} layers of {self.sizes['d_model']}"

    def prompt(self, length: int, rows: int) -> Tensor:
        """Random prompt ids; with the answer they make `length` positions."""
        drawn = torch.randint(3, 600, (rows, length - ANSWER), generator=torch.Generator().manual_seed(length))
        return drawn.to(self.device)

    def run(self, prompt: Tensor, steps: int, record: bool, hooks: Any = ()) -> Any:
        """A run of sinklens."""
        return generate(
            self.model, prompt, gen_length=ANSWER, block_length=ANSWER, steps=steps, record_sinks=record, hooks=hooks,
            progress=False,
        )  # fmt: skip

    def ratio(self, a: Callable[[], object], b: Callable[[], object]) -> Ratio:
        """A ÷ B, timed in turn."""
        with enough_memory():
            return compare("A ÷ B", a, b, 3 if self.small else 5, device=self.device)


def _layers_that_fit(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    d, mlp = LLADA_8B["d_model"], LLADA_8B["d_mlp"]
    layer, rest = 2 * (4 * d * d + 3 * d * mlp), 4 * d * LLADA_8B["vocab"]
    return max(1, min(LLADA_8B["n_layers"], int((free - SPARE - rest) / layer)))


class Works:
    """What is compared at one size."""

    def __init__(self, bench: Bench, size: Size) -> None:
        self.steps = 2 if bench.small else 8 if size.length * size.rows <= 1024 else 4
        given, five = (bench.prompt(*size), self.steps), MaskSinks(top_k=5)
        self.unwatched, self.recorded = partial(bench.run, *given, False), partial(bench.run, *given, True)
        self.uncaptured, self.uncaptured_recorded = (
            partial(_without_graphs, work) for work in (self.unwatched, self.recorded)
        )
        self.masked = partial(bench.run, *given, False, five)
        self.plain, self.published = (partial(loop, bench.plain, *given) for loop in (plain_loop, reference_loop))


def _without_graphs(run: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "DEVICES", ())
        return run()


@pytest.fixture(scope="module")
def bench(device: torch.device) -> Iterator[Bench]:
    """The compared models, kept until the end of the file."""
    release()
    yield Bench(device)
    release()


@pytest.fixture(scope="module", params=[
    pytest.param(Size(128, 1), marks=pytest.mark.small),
    *(pytest.param(Size(*each), marks=pytest.mark.large) for each in ((512, 1), (1024, 1), (4096, 1), (512, 8))),
])  # fmt: skip
def size(request: pytest.FixtureRequest) -> Size:
    """A size; all tests of one size run before the next."""
    return request.param


@pytest.fixture(scope="module")
def works(bench: Bench, size: Size) -> Works:
    """What is compared at this size."""
    return Works(bench, size)


@pytest.fixture(scope="module")
def times(bench: Bench, size: Size, works: Works) -> dict[str, list[float]]:
    """The times of the runs that the ratios compare, in turn."""
    names, rounds = ["plain", "unwatched", "recorded", "masked"], 5 if works.steps == 8 else 3
    if size.length * size.rows <= captured.POSITIONS:
        names += ["uncaptured", "uncaptured_recorded"]
    with enough_memory():
        return dict(zip(names, in_turn([getattr(works, name) for name in names], rounds, bench.device), strict=True))


@pytest.mark.figures
@pytest.mark.parametrize(("what", "a", "b", "aim"), [
    ("nothing watched ÷ plain transformers SDPA", "unwatched", "plain", 1.02),
    ("sinks recorded ÷ not recorded", "recorded", "unwatched", 1.05),
    ("MaskSinks(5) ÷ not, nothing recorded", "masked", "unwatched", 1.10),
    *(pytest.param(f"CUDA graphs ÷ none, {what}", a, b, 1.0, marks=pytest.mark.large)
      for what, a, b in (("nothing watched", "unwatched", "uncaptured"),
                         ("sinks recorded", "recorded", "uncaptured_recorded"))),
])  # fmt: skip
def test_ratios(
    what: str, a: str, b: str, aim: float, size: Size, bench: Bench, times: dict[str, list[float]],
    finding: Callable[..., None],
) -> None:  # fmt: skip
    """{what} ({size})"""
    if b not in times:
        pytest.skip("passes of this size are not captured")
    ratio = ratio_of(what, times[a], times[b])
    finding(f"{bench}; {_spread(ratio)}", value=ratio.median, aim=None if bench.small else aim)


@pytest.mark.figures
def test_roofline(
    size: Size, bench: Bench, works: Works, times: dict[str, list[float]], finding: Callable[..., None]
) -> None:
    """a recorded step ÷ what the card could do ({size})"""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "a CPU"
    card = next((one for one in CARDS.values() if one.reported in name), None)
    if card is None:
        pytest.skip(f"the peak of {name} is not in sinklens/evaluation/cards.py")
    with FlopCounterMode(display=False) as counted, enough_memory():
        works.plain()
    step = median(times["recorded"]) / works.steps
    read = sum(weight.nbytes for weight in bench.plain.parameters())
    possible = max(counted.get_total_flops() / works.steps / card.peak, read / card.bandwidth)
    finding(f"{step * 1e3:.1f} ms a step; {possible * 1e3:.1f} ms on {card.name}", value=step / possible, aim=1.67)


@pytest.mark.figures
def test_decisions(size: Size, bench: Bench, works: Works, finding: Callable[..., None]) -> None:
    """steps that the plain loop decides otherwise on the same canvas ({size})"""
    if size.length > 1024:
        pytest.skip("the logits of the smaller sizes show as much")
    found = decisions(bench.model, bench.plain, bench.prompt(*size), works.steps)
    finding(str(found), value=len(found.differing) / found.all, aim=0)


@pytest.mark.figures
def test_profile(bench: Bench, finding: Callable[..., None]) -> None:
    """milliseconds without a kernel in a recorded step, and what takes the time"""
    prompt = bench.prompt(128 if bench.small else 512, 1)
    bench.run(prompt, 1, True)
    taken = seconds(lambda: bench.run(prompt, 1, True), bench.device)
    with profile() as profiled:
        bench.run(prompt, 1, True)
        settle(bench.device)
    on_device = sorted(
        (one.time_range.start, one.time_range.end, one.name)
        for one in profiled.events() if one.device_type.name == "CUDA"
    )  # fmt: skip
    busy, gaps = sum(end - start for start, end, _ in on_device) / 1e3, Counter[str]()
    for (_, end, _), (start, _, name) in pairwise(on_device):
        gaps[name[:60]] += max(0, start - end)
    text = f"{taken * 1e3:.1f} ms, of which {len(on_device)} kernels take {busy:.1f} ms"
    text += "; longest gaps before " + ", ".join(f"{name} {gap / 1e3:.1f} ms" for name, gap in gaps.most_common(6))
    for one in sorted(profiled.key_averages(), key=lambda one: -one.self_cpu_time_total - one.self_device_time_total)[
        :12
    ]:
        text += f"; {one.key}: {one.count} calls, {one.self_cpu_time_total / 1e3:.1f} ms here, "
        text += f"{one.self_device_time_total / 1e3:.1f} ms there"
    finding(text, value=taken * 1e3 - busy if on_device else None)


def test_complete_run(size: Size, bench: Bench, works: Works, finding: Callable[..., None]) -> None:
    """complete run, sinks recorded ÷ the published procedure ({size})"""
    ratio = bench.ratio(works.recorded, works.published)
    finding(f"{bench}; {_spread(ratio)}", value=ratio.median, aim=None if bench.small else 1.0)


def _spread(ratio: Ratio) -> str:
    spread = f"{ratio.low:.2f}–{ratio.high:.2f} in {ratio.pairs} pairs"
    return f"{spread}; {ratio.a * 1e3:.1f} ms and {ratio.b * 1e3:.1f} ms"


@pytest.mark.cuda("the kernel is for CUDA devices")
def test_kernel(device: torch.device, finding: Callable[..., None]) -> None:
    """column sums of 32 heads of 128, S = 4096: plain ÷ kernel"""
    query, key = (torch.randn(1, 32, 4096, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    lse = column_sums.log_sum_exp(query, key, 0.1)
    if column_sums._kernels(query, None, False) is None:
        pytest.skip("the kernel is not used here; see the part `kernels`")
    ratio = compare(
        "plain ÷ kernel", lambda: column_sums.plain_column_sums(query, key, lse, 0.1),
        lambda: column_sums.column_sums(query, key, lse, 0.1), 7, device=device,
    )  # fmt: skip
    finding(_spread(ratio), value=ratio.median)
