"""One text, read by the causal and by the denoising passes of a model that has both: what the study `modes` measures.

The text is the prompt and the finished answer of a run, cut into the complete blocks that follow the prompt.
Passes over a block read the text up to its end. In both modes, attention within the text before the block is causal, so
only the block's queries differ between the modes.

Limitation: an answer that ends within its first block has no complete block, and nothing is measured.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.families.samplers import settings_for

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

MODES = {"causal": "causal pass", "denoise": "denoising pass"}


@dataclass(frozen=True)
class BlockText:
    """The finished text of a run of one prompt.

    Attributes:
        ids: prompt and answer, without padding.
        blocks: the complete blocks of the answer.
        decided: the step that decided each position, -1 in the prompt; where several were decided together, the same.
    """

    ids: Int[Tensor, " pos"]
    blocks: tuple[range, ...]
    decided: Int[np.ndarray, " pos"]

    @classmethod
    def of(cls, run: "Generation") -> "BlockText":
        """The text of a run of one prompt, in the blocks of the run, or of the checkpoint if it has none."""
        assert run.sinks is not None, "runs of a study record sinks"
        real, start = run.real[0], int(run.real[0, : run.prompt_length].sum())
        undecided = run.undecided[0, -1][real]
        length = int(undecided.long().argmax()) if bool(undecided.any()) else len(undecided)
        size = (settings_for(run.model, {}) if run.causal else run.settings).positions_per_block
        stop = start + (length - start) // size * size
        ids, decided = run.tokens[0][real][:stop], run.sinks["unmask_step"].to_numpy()[0][real.numpy()[: len(real)]]
        return cls(ids, tuple(range(at, at + size) for at in range(start, stop, size)), decided[:stop])

    def random(self, seed: int) -> np.random.Generator:
        """Random numbers that depend on the seed and the text alone."""
        digest = hashlib.sha256(repr(self.ids.tolist()).encode()).digest()
        return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


def in_pass(mode: str, block: range) -> dict[str, Any]:
    """The arguments of a pass of `mode` over the text up to the end of a block."""
    return {"mode": mode, "block_start": block.start if mode == "denoise" else None}


def patterns(
    model: "Model", ids: Int[Tensor, "row pos"], mode: str, block: range, queries: range | None = None
) -> Float[Tensor, "row layer head query pos"]:
    """The attention of some queries, by default those of the block, in one pass."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    _, cache = model.tree.run_with_cache(ids.to(model.cfg.device), names_filter=names, **in_pass(mode, block))
    chosen = queries or block
    return torch.stack([cache[name][:, :, chosen.start : chosen.stop].float().cpu() for name in names], dim=1)


def scaled(sums: Float[Tensor, "... key"]) -> Float[Tensor, "... key"]:
    """Sums of attention, scaled to a mean of 1 over the keys, so that a threshold has one meaning for all passes."""
    return sums / sums.mean(dim=-1, keepdim=True).clamp_min(1e-12)


def sinks(score: Float[Tensor, "... key"], epsilon: float) -> Tensor:
    """True where a `scaled` score is more than epsilon above the mean of the other keys."""
    others = (score.sum(dim=-1, keepdim=True) - score) / max(1, score.shape[-1] - 1)
    return score - others > epsilon


def mean_of(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN without one."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")
