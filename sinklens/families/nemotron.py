"""Nemotron-Labs-Diffusion: Ministral3, with an attention that changes from pass to pass.

One network decodes from left to right, by diffusion in blocks, or by drafting and verifying (``mode=``).

- The reference outputs come from the authors' own samplers, run unchanged (``generate``, ``ar_generate`` and
  ``linear_spec_generate`` of the hub page, and Megatron-Bridge's ``generate_dllm``). **The network that they ran on is
  a reconstruction**: the hub's backbone file was not available, and transformers' Ministral3 with switches for its
  attention took its place. Megatron-Bridge's own inference attention gives the same logits bit for bit. Agreement with
  the published backbone itself was not checked.
- In one stored run, the reference ends a block for all rows of a batch because one of them has ended, and leaves masks
  in the others. Here, a row is decoded as if it were alone. All other runs agree.
- YaRN's factor is the config's ``factor``, which may be below 1 (3B-Base; transformers warns), and queries are scaled
  after the rotation; `hook_rot_q` shows them scaled. The keys ``attn_implementation`` and ``use_cache`` are dropped.
- The samplers are greedy. Temperatures, the thinking budget and quadratic speculation are not available.
- vLLM and SGLang decode by other rules, so their texts can differ. sinklens has no options for these rules, since no
  runs of theirs are stored to compare with.
- Vision variants (``nemotron_labs_diffusion_vlm``) are refused, and so are checkpoints of other training paradigms
  (``dlm_paradigm``), other rotations, and adapters on queries, keys or values.
- The full-size models were built from the sizes given in a public walkthrough of the 8B config and in the model card.
  The 14B's config was not read.

Nemotron-Labs-Diffusion's sampler: blocks after the prompt, each denoised and then committed by a causal pass.

Every step is one pass. Step 0 reads the prompt and decides the first token of the first block. The steps of a block
each accept the most confident proposal, and with a `threshold` all others that reach it. When nothing in the block is
masked, or after ``block_length`` steps, a causal pass commits the block and decides the first token of the next one.

Rows do not wait for the end of another row. A proposed mask token stays masked and is tried again.

Pitfall: the block in which a row ends may keep masks after its end token, and its commit reads them.

Self-speculation (`linear-speculation`): a model drafts a block by diffusion and verifies it from left to right, with
the same weights.

A cycle begins with one decided token. *Draft* steps fill the rest of the block, which sees the text before it and all
of itself. The *verify* step reads the draft causally. Its most likely tokens are taken as long as they agree with the
draft, and the first one that does not is taken too; the next cycle begins with the last token that was taken. Every
token is therefore the one that decoding from left to right would have chosen, and the text is the same.

``denoise.hook_draft`` is the block after each draft step, ``denoise.hook_verify`` the tokens that the verify step finds
after each position of the block, and ``denoise.hook_accepted_length`` how many of them are taken. The checkpoint's
adapter, if it has one, acts on the block of draft steps only.

Public copies of the published file draft in two ways, and none says which is newer. This follows the one whose draft
steps go on until the block is full, whatever end tokens they propose. The other drafts in one step and fails where no
proposal is above its threshold.

Speculation takes one prompt.

Pitfall: a run may decide up to ``block_length - 1`` positions after the answer. They are part of ``run.tokens``, not of
the answer.

`nemotron-dllm` is Megatron-Bridge's sampler: its blocks begin with masks only, and their steps are planned.

It decodes as `nemotron-diffusion` does, with three differences: no causal pass decides a block's first token, the steps
of a run are divided evenly over its blocks and the masks of a block over its steps, and there is no early end.

Pitfall: the published defaults shift the logits by one position, which does not suit this model; its example script
turns that off, and so does this sampler.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import HookFunctionError, PromptError, ReadOnlyHookError, require
from sinklens.families.base import Family, kept
from sinklens.sampling import decisions
from sinklens.sampling.mode_steps import BlocksAfterPrompt, ModeSteps
from sinklens.sampling.parts import multiples
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count, Share


@dataclass(frozen=True)
class CompleteBlocks(BlocksAfterPrompt):
    """An answer of complete blocks.

    Attributes:
        gen_length: number of answer positions, a multiple of `block_length`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.gen_length % self.block_length == 0,
            f"gen_length {self.gen_length} is not a multiple of block_length {self.block_length}, and only complete "
            f"blocks are generated; choose {multiples(self.gen_length, self.block_length)}, or another block_length.",
        )

    def block_ranges(self, prompt_length: int) -> list[range]:
        """The columns of each block."""
        columns = range(prompt_length, prompt_length + self.gen_length)
        return [columns[first : first + self.block_length] for first in range(0, self.gen_length, self.block_length)]


