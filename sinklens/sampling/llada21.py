"""LLaDA2.1's sampler: blocks from left to right, in which decided tokens may be replaced ("T2T editing").

Every pass proposes a token at each answer position of the current block, masked or not. ``denoise.hook_commit`` has the
masked positions that are decided, ``denoise.hook_edit`` the decided ones whose token is replaced. A block ends when it
has no masked position and a pass edited nothing, or after `max_post_steps` passes without masked positions. Tokens of
the prompt and of finished blocks do not change.

Where the published implementation fails, this sampler does not: if the model proposes the mask token, a block ends with
masked positions once its passes are used up (the reference never ends).

Pitfall: `unmask_step` is the step that wrote the *final* token. ``track.edited`` follows a position from step to step.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.hooks.points import at
from sinklens.sampling import decisions
from sinklens.sampling.block_cache import BlockCache
from sinklens.sampling.progress_of_blocks import BlockProgress
from sinklens.sampling.proposals import draw
from sinklens.sampling.settings_llada2 import Llada21Settings
from sinklens.sampling.state import State


def denoise(state: State, settings: Llada21Settings) -> Iterator[None]:
    """Yield before each step; when resumed, run the step on `state.canvas`."""
    progress = _EditProgress(state, settings)
    state.cache = BlockCache(state.tree) if settings.use_cache else None
    while progress.advance(state.canvas):
        yield
        _step(state, settings, progress)


def _step(state: State, settings: Llada21Settings, progress: "_EditProgress") -> None:
    canvas, block = state.begin_step(), progress.current()
    masked = (canvas == state.mask_id) & block
    progress.count_pass(masked.any(dim=1))
    drawn = draw(state, canvas, block, settings.truncation, progress.window())
    confidence = state.spread_confidence(block, decisions.probability(drawn.probs, drawn.candidates))
    commit = decisions.above_or_best(
        confidence.masked_fill(~masked, -torch.inf), [settings.num_to_transfer] * len(canvas), settings.threshold
    )
    commit = at(state.tree.denoise.hook_commit, commit)
    edits = block & ~masked & (drawn.canvas != canvas) & (confidence > settings.editing_threshold)
    edits = at(state.tree.denoise.hook_edit, edits)
    state.end_step(torch.where(commit | edits, drawn.canvas, canvas))
    progress.settle(~masked.any(dim=1) & (state.canvas == canvas).all(dim=1))


class _EditProgress(BlockProgress):
    """The current block of every row, which may get passes after its last masked position was decided."""

    def __init__(self, state: State, settings: Llada21Settings) -> None:
        rows, device = len(state.canvas), state.canvas.device
        self._budget = torch.tensor([settings.passes_with_masks, settings.max_post_steps], device=device)
        self._left = self._budget.repeat(rows, 1)  # passes with masked positions, and without
        self._settled = torch.zeros(rows, dtype=torch.bool, device=device)
        super().__init__(state, lambda masked: (), state.eos_ids if settings.stop else ())

    def _plan(self, canvas: Int[Tensor, "batch pos"], rows: Bool[Tensor, " batch"]) -> None:
        self._left[rows] = self._budget
        self._settled &= ~rows

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = ((canvas == self._mask) & self.current()).any(dim=1)
        left = torch.where(masked, self._left[:, 0], self._left[:, 1]) > 0
        return self._running & ~(left & ~self._settled)

    def count_pass(self, masked: Bool[Tensor, " batch"]) -> None:
        """Count a pass in every running row; `masked` are the rows whose block has masked positions."""
        kinds = torch.stack([masked, ~masked], dim=1)
        self._left -= (kinds & self._running[:, None]).long()

    def settle(self, rows: Bool[Tensor, " batch"]) -> None:
        """Finish the blocks of these rows, in which a pass without masked positions changed nothing."""
        self._settled |= rows & self._running
