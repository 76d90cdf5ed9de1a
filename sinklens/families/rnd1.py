"""RND1: Qwen3-MoE without the causal mask, whose logits predict the next position.

All layers of the published model are mixtures; a config with dense layers is refused.

RND1's sampler: each step commits the masked positions of which the model is most certain, anywhere on the canvas.

Certain means low entropy of the distribution that a token is proposed from; with ``eb_gamma``,
the most probable come first, while the sum of their entropies minus the largest is at most ``eb_gamma``. The last step
commits everything that is left. Logits predict the next position; `State.logits` has shifted them back.

The last position of the canvas is reserved for the pad token (``closing=`` changes or omits it): for n new tokens, the
published ``generate`` returns n − 1. ``hooks=[Suffix(text=...)]`` fills the gap before a fixed text.

The published sampler takes one prompt; here every row has its own number of masks and its own schedule. A proposed mask
token leaves its position masked here; there it is written like any other. With `top_k` or `top_p`, the published
entropies are NaN; here a token that is not kept contributes 0.

Pitfall: with more steps than masks, steps without a commit repeat the same pass, as in the published code.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from sinklens.errors import require
from sinklens.families.base import ROTATION, VERIFIED_WITH_ROUTING, Family, kept, rotation
from sinklens.sampling import decisions
from sinklens.sampling.parts import ByConfidence, Steps, Truncated
from sinklens.sampling.state import State
from sinklens.utils.arguments import NonNegative


@dataclass(frozen=True)
class Rnd1Settings(Truncated, ByConfidence, Steps):
    """RND1's sampler (RadicalNumerics/RND1, rnd/sampling.py).

    The published sampler defaults to many more steps than these models need answer tokens; here the default is one step
    per token.

    Attributes:
        gen_length: number of answer positions, all masked at the start; `closing` comes after them.
        steps: denoising steps; default `gen_length`. After step i of N, ⌊m·(N − 1 − i)/N⌋ of the m masks remain,
            where the quotient is rounded to float32 as in the published code.
        temperature: divides the logits, including those that determine the order of commits; above 0.
        top_p: propose from the smallest set of tokens with this total probability, among those that `top_k` keeps; None
            turns it off.
        greedy: take the most likely token instead of a random one.
        eb_gamma: in every step but the last, commit tokens in order of falling probability while the sum of their
            entropies, minus the largest, is at most this (in nats), and at least one. None commits the tokens of lowest
            entropy by the schedule.
        closing: the token that follows the answer: "pad" as in the published code, "eos", or "none".
    """

    name: ClassVar = "rnd1"
    temperature: NonNegative = 1.0
    greedy: bool = True
    eb_gamma: NonNegative | None = None
    closing: Literal["pad", "eos", "none"] = "pad"

    @property
    def closing_token(self) -> str:
        return self.closing

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.temperature > 0, "temperature must be above 0; pass greedy=True for the most likely tokens.")

    def denoise(self, state: State) -> Iterator[None]:
        start = ((state.canvas == state.mask_id) & state.real).sum(dim=1).tolist()
        schedules = [decisions.entropy_schedule(masks, self.steps) for masks in start]
        for number, keep in state.while_undecided(enumerate(zip(*schedules, strict=True))):
            yield
            self._step(state, keep, last=number == self.steps - 1)

    def _step(self, state: State, keep: Sequence[int], last: bool) -> None:
        canvas = state.begin_step()
        masked = (canvas == state.mask_id) & state.real
        where = masked & state.computed()
        logits = decisions.truncate(self.cast(state, state.logits(canvas, where)), self.truncation)
        logs = logits.log_softmax(dim=-1, dtype=self.dtype)  # in bfloat16, a softmax has other ties
        probs = logs.exp()
        noise = None if self.greedy else state.noise.uniform(where, dtype=torch.float64)
        proposed, candidates = state.propose(
            where, decisions.categorical_candidates(logs if self.greedy else probs, noise), canvas
        )
        certainty = (probs * logs).where(probs > 0, 0).sum(dim=-1)
        bounded = self.eb_gamma is not None and not last
        probability = decisions.probability(logs, candidates).double().exp()
        confidence = state.spread_confidence(where, probability if bounded else certainty)
        if bounded:
            entropy = torch.zeros_like(confidence, dtype=certainty.dtype).masked_scatter(where, -certainty)
            chosen = decisions.within_bound(confidence, entropy, self.eb_gamma or 0.0)
        else:
            waiting = (masked & ~where).sum(dim=1).tolist()
            left = [max(0, k - n) for k, n in zip(keep, waiting, strict=True)]
            doubt = torch.where(where, -confidence, -torch.inf)  # the published code ranks what stays masked
            chosen = where & ~decisions.most_confident(doubt, left, None, state.computed())
        state.commit(chosen, proposed, best_by=confidence)


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """RND1's config as Qwen3-MoE's, whose keys it uses; there, ``false`` means none. All layers are mixtures."""
    named = ("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return {
        **kept(config),
        **{key: config[key] for key in (*named, "norm_topk_prob", "attention_bias") if key in config},
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "rope_parameters": rotation(config),
    }


FAMILIES = (
    Family(
        name="rnd1",
        model_types=("rnd1",),
        architecture="qwen3_moe",
        sampler="rnd1",
        verified=VERIFIED_WITH_ROUTING,
        shift=True,
        required={
            **ROTATION,
            "hidden_act": ("silu",),
            "rope_scaling": (None, False),
            "sliding_window": (None, False),
            "use_sliding_window": (False,),
            "attention_bias": (False,),
            "is_causal": (False,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
        mask_token_id=151669,
        convert=converted,
        needed=(
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rope_theta",
            "rms_norm_eps",
            "max_position_embeddings",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
        ),
        own_classes=("RND1LM",),
        checkpoints="RND1-Base",
        parameters=(30_532_122_624,),
    ),
)
SAMPLERS = (Rnd1Settings,)
