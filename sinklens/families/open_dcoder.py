"""Open-dCoder: Qwen2 without the causal mask, whose logits predict the next position.

Its config.json is that of Qwen2, and nothing in it says that attention is bidirectional. It is refused unless
``family=`` is given. Unlike in the published code, padding is not attended to. The mask token is the tokenizer's.

Open-dCoder's sampler: Dream's schedule per row, or path planning ("p2"), which takes decisions back.

In path planning each step proposes a token, and its probability, at every answer position, masked or not. The least
probable positions become masks, fewer with every step; the other masked positions get their proposal, and the other
written ones keep their token. ``run.undecided`` and ``run.unmask_step`` show which decisions were taken back. Logits
predict the next position; `State.logits` has shifted them back.

Pitfall: a written position is judged by the probability of the *present* proposal there, not of its own token, as in
the published code. A token that the model no longer proposes can stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import require
from sinklens.families.base import QWEN_REQUIRED, THETA, VERIFIED, Family
from sinklens.sampling import decisions
from sinklens.sampling.parts import DreamRule
from sinklens.sampling.state import State
from sinklens.utils.arguments import NonNegative


@dataclass(frozen=True)
class OpenDcoderSettings(DreamRule):
    """Open-dCoder's sampler (pengzhangzhi/Open-dLLM, `_mdm_sample`).

    `top_p` is applied to all tokens, then `top_k` to those that are left. The published sampler defaults to many more
    steps than these models need answer tokens; here the default is one step per token.

    Attributes:
        steps: denoising steps; default `gen_length`. A run ends early when no position is masked.
        alg: "entropy", "maskgit_plus" and "topk_margin" commit the most confident masks, by negative entropy,
            probability or margin over the second most likely token. "p2" judges every answer position again at each
            step and masks the least probable ones, also tokens that were committed (path planning; 2502.03540).
        alg_temp: temperature for choosing positions; None or 0 takes the most confident. Not with "p2".
        eps: time at the end of the schedule, above 0. "p2" does not use it.
    """

    name: ClassVar = "open-dcoder"
    alg: Literal["entropy", "maskgit_plus", "topk_margin", "p2"] = "entropy"
    alg_temp: NonNegative | None = None

    @property
    def judges_all_by(self) -> str:
        return "alg 'p2'" if self.alg == "p2" else ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.alg != "p2" or not self.alg_temp,
            "alg 'p2' chooses positions by probability alone; leave alg_temp out or choose another alg.",
        )

    def denoise(self, state: State) -> Iterator[None]:
        variable = (state.canvas == state.mask_id) & state.real
        times = self.times(self.steps)
        for step in state.while_undecided(range(self.steps)):
            yield
            if self.alg == "p2":
                self._plan(state, variable, (step + 1) / self.steps)
            else:
                self._step(state, times, step)

    def _step(self, state: State, times: Float[Tensor, " time"], step: int) -> None:
        canvas = state.begin_step()
        masked = (canvas == state.mask_id) & state.real
        proposed, confidence = self.draw(state, canvas, masked & state.computed())
        counts = decisions.dream_schedule(masked.sum(dim=1), times, step)
        if self.alg_temp:
            chosen = decisions.sampled_by_confidence(confidence, counts, self.alg_temp, state.noise)
        else:
            chosen = decisions.most_confident(confidence, counts, None, state.computed())
        state.commit(chosen, proposed, best_by=None if self.alg_temp else confidence)

    def _plan(self, state: State, variable: Bool[Tensor, "batch pos"], kept: float) -> None:
        """One step of path planning; `kept` is the fraction of variable positions that hold a token after it."""
        canvas = state.begin_step()
        where = variable | ((canvas == state.mask_id) & state.real)  # a hook may have masked a prompt token
        proposed, confidence = self.draw(state, canvas, where)
        counts = (where.sum(dim=1) * (1 - kept)).floor().long().tolist()
        doubt = torch.where(where, -confidence, -torch.inf)
        least = decisions.leftmost_best(doubt, counts)
        state.tied = decisions.chosen_among_equals(doubt, least)
        commit = state.through("hook_commit", (canvas == state.mask_id) & where & ~least)
        state.end_step(torch.where(commit, proposed, canvas).masked_fill(least & ~commit, state.mask_id))

    def softmax(self, logits: Float[Tensor, "masked vocab"]) -> Float[Tensor, "masked vocab"]:
        """The distribution of `cast` logits, at least in float32, as in the published code."""
        return logits.softmax(dim=-1, dtype=self.dtype or torch.float32)

    def confidence(self, state: State, logits: Tensor, probs: Tensor, candidates: Tensor) -> Float[Tensor, " masked"]:
        """The confidence by `alg`, and for path planning the probability at full precision."""
        if self.alg == "topk_margin":
            return self.cast(state, decisions.margin(probs))
        if self.alg == "entropy":
            return self.cast(state, decisions.floored_negative_entropy(probs))
        found = decisions.probability(probs, candidates)
        return found if self.alg == "p2" else self.cast(state, found)


FAMILIES = (
    Family(
        name="open-dcoder",
        model_types=(),
        architecture="qwen2",
        sampler="open-dcoder",
        verified=VERIFIED,
        shift=True,
        required=QWEN_REQUIRED,
        needed=THETA,
        dropped=("trust_remote_code",),
        checkpoints="Open-dCoder 0.5B",
        parameters=(494_032_768,),
    ),
)
SAMPLERS = (OpenDcoderSettings,)
