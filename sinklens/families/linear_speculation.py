"""Self-speculation: a model drafts a block by diffusion and verifies it from left to right, with the same weights.

A cycle begins with one decided token. *Draft* steps fill the rest of the block, which sees the text before it and all
of itself. The *verify* step reads the draft causally. Its most likely tokens are taken as long as they agree with the
draft, and the first one that does not is taken too; the next cycle begins with the last token that was taken. Every
token is therefore the one that decoding from left to right would have chosen, and the text is the same.

``denoise.hook_draft`` is the block after each draft step, ``denoise.hook_verify`` the tokens that the verify step finds
after each position of the block, and ``denoise.hook_accepted_length`` how many of them are taken. The checkpoint's
adapter, if it has one, acts on the block of draft steps only.

Pitfall: a run may decide up to ``block_length - 1`` positions after the answer. They are part of ``run.tokens``, not of
the answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import HookFunctionError, PromptError, ReadOnlyHookError
from sinklens.sampling import decisions
from sinklens.sampling.mode_steps import BlocksAfterPrompt, ModeSteps
from sinklens.utils.arguments import Share

if TYPE_CHECKING:
    from sinklens.sampling.state import State


@dataclass(frozen=True)
class LinearSpeculationSettings(BlocksAfterPrompt):
    """Nemotron-Labs-Diffusion's self-speculation (``linear_spec_generate`` of its hub page); greedy, one prompt.

    Attributes:
        draft_threshold: 0 drafts a block in one step. Above 0, draft steps accept the most confident proposal and every
            one with at least this probability, until the block is full.
        stop: end a row at its first end-of-sequence token; later positions stay masked.
        use_adapter: use the checkpoint's adapter in draft steps, if it has one.
    """

    name: ClassVar = "linear-speculation"
    later_points: ClassVar = ("denoise.hook_draft", "denoise.hook_verify", "denoise.hook_accepted_length")
    draft_threshold: Share = 0.0
    stop: bool = True
    use_adapter: bool = True

    @property
    def steps(self) -> int:
        """Largest number of steps: the prompt's pass, and cycles that take a single token each."""
        drafts = 1 if self.draft_threshold == 0 else self.block_length
        return 1 + (self.gen_length - 1) * (drafts + 1)

    def fitted(self, prompt_lengths: Sequence[int]) -> "LinearSpeculationSettings":
        """These settings.

        Raises:
            PromptError: there are several prompts, whose blocks would begin at different places.
        """
        if len(prompt_lengths) > 1:
            raise PromptError(
                f"the {self.name} sampler takes one prompt, because each row's next block begins where its own draft "
                f"was rejected; got {len(prompt_lengths)}. Run them one by one."
            )
        return self

    def spare(self, prompt_length: int) -> int:
        """The positions that the last cycle may decide beyond the answer."""
        return self.block_length - 1

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        run = ModeSteps(state, self, state.eos_ids if self.stop else ())
        yield from run.read("prefill", range(state.prompt_length))
        start, end = state.prompt_length, state.prompt_length + self.gen_length
        while start < end - 1 and not bool(run.ended(state.canvas).all()):
            block = range(start, start + self.block_length)
            yield from self._draft(state, run, block)
            accepted: list[int] = []
            yield from self._verify(state, run, block, accepted)
            start = _last_decided(state) if state.replay is not None else start + accepted[0]
            run.forget(start)

    def _draft(self, state: "State", run: ModeSteps, block: range) -> Iterator[None]:
        """The draft steps of a block."""
        adapted = self.use_adapter and state.tree.adapter is not None
        for _ in range(1 if self.draft_threshold == 0 else self.block_length):
            if not bool(run.masked(state.canvas, block).any()):
                return
            yield from run.fill("draft", block, self._choose, adapted)
            draft = state.canvas[:, block.start : block.stop]
            state.canvas = state.canvas.clone()
            state.canvas[:, block.start : block.stop] = state.ids_at(state.tree.denoise.hook_draft, draft.clone())

    def _choose(self, confidence: Float[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        if self.draft_threshold == 0:
            return confidence > -torch.inf
        return decisions.most_confident(confidence, [1] * len(confidence), self.draft_threshold)

    def _verify(self, state: "State", run: ModeSteps, block: range, accepted: list[int]) -> Iterator[None]:
        """The step that reads a draft and takes what agrees; appends how many tokens it took."""
        state.kind = run.kind("verify", block)
        yield
        canvas = run.begin(block, keep=block.stop)
        hidden = run.hidden(canvas, block)
        everywhere = torch.ones(hidden.shape[:2], dtype=torch.bool, device=canvas.device)
        best = state.logits_of((hidden,), everywhere).argmax(dim=-1)[None]
        best = state.ids_at(state.tree.denoise.hook_verify, best)
        accepted.append(_accepted(state, canvas[:, block.start : block.stop], best))
        taken = range(block.start + 1, block.start + 1 + accepted[0])
        left = canvas.clone()
        left[:, taken.start :] = state.mask_id
        left[:, taken.start : taken.stop] = best[:, : len(taken)]
        commit = run.within(taken)[None]
        if not torch.equal(state.through("hook_commit", commit.clone()), commit):
            raise ReadOnlyHookError(
                "denoise.hook_commit of a verify step follows from how much of the draft agrees, so an edit of it is "
                "lost. Edit denoise.hook_accepted_length or denoise.hook_verify."
            )
        state.end_step(run.cut(left))


def _accepted(state: "State", draft: Int[Tensor, "1 block"], best: Int[Tensor, "1 block"]) -> int:
    """How many of the tokens `best` are taken: those that agree with the draft one place later, and one more."""
    agreed = (best[:, :-1] == draft[:, 1:]).long().cumprod(dim=1).sum(dim=1) + 1
    taken = int(state.through("hook_accepted_length", agreed)[0])
    if not 1 <= taken <= draft.shape[1]:
        raise HookFunctionError(
            f"a hook or trace block wrote {taken} at denoise.hook_accepted_length; a verify step takes 1 to "
            f"{draft.shape[1]} tokens."
        )
    return taken


def _last_decided(state: "State") -> int:
    """The last column that holds a token."""
    return int((state.canvas[0] != state.mask_id).nonzero()[-1])
