"""LLaDA2.0 and 2.1: GLM-4-MoE with block-causal attention.

The first layer is dense; all others are mixtures with a shared expert. Fused queries, keys and values are split while
the file is loaded. A config with ``use_bias: true`` is refused; without the key, the weights decide, and a stored bias
is refused. Without ``partial_rotary_factor``, half of each head is rotated, as in the published code.

LLaDA2.0's sampler: blocks from left to right, confident proposals first, with an early stop inside a block.

Every row has its own current block, as with `sdar`, from which this sampler differs in two respects: the number of
passes follows from `minimal_topk` too, and a row may end in the step that decides an end token.

Where the published implementation fails, this sampler does not: an end token of the prompt does not end the run (the
reference then returns an empty answer), and positions before the answer are never written.

Pitfall: config.json does not say whether a checkpoint is LLaDA2.0 or 2.1. The sampler of 2.0, with ``eos_early_stop``,
is the default; ``sampler="llada2.1"`` chooses the other, whose default is the quality mode of the model card.

Pitfall: an end token that was decided before its left neighbors ends the row only after the block, as in the reference.

LLaDA2.1's sampler (`llada2.1`): blocks from left to right, in which decided tokens may be replaced ("T2T editing").

Every pass proposes a token at each answer position of the current block, masked or not. ``denoise.hook_commit`` has the
masked positions that are decided, ``denoise.hook_edit`` the decided ones whose token is replaced. A block ends when it
has no masked position and a pass edited nothing, or after `max_post_steps` passes without masked positions. Tokens of
the prompt and of finished blocks do not change.

Where the published implementation fails, this sampler does not: if the model proposes the mask token, a block ends with
masked positions once its passes are used up (the reference never ends).

Pitfall: `unmask_step` is the step that wrote the *final* token. ``track.edited`` follows a position from step to step.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import Family, kept, rotation
from sinklens.sampling import decisions
from sinklens.sampling.blocks import BlockProgress, Passes, WholeBlocks
from sinklens.sampling.parts import Drawn, Truncated
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, Share


@dataclass(frozen=True)
class Llada2Settings(Drawn, Truncated, Passes, WholeBlocks):
    """LLaDA2.0's sampler (2512.15745, and the published `generate`).

    Blocks are decoded from left to right, each in at most `denoising_steps` passes. A pass accepts all proposals above
    `threshold` if these fill its share of the block; otherwise it fills the share with the most confident ones. The
    last block is always complete: up to ``block_length - 1`` positions after the answer are decided too. `top_p` and
    `top_k` apply at a temperature above 0, `top_p` to the tokens that `top_k` keeps.

    Attributes:
        denoising_steps: most passes per block, the published ``steps``; default `block_length`.
        minimal_topk: a block has at most ``gen_length // minimal_topk`` passes.
        threshold: accept all proposals with more confidence, even beyond the share of the pass.
        eos_early_stop: also end a row in the step that decides an end-of-sequence token, if no masked position
            precedes it.
    """

    name: ClassVar = "llada2"
    minimal_topk: Count = 1
    threshold: Share = 0.95
    eos_early_stop: bool = False

    def derived(self) -> dict[str, Any]:
        found, most = super().derived(), self.gen_length // self.minimal_topk
        return found | {"denoising_steps": min(found["denoising_steps"], self.block_length, most)}

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.minimal_topk <= self.gen_length,
            f"minimal_topk {self.minimal_topk} is more than gen_length {self.gen_length}, so a block would have no "
            f"pass; give at most {self.gen_length}.",
        )
        require(
            self.stop or not self.eos_early_stop,
            "eos_early_stop=True ends rows at an end-of-sequence token, which stop=False forbids; leave one of them "
            "out.",
        )

    def step(self, state: State, progress: BlockProgress) -> None:
        canvas, block, counts = state.begin_step(progress.window()), progress.current(), progress.take_counts()
        proposed, confidence = self.draw(state, canvas, (canvas == state.mask_id) & block)
        chosen = decisions.above_or_best(confidence, counts, self.threshold, progress.in_block())
        state.commit(chosen, proposed, best_by=confidence)
        if self.eos_early_stop:
            progress.end(progress.stops(state.canvas, block & (state.canvas != canvas)) & progress.ended(state.canvas))


@dataclass(frozen=True)
class Llada21Settings(Drawn, Truncated, WholeBlocks):
    """LLaDA2.1's sampler (2602.08676, and the published `generate`), which edits decided tokens.

    Every pass proposes a token at each answer position of the current block. Masked positions are decided as in
    LLaDA2.0. A decided token is replaced if another token is proposed with more confidence than `editing_threshold`. A
    block without masked positions gets up to `max_post_steps` more passes and ends when one of them edits nothing.

    The model card's quality mode is ``threshold=0.7, editing_threshold=0.5``; its speed mode is ``threshold=0.5,
    editing_threshold=0.0``. At a temperature above 0, `top_k` applies first, then `top_p` to the tokens that it keeps.

    Attributes:
        num_to_transfer: a pass decides at least this many masked positions.
        threshold: decide all masked positions whose proposal has more confidence, if these are at least
            `num_to_transfer`.
        editing_threshold: confidence above which a proposal replaces a decided token; 0 replaces every one that
            differs, 1 turns editing off.
        max_post_steps: most passes over a block without masked positions.
        stop: end a row after the block in which an end-of-sequence token appears, as the published ``eos_early_stop``;
            the answer, which ends there, is the same.
    """

    name: ClassVar = "llada2.1"
    num_to_transfer: Count = 1
    threshold: Share = 0.7
    editing_threshold: Share = 0.5
    max_post_steps: Annotated[int, Ge(0)] = 16

    @property
    def passes_with_masks(self) -> int:
        """Most passes over a block while it has masked positions."""
        return -(-self.block_length // self.num_to_transfer)

    @property
    def steps(self) -> int:
        """Largest number of steps: the passes of all blocks."""
        return self.blocks * (self.passes_with_masks + self.max_post_steps)

    def progress(self, state: State) -> BlockProgress:
        return _EditProgress(state, self)

    def step(self, state: State, progress: "_EditProgress") -> None:
        canvas, block = state.begin_step(progress.window()), progress.current()
        masked = (canvas == state.mask_id) & block
        progress.count_pass(masked.any(dim=1))
        proposed, confidence = self.draw(state, canvas, block)
        undecided, counts = confidence.masked_fill(~masked, -torch.inf), [self.num_to_transfer] * len(canvas)
        commit = decisions.above_or_best(undecided, counts, self.threshold, progress.in_block())
        state.tied = decisions.chosen_among_equals(undecided, commit)
        commit = state.through("hook_commit", commit)
        edits = block & ~masked & (proposed != canvas) & (confidence > self.editing_threshold)
        edits = state.through("hook_edit", edits)
        state.end_step(torch.where(commit | edits, proposed, canvas))
        progress.settle(~masked.any(dim=1) & (state.canvas == canvas).all(dim=1))


class _EditProgress(BlockProgress):
    """The current block of every row, which may get passes after its last masked position was decided."""

    def __init__(self, state: State, settings: Llada21Settings) -> None:
        rows, device = len(state.canvas), state.canvas.device
        self._budget = torch.tensor([settings.passes_with_masks, settings.max_post_steps], device=device)
        self._left = self._budget.repeat(rows, 1)  # passes with masked positions, and without
        self._settled = torch.zeros(rows, dtype=torch.bool, device=device)
        super().__init__(state, lambda masked: (), settings.stop_ids(state))

    def _plan(self, canvas: Int[Tensor, "batch pos"], rows: Bool[Tensor, " batch"]) -> None:
        self._left[rows] = self._budget
        self._settled &= ~rows

    def _finished(self, canvas: Int[Tensor, "batch pos"]) -> Bool[Tensor, " batch"]:
        masked = ((canvas == self._mask) & self.current()).any(dim=1)
        return self._running & ((torch.where(masked, self._left[:, 0], self._left[:, 1]) <= 0) | self._settled)

    def count_pass(self, masked: Bool[Tensor, " batch"]) -> None:
        """Count a pass in every running row; `masked` are the rows whose block has masked positions."""
        self._left -= (torch.stack([masked, ~masked], dim=1) & self._running[:, None]).long()

    def settle(self, rows: Bool[Tensor, " batch"]) -> None:
        """Finish the blocks of these rows, in which a pass without masked positions changed nothing."""
        self._settled |= rows & self._running


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """LLaDA2's config as GLM-4-MoE's.

    Keys that the published code does not read have no effect here either: the router is a sigmoid in float32 whose bias
    affects only the choice, and the weights of the chosen experts are divided by their sum.
    """
    same = ("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok", "first_k_dense_replace",
            "n_group", "topk_group", "routed_scaling_factor")  # fmt: skip
    share = config["partial_rotary_factor"]
    rotated = int(config["head_dim"] * share)
    require(
        config.get("rotary_dim") in (rotated, None),
        f"rotary_dim = {config.get('rotary_dim')!r}, but partial_rotary_factor = {share} of head_dim = "
        f"{config['head_dim']} rotates {rotated}",
        ValueError,
    )
    return {
        **kept(config),
        **{key: config[key] for key in same},
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["num_shared_experts"],
        "attention_bias": config.get("use_qkv_bias", False),
        "norm_topk_prob": config["num_experts_per_tok"] != 1,  # the weight of a single expert is not divided by itself
        "use_qk_norm": True,
        "num_mtp_layers": 0,
        "rope_parameters": rotation(config) | {"partial_rotary_factor": share},
        "partial_rotary_factor": share,
    }


FAMILIES = (
    Family(
        name="llada2",
        model_types=("llada2_moe",),
        architecture="glm4_moe",
        sampler="llada2",
        verified="logits, patterns, routing and greedy canvases of 2.0 and 2.1 equal the reference's on tiny weights",
        required={
            "hidden_act": ("silu",),
            "rope_scaling": (None,),
            "use_bias": (False,),
            "use_qk_norm": (True,),
            "use_sliding_window": (False,),
            "using_split_qkv_in_self_attention": (False,),
            "norm_topk_prob": (True,),
            "score_function": ("sigmoid",),
            "moe_router_enable_expert_bias": (True,),
            "norm_head": (False,),
            "norm_softmax": (False,),
            "use_rmsnorm": (True,),
            "router_dtype": ("fp32",),
        },
        renames={
            r"^model\.word_embeddings\.": "model.embed_tokens.",
            r"\.attention\.dense\.": ".self_attn.o_proj.",
            r"\.attention\.query_layernorm\.": ".self_attn.q_norm.",
            r"\.attention\.key_layernorm\.": ".self_attn.k_norm.",
            r"\.attention\.query_key_value\.": ".self_attn.query_key_value.",
            r"\.mlp\.gate\.expert_bias$": ".mlp.gate.e_score_correction_bias",
        },
        foreign=r"model\.(embed_tokens|layers\.\d+\.self_attn)\.",
        mask_token_id=156895,
        block_causal=True,
        block_length=32,
        block_length_key="block_size",
        convert=converted,
        needed=(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rope_theta",
            "partial_rotary_factor",
            "rms_norm_eps",
            "max_position_embeddings",
            "intermediate_size",
            "moe_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "num_shared_experts",
            "first_k_dense_replace",
            "n_group",
            "topk_group",
            "routed_scaling_factor",
        ),
        fused={"query_key_value.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight")},
        own_classes=("LLaDA2MoeModelLM",),
        defaults={"partial_rotary_factor": 0.5, "use_bias": True},
        checkpoints="LLaDA2.0 and 2.1, mini and flash",
        parameters=(16_255_638_528, 102_889_697_280),
    ),
)
SAMPLERS = (
    Llada2Settings,
    Llada21Settings,
)
