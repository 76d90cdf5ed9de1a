"""MDLM: masked diffusion of a DiT.

MDLM's sampler: a time falls from 1 to 0, and each step decides some of the masked positions at random.

A step from time t to s decides a masked position with probability (t − s) / t and draws its token from the model's
distribution without the mask. Decided positions, including the prompt's, do not change. Prompts may differ in length.

Pitfall: "ddpm" computes with 0.999 t where "ddpm_cache" computes with t. The same random numbers therefore may give
different texts.

`mdlm-windows` is MDLM's semi-autoregressive sampler: a window of ``window_length`` moves along the text, which may be
longer than the context.

The window begins at the first token and is denoised with MDLM's update, in steps from time 1 to 0. Then it moves by
`stride_length`; what it still covers is decided and stays, and the masks at its end are denoised. The network sees the
window alone, whose positions are counted from 0: each move gives a token another position. Canvases, tracks and
interventions count positions in the text; scores outside the window are NaN. Where the text ends before the window
does, the window is shorter. A separate pass over the canvas of a step (`logit_lens`, `write_attribution`, `pattern_at`)
is refused. Keep the values of the run itself: `Activations`, `LogitLens`, `MaskedLogits` and ``Record(patterns=[(step,
layer)])``.

A window ends when none of its positions is masked. The published code goes through all its steps and adds one at time
0, which change nothing.

Pitfall: the sinks of a step can lie outside the next step's window. Hiding such a key does nothing.

ReMDM (`remdm`): the ψ samplers of s-sahoo/duo for masked diffusion, which may mask a decided token again. Positions
that hold the mask are undecided. Every step draws tokens and masks at all answer positions, in float64. Guidance and
cache policies are refused, since a step needs all positions.

With κ = 1 (the default) nothing is masked again: this is ancestral sampling as s-sahoo/duo computes it for MDLM. A
decided position predicts its own token, whatever the network says (SUBS), and a masked one never the mask.

If the previous update changed nothing and the network is untimed, the published code skips the pass. Here every step
runs its pass; the tokens are the same.

Pitfall: decided positions use random numbers too, so the numbers of another sampler's run give a different text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.families.modulated import DIT, DIT_NEEDED
from sinklens.sampling import decisions
from sinklens.sampling.noise_levels import FallingTime, LastPrediction, StepTime
from sinklens.sampling.psi import PsiSampler
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count


@dataclass(frozen=True)
class MdlmSettings(FallingTime):
    """MDLM's sampler (Sahoo et al., 2406.07524, and its reference code).

    A pass of an untimed network is left out while the canvas does not change and nothing is watched. The reference code
    does so with "ddpm_cache" only; the tokens are the same.

    Attributes:
        predictor: the update: "ddpm_cache" or "ddpm", or "analytic", SEDD's.
        noise_removal: end with a step that decides every position that is still masked: by the most likely token, or
            with "analytic" by one more draw.
    """

    name: ClassVar = "mdlm"
    predictor: Literal["ddpm", "ddpm_cache", "analytic"] = "ddpm_cache"

    def weights(
        self, state: State, logits: Float[Tensor, "masked vocab"], times: StepTime
    ) -> Float[Tensor, "masked vocab"]:
        probs = decisions.token_probabilities(logits, state.mask_id)
        if self.predictor == "analytic":
            score = probs / times.sigma.expm1()
            score[:, state.mask_id] = 1
            return decisions.analytic_weights(score, state.mask_id, times.decrease)
        if times.closing:
            return probs
        time, until = times.time, times.until
        if self.predictor == "ddpm":
            time, until = (1 - (-decisions.log_linear_sigma(one)).exp() for one in (time, until))
        return decisions.posterior_weights(probs, state.mask_id, until / time)

    def draws(self, times: StepTime) -> bool:
        return self.predictor == "analytic" or not times.closing


@dataclass(frozen=True)
class MdlmWindowSettings(Sampler):
    """MDLM's semi-autoregressive sampler (Sahoo et al., 2406.07524, and its reference code).

    Attributes:
        gen_length: number of answer positions; the text may be longer than the context.
        window_length: positions of the window, at most the context.
        stride_length: positions by which the window moves.
        window_steps: updates of each window.
    """

    name: ClassVar = "mdlm-windows"
    sets_time: ClassVar = True
    window_length: Count = 1024
    stride_length: Count = 512
    window_steps: Count = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.stride_length <= self.window_length,
            f"stride_length {self.stride_length} is larger than window_length {self.window_length}, so the windows "
            f"would leave gaps; give at most {self.window_length}.",
        )

    @property
    def steps(self) -> int:
        """See `Sampler.steps`; a prompt takes part in as many windows as the answer."""
        return self.window_steps * (-(-self.gen_length // self.stride_length) + 1)

    @property
    def slides(self) -> bool:
        return True

    def denoise(self, state: State) -> Iterator[None]:
        context = state.tree.cfg.n_ctx
        require(
            self.window_length <= context,
            f"window_length is {self.window_length}, and the context of this model {context}; give at most that.",
        )
        places = _places(state)
        for first in range(0, int(places.max()) + 1, self.stride_length):
            window, last = (places >= first) & (places < first + self.window_length), LastPrediction()
            for step in state.while_undecided(range(self.window_steps), window):
                yield
                self._update(state, last, window, step)

    def _update(self, state: State, last: LastPrediction, window: Bool[Tensor, "batch pos"], step: int) -> None:
        """One update of the window."""
        time, until = (torch.tensor(1 - number / self.window_steps) for number in (step, step + 1))
        state.time = decisions.log_linear_sigma(time).to(state.canvas.device).expand(len(state.canvas))
        state.window = window
        canvas = state.begin_step()
        where = (canvas == state.mask_id) & window
        probs = decisions.token_probabilities(last.logits(state, canvas, where), state.mask_id)
        weights = decisions.posterior_weights(probs, state.mask_id, until / time)
        drawn = decisions.exponential_race(weights, state.uniform(where, weights.shape[-1], weights.dtype))
        proposed = state.propose_drawn(where, drawn, canvas, lambda: probs)
        state.commit(where & (proposed != state.mask_id), proposed)


def _places(state: State) -> Int[Tensor, "batch pos"]:
    """The position of each column in its row's text, from 0; negative on left padding."""
    return torch.arange(state.canvas.shape[1], device=state.canvas.device) - state.real.long().argmax(1, keepdim=True)


