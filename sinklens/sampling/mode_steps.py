"""Steps of a model that decodes by one rule of attention after another: each step is one pass with a mode of its own.

The text grows block by block; the first block begins where the prompt ends. *Prefill* reads the prompt, *denoise* steps
fill a block that sees the text before it and all of itself, and *commit* reads the finished block again: its keys are
those that later passes see. Prefill and commit are causal, so their last logits predict the next block's first token,
its *seed*. With `causal_context=False` they see their prompt or block in both directions and predict nothing.

With a cache, a pass computes only the columns after the text that was read; without one, all columns up to the end of
its block. The tokens are the same. A changed token among those that were read empties the cache.

Pitfall: attention of finished text does not depend on the pass that reads it. A query of a finished block never sees
later positions of its block, although its denoise steps did.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.forward_pass import Mode, PassKind
from sinklens.sampling import decisions
from sinklens.sampling.blocks import CachedBlocks
from sinklens.sampling.parts import ByConfidence
from sinklens.sampling.state import State

Choose = Callable[..., Bool[Tensor, "batch pos"]]  # (confidence, ranked=block)


@dataclass(frozen=True)
class BlocksAfterPrompt(ByConfidence, CachedBlocks):
    """Blocks that begin where the prompt ends, in a model whose attention changes from pass to pass."""

    attention: ClassVar = ("per-pass",)


class ModeSteps:
    """The steps of one run.

    Args:
        state: the run at its start.
        settings: its sampler.
        stop_ids: tokens that end a row.
        causal_context: whether attention within finished text is causal.

    Raises:
        SettingError: tokens follow the answer, which no pass would read.
    """

    def __init__(
        self, state: State, settings: BlocksAfterPrompt, stop_ids: Sequence[int] = (), causal_context: bool = True
    ) -> None:
        self._state, self._settings, self._stop_ids, self._causal = state, settings, stop_ids, causal_context
        end = state.prompt_length + settings.gen_length
        require(
            state.canvas.shape[1] == end + settings.spare(state.prompt_length),
            "an intervention puts tokens after the answer, but this sampler reads nothing that follows a block; "
            "put them before the prompt.",
        )
        self._columns = torch.arange(state.canvas.shape[1], device=state.canvas.device)
        if settings.use_cache:
            state.cache_keys()

    def ended(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        """Rows whose answer has a stop token that no masked position precedes."""
        return self._state.ends(canvas, self._stop_ids).any(dim=1)

    def masked(self, canvas: Int[Tensor, "batch pos"], block: range, draft: bool = False) -> Bool[Tensor, "batch pos"]:
        """The masked positions of a block, in rows that have not ended; a stop token of a `draft` ends none."""
        masked = (canvas == self._state.mask_id) & self.within(block)
        return masked if draft else masked & ~self.ended(canvas)[:, None]

    def cut(self, canvas: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """`canvas`, masked again after the first stop token of each answer."""
        ends = decisions.among(canvas, self._stop_ids) & (self._columns >= self._state.prompt_length)
        return canvas.masked_fill(ends.cumsum(dim=1) - ends.long() > 0, self._state.mask_id)

    def within(self, columns: range) -> Bool[Tensor, " pos"]:
        """True at these columns."""
        return (self._columns >= columns.start) & (self._columns < columns.stop)

    def kind(self, mode: Mode, block: range, adapted: bool = False) -> PassKind:
        """The kind of a pass that ends with `block`; for "prefill" the block is the prompt."""
        if not self._causal:
            start, stop, size = self._state.prompt_length, block.stop, self._settings.block_length
            return PassKind(mode, (range(start), *(range(at, at + size) for at in range(start, stop, size))), adapted)
        return PassKind(mode, (block,) if mode in ("denoise", "draft") else (), adapted)

    def begin(self, block: range, keep: int) -> Int[Tensor, "batch pos"]:
        """The canvas of a step that ends with `block` and leaves the text before `keep` as it is, for a cache."""
        return self._state.begin_step(slice(keep, block.stop), block.stop)

    def hidden(self, canvas: Int[Tensor, "batch pos"], block: range) -> Float[Tensor, "batch block d_model"]:
        """The final-norm outputs of `block`, whose columns are the last of the pass."""
        state, text = self._state, canvas[:, : block.stop]
        compute = state.tree.hidden if state.keys is None else state.keys.hidden
        return compute(text, state.real[:, : block.stop])[:, -len(block) :]

    def forget(self, keep: int) -> None:
        """Remove the cached keys from column `keep` on."""
        if self._state.keys is not None:
            self._state.keys.forget(keep)

    def read(self, mode: Mode, block: range, seeds: bool = True) -> Iterator[None]:
        """A step that reads finished text, "prefill" or "commit", and decides the token after it if it `seeds`."""
        state = self._state
        state.kind = self.kind(mode, block)
        yield
        canvas = self.begin(block, keep=block.stop)
        state.active = ~self.ended(canvas)
        where = self.masked(canvas, range(block.stop, block.stop + 1)) if seeds else torch.zeros_like(canvas).bool()
        hidden = self.hidden(canvas, block)[:, -1:]
        proposed, confidence = self.proposals(canvas, where, hidden, where.any(dim=1, keepdim=True))
        state.commit(confidence > -torch.inf, proposed)

    def fill(
        self, mode: Mode, block: range, choose: Choose, adapted: bool = False, by_entropy: bool = False
    ) -> Iterator[None]:
        """A step that proposes a token at every masked position of a block and writes those that `choose` accepts.

        Args:
            choose: a function of the confidences (−inf where nothing is proposed) and of the mask of the block, which
                returns True where the proposal is accepted.
            adapted: whether the checkpoint's adapter acts on the block.
            by_entropy: as in `proposals`.
        """
        state = self._state
        state.kind = self.kind(mode, block, adapted)
        yield
        canvas = self.begin(block, keep=block.start)
        where = self.masked(canvas, block, draft=mode == "draft")
        state.active = where.any(dim=1)
        hidden = self.hidden(canvas, block)
        proposed, confidence = self.proposals(canvas, where, hidden, where[:, block.start : block.stop], by_entropy)
        state.commit(choose(confidence, ranked=self.within(block).expand_as(where)), proposed, best_by=confidence)

    def proposals(
        self,
        canvas: Int[Tensor, "batch pos"],
        where: Bool[Tensor, "batch pos"],
        hidden: Float[Tensor, "batch window d_model"],
        in_window: Bool[Tensor, "batch window"],
        by_entropy: bool = False,
    ) -> tuple[Int[Tensor, "batch pos"], Float[Tensor, "batch pos"]]:
        """The canvas with the most likely token at every True of `where`, and the confidence of each, elsewhere −inf.

        Args:
            hidden: outputs whose logits predict these tokens, at the True positions of `in_window`.
            by_entropy: the confidence is the negative entropy of the distribution, not the token's probability.
        """
        logits = self._settings.cast(self._state, self._state.logits_of((hidden,), in_window))
        proposed, candidates = self._state.propose(where, logits.argmax(dim=-1), canvas)
        if by_entropy:
            confidence = decisions.certainty(self._settings.softmax(logits))
        else:
            confidence = self._settings.probability(logits, candidates)
        return proposed, self._state.spread_confidence(where, confidence)
