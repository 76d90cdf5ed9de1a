"""The cost of watching a network that is modulated by the noise level, at the size of mdlm-owt, duo and sedd-small."""

import statistics
from collections.abc import Callable, Iterator
from time import process_time

import torch

from benchmarks.measuring import Ratio
from sinklens.families.dit import DitConfig, DitForMaskedLM
from sinklens.hooks import HookTree, architecture_of
from sinklens.hooks.attention import attention

SMALL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "cond_dim": 128}
SMALLEST_DIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "cond_dim": 16}
TIME = 1.0


def random_dit(sizes: dict[str, int]) -> DitForMaskedLM:
    """A network with random weights; gates too, which are 0 in a new one."""
    torch.manual_seed(0)
    network = DitForMaskedLM(DitConfig(vocab_size=643, **sizes)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.02)
    return network


def modulated(name: str, sizes: dict[str, int], length: int, pairs: int) -> Iterator[Ratio]:
    """One pass with nothing watched, with all sinks, and with all patterns ÷ the plain network; CPU time."""
    plain, hooked = random_dit(sizes), random_dit(sizes)
    hooked.set_attn_implementation(attention.NAME)
    model = HookTree(hooked, architecture_of("adaln_dit"))
    ids = torch.randint(3, 640, (1, length))

    def nothing() -> torch.Tensor:
        return model.forward(ids, time=TIME)

    def watching(point: str) -> torch.Tensor:
        keep = (lambda at: at.endswith(point), lambda value, hook: None)
        return model.run_with_hooks(ids, fwd_hooks=[keep], time=TIME)

    ways = {
        "plain": lambda: plain(ids, time=TIME).logits,
        "nothing watched": nothing,
        "sink scores of all heads": lambda: watching("hook_sink_scores"),
        "patterns of all heads": lambda: watching("hook_pattern"),
    }
    with torch.no_grad():
        assert torch.allclose(nothing(), ways["plain"](), atol=1e-4), "both must compute the same"
        times = [[_spent(work) for work in ways.values()] for _ in range(pairs + 1)][1:]
    for number, what in enumerate(ways):
        if number:
            ratios = sorted(row[number] / row[0] for row in times)
            yield Ratio(
                f"{what} ÷ plain modulated network, CPU time ({name}, S = {length})", statistics.median(ratios),
                ratios[0], ratios[-1], pairs, statistics.median(row[number] for row in times),
                statistics.median(row[0] for row in times),
            )  # fmt: skip


def _spent(work: Callable[[], torch.Tensor]) -> float:
    started = process_time()
    work()
    return process_time() - started
