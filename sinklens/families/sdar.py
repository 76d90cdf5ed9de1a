"""SDAR: Qwen3 and Qwen3-MoE with block-causal attention.

Checkpoints often give the block length only in their name: pass ``block_length=``. With experts, config.json names
neither the mask token nor the block length: the token is the tokenizer's ``<|MASK|>``, or ``mask_token_id=``, and
blocks have 4 positions unless ``block_length=`` says otherwise. TraDo and DiRL have SDAR's format and were not compared
separately.

SDAR's sampler: blocks from left to right, each filled by a few passes under block-causal attention.

Every row has its own current block, counted from its first token, and moves to the next one as soon as no position of
the block is masked, or after ``denoising_steps`` passes. Rows therefore do not wait for each other, and a row's
canvases are the same as in a run of that row alone. Only complete blocks are decided, as in the reference.

There are three published implementations, generate.py, JetEngine and OpenCompass, and the stored runs are of all three.
``confidence_of="draw"`` (the default) follows the first two, ``"model"`` the third. ``entropy_bounded``, which fails in
generate.py, is JetEngine's.

Where the published implementations fail, this sampler does not. Only masked positions are ever written (generate.py and
JetEngine overwrite prompt and decided tokens if fewer masks are left than the pass would decide). A position whose
proposal is the mask token stays masked (generate.py raises an IndexError).

Pitfall: a finished block is not decided again. A position of it that a hook masks again stays masked.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import QWEN_REQUIRED, THETA, VERIFIED, VERIFIED_WITH_ROUTING, Family
from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, Passes, WholeBlocks
from sinklens.sampling.parts import Drawn, Truncated
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, Positive, Share


@dataclass(frozen=True)
class SdarSettings(Drawn, Truncated, Passes, WholeBlocks):
    """SDAR's sampler (Cheng et al., 2510.06303), which has three published implementations.

    Blocks are decoded from left to right. The first one may begin with prompt tokens; the last one is always complete,
    so up to ``block_length - 1`` positions after the answer are decided too: they are part of ``run.tokens``, not of
    the answer.

    Attributes:
        remasking_strategy: which proposals a pass accepts: "sequential", the leftmost; "low_confidence_static", the
            most confident; "low_confidence_dynamic", all above `threshold` if these are at least the share;
            "entropy_bounded", those of lowest entropy whose sum stays below `eb_threshold`, at least one.
        threshold: confidence of "low_confidence_dynamic".
        eb_threshold: entropy of "entropy_bounded", in nats.
        confidence_of: the confidence of a proposal is its probability in the distribution it was drawn from, "draw"
            (generate.py, JetEngine), or without temperature, `top_p` and `top_k`, "model" (OpenCompass).
    """

    name: ClassVar = "sdar"
    TRUNCATES_GREEDY: ClassVar = True
    block_length: Count = 4
    remasking_strategy: Literal["sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"] = (
        "low_confidence_dynamic"
    )
    threshold: Share = 0.85
    eb_threshold: Positive = 0.35
    confidence_of: Literal["draw", "model"] = "draw"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.denoising_steps <= self.block_length,
            f"denoising_steps {self.denoising_steps} is more than block_length {self.block_length}: each pass decides "
            f"at least one position; give at most {self.block_length}.",
        )

    def step(self, state: State, progress: BlockProgress) -> None:
        canvas, block, counts = state.begin_step(progress.window()), progress.current(), progress.take_counts()
        where = (canvas == state.mask_id) & block
        proposed, confidence = self.draw(state, canvas, where)
        ranking = None if self.remasking_strategy == "sequential" else confidence
        state.commit(self._chosen(where, confidence, counts, progress.in_block()), proposed, best_by=ranking)

    def confidence(self, state: State, logits: Tensor, probs: Tensor, candidates: Tensor) -> Float[Tensor, " masked"]:
        """The confidence by `remasking_strategy` and `confidence_of`."""
        if self.remasking_strategy == "entropy_bounded":
            return decisions.clamped_negative_entropy(probs)
        if self.confidence_of == "model":
            return self.probability(logits, candidates)
        return decisions.probability(probs, candidates)

    def _chosen(
        self,
        where: Bool[Tensor, "batch pos"],
        confidence: Float[Tensor, "batch pos"],
        counts: list[int],
        block: Bool[Tensor, "batch pos"],
    ) -> Bool[Tensor, "batch pos"]:
        if self.remasking_strategy == "sequential":
            return decisions.leftmost(where, counts)
        if self.remasking_strategy == "entropy_bounded":
            return decisions.within_entropy(confidence, self.eb_threshold)
        if self.remasking_strategy == "low_confidence_static":
            return decisions.most_confident(confidence, counts, None, block)
        return decisions.above_or_best(confidence, counts, self.threshold, block)


FAMILIES = (
    Family(
        name="sdar",
        model_types=("sdar",),
        architecture="qwen3",
        sampler="sdar",
        verified=VERIFIED,
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        needed=THETA,
        mask_token_id=151669,
        block_causal=True,
        block_length_key="block_size",
        dropped=("attn_implementation", "use_cache"),
        own_classes=("SDARForCausalLM",),
        checkpoints="SDAR, TraDo and DiRL (dense)",
        parameters=(8_190_735_360,),
    ),
    Family(
        name="sdar-moe",
        model_types=("sdar_moe",),
        architecture="qwen3_moe",
        sampler="sdar",
        verified=VERIFIED_WITH_ROUTING,
        required={**QWEN_REQUIRED, "attention_bias": (False,)},
        needed=THETA,
        block_causal=True,
        block_length=4,
        block_length_key="block_size",
        own_classes=("SDARMoeForCausalLM",),
        checkpoints="SDAR-30B-A3B-Chat, -Sci (experts)",
        parameters=(30_532_122_624,),
    ),
)
SAMPLERS = (SdarSettings,)
