"""Autoregressive models: the classes of transformers, decoded from left to right.

The numbers of parameters are those of Llama-3.1-8B and of the small GPT-2.

Left-to-right decoding with the hook names of a denoising run: a step decodes one token.

``denoise.hook_canvas`` is the text so far; ``hook_logits``, ``hook_candidates``, ``hook_confidence`` and
``hook_commit`` have one position, the one being decoded. With a cache, a step computes only the new position. If an
edit of the canvas changes tokens whose keys are cached, the cache is emptied, so that the edit takes effect.

While nothing is watched, rows that have ended leave the batch of the pass, and their keys leave the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import ReadOnlyHookError, require
from sinklens.families.base import ROTATION, Family
from sinklens.sampling import decisions
from sinklens.sampling.parts import Truncated
from sinklens.sampling.state import State

GPT2_RENAMES = {r"^(wte|wpe|h|ln_f)\.": r"transformer.\1."}
GPT2_IGNORED = r"\.attn\.(masked_)?bias$"
GPT2_DROPPED = ("head_dim", "num_key_value_heads")  # not keys of its class, which would keep them


@dataclass(frozen=True)
class AutoregressiveSettings(Truncated):
    """Left-to-right decoding; a step decodes one token.

    `top_p` and `top_k` apply at a temperature above 0, `top_p` to the tokens that `top_k` keeps, as in transformers.

    Attributes:
        gen_length: maximum number of tokens; a row ends at its end-of-sequence token.
        use_cache: cache keys and values, so that a step computes only new positions: one, or the current block.
    """

    name: ClassVar = "autoregressive"
    attention: ClassVar = ("causal", "per-pass")
    left_to_right: ClassVar = True
    use_cache: bool = True

    @property
    def caches_keys(self) -> bool:
        return self.use_cache

    def denoise(self, state: State) -> Iterator[None]:
        points = state.tree.denoise
        if self.use_cache:
            state.cache_keys()
        for position in range(state.prompt_length, state.canvas.shape[1]):
            if bool(state.ends(state.canvas[:, :position], state.eos_ids).any(dim=1).all()):
                return
            yield
            text = state.begin_step(slice(position, position), position)[:, :position]
            state.active = ~state.ends(text, state.eos_ids).any(dim=1)
            passed = (points.hook_logits, points.hook_candidates, points.hook_confidence, points.hook_commit)
            alone, real = state.running(*passed), state.real[:, :position]
            running = torch.arange(len(text), device=text.device) if alone is None else alone.nonzero()[:, 0]
            if state.keys is None:
                hidden = state.tree.hidden(text[running], real[running])
            else:
                hidden = state.keys.hidden(text, real, running)
            self._decode(state, text, hidden[:, -1:], running)

    def _decode(
        self,
        state: State,
        text: Int[Tensor, "batch pos"],
        hidden: Float[Tensor, "running 1 d_model"],
        running: Int[Tensor, " running"],
    ) -> None:
        """Decode one token in the `running` rows; the others repeat their end token."""
        logits = state.checked(state.through("hook_logits", state.tree.head(hidden))[:, 0].float())
        probs = decisions.truncate(logits, self.truncation).softmax(dim=-1, dtype=torch.float64)
        where = torch.zeros(len(text), 1, dtype=torch.bool, device=text.device)
        where[running] = True
        noise = state.noise.uniform(where, dtype=torch.float64) if self.temperature > 0 else None
        drawn = decisions.categorical_candidates(probs, noise)
        candidates = state.ids_at(state.tree.denoise.hook_candidates, drawn[:, None])
        state.show_confidence(torch.ones_like(where), lambda: decisions.probability(probs, candidates[:, 0]))
        require(
            bool(state.through("hook_commit", torch.ones_like(candidates, dtype=torch.bool)).all()),
            "denoise.hook_commit of an autoregressive model cannot be False: every step commits its one token. "
            "Edit denoise.hook_candidates to force another token, or call t.stop().",
            ReadOnlyHookError,
        )
        canvas = state.canvas.clone()
        position = text.shape[1]
        canvas[:, :position], canvas[running, position] = text, candidates[:, 0]
        if state.eos_ids:
            canvas[~state.active, position] = state.eos_ids[0]
        state.end_step(canvas)


FAMILIES = (
    Family(
        name="llama",
        model_types=("llama",),
        architecture="llama",
        sampler="autoregressive",
        verified="logits equal transformers' own on tiny weights and on SmolLM2-135M-Instruct's; the greedy text of "
        "tiny-llama does, too",
        causal=True,
        required=ROTATION,
        own_classes=("LlamaForCausalLM",),
        checkpoints="Llama",
        parameters=(8_030_261_248,),
    ),
    Family(
        name="qwen2",
        model_types=("qwen2",),
        architecture="qwen2",
        sampler="autoregressive",
        verified="logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen2ForCausalLM",),
        checkpoints="Qwen2",
    ),
    Family(
        name="qwen3",
        model_types=("qwen3",),
        architecture="qwen3",
        sampler="autoregressive",
        verified="logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen3ForCausalLM",),
        checkpoints="Qwen3",
    ),
    Family(
        name="qwen3-moe",
        model_types=("qwen3_moe",),
        architecture="qwen3_moe",
        sampler="autoregressive",
        verified="logits equal transformers' own on tiny weights",
        causal=True,
        required=ROTATION,
        own_classes=("Qwen3MoeForCausalLM",),
        checkpoints="Qwen3-MoE",
    ),
    Family(
        name="gpt2",
        model_types=("gpt2",),
        architecture="gpt2",
        sampler="autoregressive",
        verified="logits and patterns equal transformers' own on tiny weights",
        causal=True,
        required={"add_cross_attention": (False,)},
        renames=GPT2_RENAMES,
        ignored=GPT2_IGNORED,
        dropped=GPT2_DROPPED,
        foreign=r"(denoise_model|embed_tokens)\.",
        own_classes=("GPT2LMHeadModel",),
        checkpoints="GPT-2",
        parameters=(124_439_808,),
    ),
)
SAMPLERS = (AutoregressiveSettings,)
