"""MDLM's semi-autoregressive sampler: a window that moves along the text.

The window begins at the first token and is denoised with MDLM's update, in steps from time 1 to 0. Then it moves by
`stride_length`; what it still covers is decided and stays, and the masks at its end are denoised. The network sees the
window alone, whose positions are counted from 0: each move gives a token another position. Canvases, tracks and
interventions count positions in the text. Where the text ends before the window does, the window is shorter.

A window ends when none of its positions is masked. The published code goes through all its steps and adds one at time
0, which change nothing.

Pitfall: the sinks of a step can lie outside the next step's window. Hiding such a key does nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.sampling import decisions
from sinklens.sampling.noise_levels import LastPrediction
from sinklens.sampling.sampler import Sampler, require
from sinklens.utils.arguments import Count

if TYPE_CHECKING:
    from sinklens.sampling.state import State


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
        """See `Sampler.slides`."""
        return True

    def denoise(self, state: "State") -> Iterator[None]:
        """See `Sampler.denoise`."""
        context = state.tree.cfg.n_ctx
        if self.window_length > context:
            raise SettingError(
                f"window_length is {self.window_length}, and the context of this model {context}; give at most that."
            )
        places = _places(state)
        for first in range(0, int(places.max()) + 1, self.stride_length):
            window, last = (places >= first) & (places < first + self.window_length), LastPrediction()
            for step in range(self.window_steps):
                if not bool(((state.canvas == state.mask_id) & window).any()):
                    break
                yield
                self._update(state, last, window, step)

    def _update(self, state: "State", last: LastPrediction, window: Bool[Tensor, "batch pos"], step: int) -> None:
        """One update of the window."""
        time, until = (torch.tensor(1 - number / self.window_steps) for number in (step, step + 1))
        state.time = decisions.log_linear_sigma(time).to(state.canvas.device).expand(len(state.canvas))
        state.window = window
        canvas = state.begin_step()
        where = (canvas == state.mask_id) & window
        probs = decisions.token_probabilities(last.logits(state, canvas, where), state.mask_id)
        weights = decisions.posterior_weights(probs, state.mask_id, until / time)
        drawn = decisions.exponential_race(weights, state.uniform(where, weights.shape[-1], weights.dtype))
        proposed, drawn = state.propose(where, drawn, canvas)
        state.show_confidence(where, lambda: decisions.probability(probs, drawn))
        state.commit(where & (proposed != state.mask_id), proposed)


def _places(state: "State") -> Int[Tensor, "batch pos"]:
    """The position of each column in its row's text, from 0; negative on left padding."""
    return torch.arange(state.canvas.shape[1], device=state.canvas.device) - state.real.long().argmax(1, keepdim=True)
