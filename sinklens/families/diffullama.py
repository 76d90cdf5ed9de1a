"""DiffuLLaMA and DiffuGPT: Llama and GPT-2 without the causal mask, whose logits predict the next position.

**Nothing in their files says that they are diffusion models.** Without ``family=``, DiffuLLaMA loads as an ordinary,
causal Llama, without a warning. The mask token is the tokenizer's. Without one, DiffuLLaMA's is 811, an ordinary token,
as in the authors' loader, and DiffuGPT's must be passed as ``mask_token_id=`` (the small model's is 10541, and its
number of parameters is the one given).

DiffuLLaMA's and DiffuGPT's samplers: proposals everywhere, decided at random or by their probability.

Step t of T − 1, …, 0 proposes a token at every undecided position. With order "random", it decides each of them with
probability 1 / (t + 1). With "confidence", the lowest proposals of the complete answer stay undecided: those below the
(⌊n t / T⌋ + 1)-th smallest probability, where n counts the answer's positions. Decided positions compete, too, so a
step may leave fewer undecided than the schedule says. The last step decides everything.

A position is undecided until it is decided, whatever token it holds: a drawn mask token is a decision, and one in the
prompt is text, as in the authors' samplers: it stays, is not a mask in tracks, and may be scored by `likelihood`. A
single pass cannot distinguish it from a mask.

Pitfall: nothing ends an answer. Text after an end token belongs to the answer, as its length was chosen beforehand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool
from torch import Tensor

from sinklens.families.autoregressive import GPT2_DROPPED, GPT2_IGNORED, GPT2_RENAMES
from sinklens.families.base import ROTATION, Family
from sinklens.sampling import decisions
from sinklens.sampling.decisions import Truncation
from sinklens.sampling.parts import ByConfidence, Steps
from sinklens.sampling.psi import answer
from sinklens.sampling.state import State


@dataclass(frozen=True)
class DiffuLlamaSettings(ByConfidence, Steps):
    """DiffuLLaMA's samplers (Gong et al., 2410.17891, and its reference code).

    Attributes:
        order: "random", as in the authors' model.py, or "confidence", as in their LLaMA-Factory trainer, which uses
            `temperature` 1 and `top_p` 1.
        temperature: divides the logits, above 0.
        top_p: draw from the smallest set of tokens whose total probability exceeds this; 1 turns it off.
        greedy: propose the most likely tokens instead of drawing; their probability still follows `temperature`.
    """

    name: ClassVar = "diffullama"
    marks_undecided: ClassVar = True
    order: Literal["random", "confidence"] = "random"
    temperature: Annotated[float, Gt(0)] = 0.9
    top_p: Annotated[float, Gt(0), Le(1)] = 0.9
    greedy: bool = False

    @property
    def judges_all_by(self) -> str:
        return "order='confidence'" if self.order == "confidence" else ""

    def denoise(self, state: State) -> Iterator[None]:
        state.undecided = answer(state, self.gen_length)
        competing: Bool[Tensor, "batch pos"] | None = None
        for left in state.while_undecided(reversed(range(self.steps))):
            yield
            state.begin_step()
            competing = state.undecided_before() if competing is None else competing
            self._step(state, competing, left)

    def _step(self, state: State, competing: Bool[Tensor, "batch pos"], left: int) -> None:
        """A step with `left` steps after it; `competing` are the positions that the first step found undecided."""
        canvas, undecided = state.step_canvas, state.undecided_before()
        where = competing & undecided.any(dim=1, keepdim=True) if self.order == "confidence" else undecided
        where = where & state.computed()
        logits = self.cast(state, state.logits(canvas, where))
        probs = self.softmax(decisions.truncate(logits, Truncation(self.temperature, self.top_p)))
        numbers = state.uniform(where, 2, torch.float64)
        drawn = decisions.categorical_candidates(probs, None if self.greedy else numbers[:, 0])
        proposed, drawn = state.propose(where, drawn, canvas)
        confidence = state.spread_confidence(where, decisions.probability(probs, drawn))
        if self.order == "confidence":
            ordered = confidence.masked_fill(~where, torch.inf).sort(dim=1).values
            counts = [decisions.entropy_schedule(int(n), self.steps)[-1 - left] for n in competing.sum(dim=1)]
            kept = confidence < ordered.gather(1, torch.tensor(counts, device=ordered.device)[:, None])
        else:
            kept = numbers.new_ones(where.shape).masked_scatter(where, numbers[:, 1]) >= 1 / (left + 1)
        state.commit(undecided & where & ~kept, proposed)


FAMILIES = (
    Family(
        name="diffullama",
        model_types=(),
        architecture="llama",
        sampler="diffullama",
        verified="logits, patterns, stream and, given its random numbers, canvases equal the reference code's on tiny "
        "weights",
        shift=True,
        required=ROTATION,
        mask_token_id=811,
        drawn=True,
        unconditional=True,
        checkpoints="DiffuLLaMA",
        parameters=(6_738_415_616,),
    ),
    Family(
        name="diffugpt",
        model_types=(),
        architecture="gpt2",
        sampler="diffullama",
        verified="logits, patterns, stream and, given its random numbers, canvases equal the reference code's on tiny "
        "weights",
        shift=True,
        required={"add_cross_attention": (False,)},
        renames={r"^embed_tokens\.": "transformer.wte.", r"^denoise_model\.": "transformer.", **GPT2_RENAMES},
        ignored=GPT2_IGNORED,
        dropped=GPT2_DROPPED,
        rows_of="transformer.wte.weight",
        drawn=True,
        unconditional=True,
        checkpoints="DiffuGPT-s, -m",
        parameters=(124_439_808,),
    ),
)
SAMPLERS = (DiffuLlamaSettings,)