@dataclass(frozen=True)
class NemotronDiffusionSettings(CompleteBlocks):
    """Nemotron-Labs-Diffusion's block diffusion (``generate`` of its hub page; greedy).

    Attributes:
        threshold: in addition to the most confident proposal, accept every one with at least this probability; None
            accepts one per step. The model card uses 0.9.
        causal_context: attention within finished text is causal, and the last of its logits decide the first token of a
            block. False lets the prompt, and each finished block, attend in both directions.
        stop: end a row after the block with its first end-of-sequence token; the tokens after it are not part of the
            answer, and later blocks stay masked.
    """

    name: ClassVar = "nemotron-diffusion"
    threshold: Share | None = None
    causal_context: bool = True
    stop: bool = True

    @property
    def steps(self) -> int:
        """Largest number of steps: the prompt's pass, and those of each block with its commit."""
        return 1 + self.gen_length // self.block_length * (self.block_length + 1)

    def denoise(self, state: State) -> Iterator[None]:
        run = ModeSteps(state, self, state.eos_ids if self.stop else (), self.causal_context)
        yield from run.read("prefill", range(state.prompt_length), seeds=self.causal_context)
        for block in self.block_ranges(state.prompt_length):
            for counts in decisions.even_schedule(run.masked(state.canvas, block).sum(dim=1), self.block_length):
                if not bool(run.masked(state.canvas, block).any()):
                    break
                least = counts if self.threshold is None else [1] * len(counts)
                yield from run.fill(
                    "denoise", block, partial(decisions.most_confident, counts=least, threshold=self.threshold)
                )
            yield from run.read("commit", block, seeds=self.causal_context)
            if bool(run.ended(state.canvas).all()):
                return


