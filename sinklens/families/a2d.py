"""dLLM's converted Llama and Qwen: trained by masked diffusion (decoded as LLaDA) or by block diffusion (BD3LM).

Their ``model_type`` (a2d-llama, a2d-qwen2, a2d-qwen3) does not say how they were trained, so they are refused without a
choice: ``family="a2d-qwen3"``, or ``family="bd3lm-qwen3"`` with ``block_length=``. Without ``family=``,
``block_length=`` chooses block diffusion. OPDLM is ``load(..., family="bd3lm-qwen3", block_length=4)``; it was not
compared separately. Models trained by masked diffusion are decoded with `llada`.

dLLM's sampler for block diffusion (`bd3lm`): blocks from left to right, on a float32 schedule.

Prompts are padded on the left to a whole number of blocks, so a block never holds prompt and answer; the last block may
be shorter. Within a block, the sampler is LLaDA's with another schedule (`decisions.linear_schedule`).

Where the published implementation depends on the batch or on accidental tokens, this sampler does not: a row whose
finished block contains an end token ends there (the reference continues it until all rows have ended), and a generated
padding token is an ordinary token (the reference hides it from the next block on).

`bd3lm-card` is the sampler in the model card of dLLM's BD3LM checkpoints: blocks that begin inside the prompt's last
block.

Blocks are counted from a row's first token, so the first one completes the prompt's last block. While it is decoded,
the prompt tokens in it do not see the answer (`Blocks.sealed`), because the model card's code computes their keys
before it and keeps them; once the block is finished, they do. Each block's positions are divided evenly among its
passes, earlier passes taking the remainder. A row ends in the step in which an end token appears.

Rows are independent, and prompts are padded on the left. The model card's code pads on the right and counts blocks by
columns, so there a shorter row depends on the longest one; and it continues rows that have ended until all have.

Limitation: a single pass of the model over a canvas of the first block lets the prompt see the answer, so its logits
differ from those of the run.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from sinklens.families.base import QWEN_REQUIRED, ROTATION, THETA, VERIFIED, Family
from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, Blockwise, Passes
from sinklens.sampling.parts import Guided, Steps
from sinklens.sampling.state import State

MASKED_DIFFUSION = "trained by masked diffusion (mdlm)"
BLOCK_DIFFUSION = "trained by block diffusion (bd3lm), with the block_length= that the card names, 32 by default"


@dataclass(frozen=True)
class Bd3lmSettings(Guided, Blockwise, Steps):
    """The sampler of dLLM for block diffusion (BD3LM; Arriola et al., 2503.09573, and dLLM's code).

    Attributes:
        gen_length: number of answer positions; the last block may be shorter than the others.
        steps: denoising steps of the complete generation; default `gen_length`. Rounded up to a multiple of the number
            of blocks; steps that would decide no position are left out.
        right_shift_logits: logits at i predict the token at i + 1, for models trained to do so.
    """

    name: ClassVar = "bd3lm"
    right_shift_logits: bool = False

    def derived(self) -> dict[str, Any]:
        found, blocks = super().derived(), -(-self.gen_length // self.block_length)
        return found | {"steps": blocks * -(-found["steps"] // blocks)}

    @property
    def steps_per_block(self) -> int:
        """Denoising steps of a block, before those that decide no position are left out."""
        return self.steps // -(-self.gen_length // self.block_length)

    def lead(self, columns: int) -> int:
        """The columns that complete the prompts' first block."""
        return -columns % self.block_length

    def progress(self, state: State) -> BlockProgress:
        state.shift = state.shift or self.right_shift_logits
        schedule = partial(decisions.linear_schedule, steps=self.steps_per_block)
        return BlockProgress(state, schedule, self.stop_ids(state))

    def step(self, state: State, progress: BlockProgress) -> None:
        canvas, counts = state.begin_step(progress.window()), progress.take_counts()
        where = (canvas == state.mask_id) & progress.current()
        proposed, confidence = self.propose(state, canvas, where, state.logits(canvas, where, self.cfg_scale))
        chosen = decisions.most_confident(confidence, counts, None, progress.in_block())
        state.commit(chosen, proposed, best_by=confidence)


@dataclass(frozen=True)
class Bd3lmCardSettings(Guided, Passes):
    """The sampler in the model card of dLLM's BD3LM checkpoints, which differs from dLLM's own.

    The first block completes the prompt's last one; the last block may be shorter than the others.

    Attributes:
        denoising_steps: most passes per block, the published ``steps`` divided among the blocks of `gen_length`;
            default `block_length`. Each decides its share of the block's masked positions.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 turns it off. The unconditional rows
            have masks in place of the prompt and of finished blocks.
        stop: end a row in the step that decides an end-of-sequence token; positions may stay masked, also before it.
    """

    name: ClassVar = "bd3lm-card"

    def progress(self, state: State) -> BlockProgress:
        return BlockProgress(
            state,
            lambda masked: [count for count in self.even_shares(masked) if count],
            self.stop_ids(state),
            blocks=Blocks(self.block_length, "token"),
        )

    def step(self, state: State, progress: BlockProgress) -> None:
        block, counts, start = progress.current(), progress.take_counts(), state.prompt_length
        sealed = tuple(start if here else 0 for here in block[:, start].tolist())
        rule = Blocks(self.block_length, "token", sealed)
        with ruled_by(state.tree.hf.config, rule):  # a hook on the canvas may run another pass
            canvas = state.begin_step(progress.window())
            where = (canvas == state.mask_id) & block
            logits = state.logits(canvas, where, self.cfg_scale, given=~block & (canvas != state.mask_id))
        proposed, confidence = self.propose(state, canvas, where, logits)
        chosen = decisions.most_confident(confidence, counts, None, progress.in_block())
        state.commit(chosen, proposed, best_by=confidence)
        progress.end(progress.stops(state.canvas, block))


FAMILIES = (
    Family(
        name="a2d-llama",
        model_types=("a2d-llama",),
        architecture="llama",
        sampler="llada",
        verified="architecture equals transformers' Llama without the causal mask; no reference outputs compared",
        required=ROTATION,
        needed=THETA,
        regime=MASKED_DIFFUSION,
        own_classes=("A2DLlamaLMHeadModel",),
        checkpoints="Llama that dLLM adapted to masked diffusion",
    ),
    Family(
        name="bd3lm-llama",
        model_types=("a2d-llama",),
        architecture="llama",
        sampler="bd3lm",
        verified="architecture equals transformers' Llama with the block-causal mask; no reference outputs compared",
        required={**ROTATION, "rope_scaling": (None,)},
        needed=THETA,
        block_causal=True,
        block_length_key="block_size",
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DLlamaLMHeadModel",),
        checkpoints="Llama that dLLM adapted to block diffusion (BD3LM)",
    ),
    Family(
        name="a2d-qwen2",
        model_types=("a2d-qwen2",),
        architecture="qwen2",
        sampler="llada",
        verified="architecture equals transformers' Qwen2 without the causal mask; no reference outputs compared",
        required={**ROTATION, "use_sliding_window": (False,)},
        needed=THETA,
        regime=MASKED_DIFFUSION,
        own_classes=("A2DQwen2LMHeadModel",),
        checkpoints="Qwen2 that dLLM adapted to masked diffusion",
    ),
    Family(
        name="bd3lm-qwen2",
        model_types=("a2d-qwen2",),
        architecture="qwen2",
        sampler="bd3lm",
        verified="architecture equals transformers' Qwen2 with the block-causal mask; no reference outputs compared",
        required=QWEN_REQUIRED,
        needed=THETA,
        block_causal=True,
        block_length_key="block_size",
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DQwen2LMHeadModel",),
        checkpoints="Qwen2.5 that dLLM adapted to block diffusion (BD3LM)",
    ),
    Family(
        name="a2d-qwen3",
        model_types=("a2d-qwen3",),
        architecture="qwen3",
        sampler="llada",
        verified="architecture equals transformers' Qwen3 without the causal mask; no reference outputs compared",
        required={**ROTATION, "use_sliding_window": (False,)},
        needed=THETA,
        regime=MASKED_DIFFUSION,
        own_classes=("A2DQwen3LMHeadModel",),
        checkpoints="Qwen3 that dLLM adapted to masked diffusion",
    ),
    Family(
        name="bd3lm-qwen3",
        model_types=("a2d-qwen3",),
        architecture="qwen3",
        sampler="bd3lm",
        verified=VERIFIED,
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        needed=THETA,
        block_causal=True,
        block_length_key="block_size",
        blocks_start="column",
        regime=BLOCK_DIFFUSION,
        own_classes=("A2DQwen3LMHeadModel",),
        checkpoints="Qwen3 that dLLM adapted to block diffusion (BD3LM), OPDLM",
        parameters=(596_049_920,),
    ),
)
SAMPLERS = (
    Bd3lmSettings,
    Bd3lmCardSettings,
)