@dataclass(frozen=True)
class RemdmSettings(PsiSampler):
    """Ancestral and ψ samplers of masked diffusion (Wang et al., 2503.00307; s-sahoo/duo's implementation for MDLM)."""

    name: ClassVar = "remdm"

    def log_probs(
        self, state: State, logits: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"]
    ) -> Float[Tensor, "drawn vocab"]:
        """See `PsiSampler.log_probs`; 0 and −inf at decided positions."""
        without = logits.index_fill(-1, torch.tensor([state.mask_id], device=logits.device), -torch.inf)
        own = torch.full_like(logits, -torch.inf).scatter(-1, present[:, None], 0.0)
        return torch.where((present == state.mask_id)[:, None], without.log_softmax(dim=-1), own)

    def posterior(
        self,
        state: State,
        probs: Float[Tensor, "drawn vocab"],
        present: Int[Tensor, " drawn"],
        alpha_t: Float[Tensor, ""],
        alpha_s: Float[Tensor, ""],
    ) -> Float[Tensor, "drawn vocab"]:
        """(α_s − α_t) / (1 − α_t) p for tokens and (1 − α_s) / (1 − α_t) for the mask; a decided token stays."""
        weights = (alpha_s - alpha_t) / (1 - alpha_t) * probs
        weights[:, state.mask_id] = (1 - alpha_s) / (1 - alpha_t)
        return torch.where((present == state.mask_id)[:, None], weights, probs)

    def noised(
        self, state: State, probs: Float[Tensor, "drawn vocab"], alpha_s: Float[Tensor, ""]
    ) -> Float[Tensor, "drawn vocab"]:
        weights = alpha_s * probs
        weights[:, state.mask_id] = 1 - alpha_s
        return weights


FAMILIES = (
    replace(
        DIT,
        name="mdlm",
        bound="subs",
        model_types=("mdlm",),
        sampler="mdlm",
        needed=(*DIT_NEEDED, "time_conditioning"),
        mask_is_last=True,
        own_classes=("MDLM",),
        checkpoints="mdlm-owt",
        parameters=(169_627_218, 424_477_010),
    ),
)
SAMPLERS = (
    MdlmSettings,
    MdlmWindowSettings,
    RemdmSettings,
)