@dataclass(frozen=True)
class LinearSpeculationSettings(BlocksAfterPrompt):
    """Nemotron-Labs-Diffusion's self-speculation (``linear_spec_generate`` of its hub page); greedy, one prompt.

    Attributes:
        draft_threshold: 0 drafts a block in one step. Above 0, draft steps accept the most confident proposal and every
            one with at least this probability, until the block is full; a drafted end token does not stop them.
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
        return 1 + (self.gen_length - 1) * (1 + (1 if self.draft_threshold == 0 else self.block_length))

    def fitted(self, prompt_lengths: Sequence[int]) -> "LinearSpeculationSettings":
        """These settings.

        Raises:
            PromptError: there are several prompts, whose blocks would begin at different places.
        """
        require(
            len(prompt_lengths) <= 1,
            f"the {self.name} sampler takes one prompt, because each row's next block begins where its own draft "
            f"was rejected; got {len(prompt_lengths)}. Run them one by one.",
            PromptError,
        )
        return self

    def spare(self, prompt_length: int) -> int:
        """The positions that the last cycle may decide beyond the answer."""
        return self.block_length - 1

    def denoise(self, state: State) -> Iterator[None]:
        run = ModeSteps(state, self, state.eos_ids if self.stop else ())
        yield from run.read("prefill", range(state.prompt_length))
        start, end = state.prompt_length, state.prompt_length + self.gen_length
        while start < end - 1 and not bool(run.ended(state.canvas).all()):
            block = range(start, start + self.block_length)
            yield from self._draft(state, run, block)
            taken = yield from self._verify(state, run, block)
            decided = (state.canvas[0] != state.mask_id).nonzero()
            start = int(decided[-1]) if state.replay is not None else start + taken
            run.forget(start)

    def _draft(self, state: State, run: ModeSteps, block: range) -> Iterator[None]:
        """The draft steps of a block."""
        adapted = self.use_adapter and state.tree.adapter is not None
        for _ in range(1 if self.draft_threshold == 0 else self.block_length):
            if not bool(run.masked(state.canvas, block, draft=True).any()):
                return
            yield from run.fill("draft", block, self._choose, adapted)
            draft = state.canvas[:, block.start : block.stop]
            state.canvas = state.canvas.clone()
            state.canvas[:, block.start : block.stop] = state.ids_at(state.tree.denoise.hook_draft, draft.clone())

    def _choose(self, confidence: Float[Tensor, "batch pos"], ranked: Bool[Tensor, "batch pos"]) -> Tensor:
        if self.draft_threshold == 0:
            return confidence > -torch.inf
        return decisions.leftmost_best(confidence, [1] * len(confidence)) | (confidence >= self.draft_threshold)

    def _verify(self, state: State, run: ModeSteps, block: range) -> Generator[None, None, int]:
        """The step that reads a draft and takes what agrees; returns how many tokens it took."""
        state.kind = run.kind("verify", block)
        yield
        canvas = run.begin(block, keep=block.stop)
        hidden = run.hidden(canvas, block)
        everywhere = torch.ones(hidden.shape[:2], dtype=torch.bool, device=canvas.device)
        best = state.logits_of((hidden,), everywhere).argmax(dim=-1)[None]
        best = state.ids_at(state.tree.denoise.hook_verify, best)
        draft = canvas[:, block.start : block.stop]
        agreed = (best[:, :-1] == draft[:, 1:]).long().cumprod(dim=1).sum(dim=1) + 1
        number = int(state.through("hook_accepted_length", agreed)[0])
        require(
            1 <= number <= draft.shape[1],
            f"a hook or trace block wrote {number} at denoise.hook_accepted_length; a verify step takes 1 to "
            f"{draft.shape[1]} tokens.",
            HookFunctionError,
        )
        taken = range(block.start + 1, block.start + 1 + number)
        left = canvas.clone()
        left[:, taken.start :] = state.mask_id
        left[:, taken.start : taken.stop] = best[:, : len(taken)]
        commit = run.within(taken)[None]
        require(
            torch.equal(state.through("hook_commit", commit.clone()), commit),
            "denoise.hook_commit of a verify step follows from how much of the draft agrees, so an edit of it is "
            "lost. Edit denoise.hook_accepted_length or denoise.hook_verify.",
            ReadOnlyHookError,
        )
        state.end_step(run.cut(left))
        return number


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
        return 1 + self.gen_length // self.block_length * (self.denoising_steps + 1)

    def denoise(self, state: State) -> Iterator[None]:
        run = ModeSteps(state, self)
        yield from run.read("prefill", range(state.prompt_length), seeds=False)
        for block in self.block_ranges(state.prompt_length):
            for counts in decisions.even_schedule(run.masked(state.canvas, block).sum(dim=1), self.denoising_steps):
                yield from run.fill(
                    "denoise",
                    block,
                    partial(decisions.most_confident, counts=counts, threshold=None),
                    by_entropy=self.neg_entropy,
                )
            yield from run.read("commit", block, seeds=False)


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """Nemotron-Labs-Diffusion's config as Ministral3's, whose keys it uses.

    The rotation stays as it is: YaRN, whose factor may be below 1, and the scale that queries get after it. The keys
    ``attn_implementation`` and ``use_cache`` are the checkpoint's own code's, and those of the losses are of training.
    """
    return {
        **kept(config),
        **{key: config[key] for key in ("head_dim", "intermediate_size")},
        "sliding_window": None,
        "rope_parameters": {**config["rope_scaling"], "rope_theta": float(config["rope_theta"])},
    }


FAMILIES = (
    Family(
        name="nemotron-diffusion",
        model_types=("nemotron_labs_diffusion",),
        architecture="ministral3",
        sampler="nemotron-diffusion",
        verified="logits, patterns, greedy canvases, drafts and accepted lengths equal the authors' samplers on "
        "a reconstructed backbone with tiny weights",
        required={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "sliding_window": (None,),
            "partial_rotary_factor": (1, None),
            "rope_scaling.rope_type": ("yarn",),
            "dlm_paradigm": ("bidirectional",),
            "dlm_type": ("llada", None),
        },
        foreign=r"(model|lm_head)\.",
        renames={r"^encoder\.": "model.", r"^diffusion_head\.": "lm_head."},
        mask_token_id=100,
        own_classes=("NemotronLabsDiffusionModel",),
        convert=converted,
        needed=(
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_theta",
            "rope_scaling.rope_type",
            "rope_scaling.factor",
            "rope_scaling.original_max_position_embeddings",
            "rope_scaling.llama_4_scaling_beta",
        ),
        config_settings={"block_size": "block_length"},
        modes={
            "autoregressive": "autoregressive",
            "diffusion": "nemotron-diffusion",
            "speculation": "linear-speculation",
        },
        adapter="linear_spec_lora",
        checkpoints="Nemotron-Labs-Diffusion-3B, -8B and -Base (text only)",
        parameters=(8_489_553_920, 3_831_659_520),
    ),
)
SAMPLERS = (
    NemotronDiffusionSettings,
    LinearSpeculationSettings,
    NemotronDllmSettings,
)
