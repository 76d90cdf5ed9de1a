"""Megatron-Bridge's sampler for Nemotron-Labs-Diffusion: its blocks begin with masks only, and their steps are planned.

It decodes as nemotron_diffusion.py does, with three differences: no causal pass decides a block's first token, the
steps of a run are divided evenly over its blocks and the masks of a block over its steps, and there is no early end.

Pitfall: the published defaults shift the logits by one position, which does not suit this model; its example script
turns that off, and so does this sampler.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from sinklens.families.nemotron_diffusion import CompleteBlocks
from sinklens.sampling import decisions
from sinklens.sampling.mode_steps import ModeSteps
from sinklens.sampling.sampler import require
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class NemotronDllmSettings(CompleteBlocks):
    """Nemotron-Labs-Diffusion decoded by Megatron-Bridge's ``generate_dllm``; greedy.

    Attributes:
        denoising_steps: steps of a block that fill it, at most `block_length`, the default.
        neg_entropy: accept the proposals whose distribution has the lowest entropy, not the most probable tokens.
    """

    name: ClassVar = "nemotron-dllm"
    denoising_steps: Count = 0
    neg_entropy: bool = True

    def derived(self) -> dict[str, Any]:
        """See `Sampler.derived`."""
        return super().derived() | {"denoising_steps": self.denoising_steps or self.block_length}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.denoising_steps <= self.block_length,
            f"denoising_steps {self.denoising_steps} is more than block_length {self.block_length}: each step decides "
            f"at least one position; give at most {self.block_length}.",
        )

    @property
    def steps(self) -> int:
        """Number of steps: the prompt's pass, and those of each block with its commit."""
        return 1 + self.blocks * (self.denoising_steps + 1)

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        run = ModeSteps(state, self)
        yield from run.read("prefill", range(state.prompt_length), seeds=False)
        for block in self.block_ranges(state.prompt_length):
            masked = run.masked(state.canvas, block).sum(dim=1)
            for counts in decisions.even_schedule(masked, self.denoising_steps):
                choose = partial(decisions.most_confident, counts=counts, threshold=None)
                yield from run.fill("denoise", block, choose, by_entropy=self.neg_entropy)
            yield from run.read("commit", block, seeds=False)
