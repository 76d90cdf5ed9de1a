"""What Duo's sampler and ReMDM share: a time that falls to nearly 0, and a draw at every position in every update.

An update goes from time t to an earlier time s. The network predicts the clean tokens, p. The *posterior* is the
distribution of the tokens at time s, given p and the tokens at time t. A ψ sampler mixes it with a second one, with the
weight 1 − κ: predict the clean tokens, then add noise up to time s again. This corrects earlier decisions. κ = 1 is
ancestral sampling.

How much noise there is at time t: a token is still the clean one with probability α(t) = 1 − 0.999 t; the network reads
σ = −log α. The subclass says what noise is: a mask or a random token.

The published code has two rules that look like mistakes and are kept: "max-rescale-E" multiplies by E twice, and
"constant-remdm-0.02" takes its number from the text after the last hyphen. The published code fails if a mode that
needs two times gets a segment with only one; here κ is 1 at that time.

Pitfall: with the default fractions of 0, only `low_mode` has an effect.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from annotated_types import Gt, Le, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.sampling import decisions
from sinklens.sampling.decisions import Truncation
from sinklens.sampling.parts import Steps
from sinklens.sampling.state import State
from sinklens.utils.arguments import Share

PROFILE = re.compile(r"linear-constant-linear-(0?\.\d*[1-9]\d*)(-inv)?")
MODE = re.compile(r"(constant|max-capped|max-rescale|constant-remdm)-(0|1|[01]\.0*|0?\.\d+)")
MODES = "pure-posterior, pure-pc, constant-E, max-capped-E, max-rescale-E, constant-remdm-E"


class Update(NamedTuple):
    """One update, from time t to time s.

    Attributes:
        alpha_t, alpha_s: share of clean tokens at both times.
        kappa: weight of the posterior.
        greedy: take the most likely tokens instead of drawing.
    """

    alpha_t: Float[Tensor, ""]
    alpha_s: Float[Tensor, ""]
    kappa: Float[Tensor, ""]
    greedy: bool = False


@dataclass(frozen=True)
class PsiSampler(Steps):
    """ψ samplers of s-sahoo/duo; the ancestral sampler with the default settings.

    Attributes:
        steps: updates of the complete generation; default `gen_length`. `final_step` may add one step.
        final_step: the closing step, at the last time: "ancestral" draws once more, without noise in the result;
            "greedy" takes the most likely tokens, without `top_p`; "none" leaves the step out.
        top_p: draw from the smallest set of tokens whose total probability exceeds this; None turns it off. In the
            published code, p_nucleus.
        eps: the last time, above 0.
        time_profile: "linear"; or "linear-constant-linear-C", from 1 to C in the first `high_frac` of the times, then C
            in `middle_frac` of them, then to `eps`. C is a time, or with the suffix "-inv" a share of clean tokens.
        high_mode, middle_mode, low_mode: κ in the first, the middle and the last times: "pure-posterior" (1), "pure-pc"
            (0), "constant-E" (E), and 1 − v / (1 − α(s)) with v = min(E, (1 − α(s)) / α(t)) for "max-capped-E", E times
            that for "max-rescale-E" and E for "constant-remdm-E". The last time of each part then has κ = 1.
        high_frac, middle_frac: share of the first and of the middle times.
    """

    sets_time: ClassVar = True
    judges_all: ClassVar = True
    final_step: Literal["ancestral", "greedy", "none"] = "ancestral"
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    eps: Annotated[float, Gt(0), Lt(1)] = 1e-5
    time_profile: str = "linear"
    high_mode: str = "pure-posterior"
    middle_mode: str = "pure-posterior"
    low_mode: str = "pure-posterior"
    high_frac: Share = 0.0
    middle_frac: Share = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        high, middle = self._parts()
        require(
            high + middle <= self.steps,
            f"high_frac {self.high_frac} and middle_frac {self.middle_frac} take {high + middle} of {self.steps + 1} "
            f"times and leave none for the end; lower one of them.",
        )
        self.updates()  # refuses unknown profiles and modes

    @property
    def most_steps(self) -> int:
        return self.steps + (self.final_step != "none")

    def _parts(self) -> tuple[int, int]:
        """Number of high and of middle times."""
        return round(self.high_frac * (self.steps + 1)), round(self.middle_frac * (self.steps + 1))

    def times(self) -> Float[Tensor, " time"]:
        """The times of all updates, and the last one, in float32.

        Raises:
            SettingError: an unknown profile.
        """
        count = self.steps + 1
        if self.time_profile == "linear":
            return torch.linspace(1, self.eps, count)
        found = PROFILE.fullmatch(self.time_profile)
        if found is None:
            raise SettingError(
                f"time_profile must be 'linear', or 'linear-constant-linear-C' or 'linear-constant-linear-C-inv' with "
                f"C between 0 and 1; got {self.time_profile!r}."
            )
        level = 1 - float(found[1]) if found[2] else float(found[1])
        high, middle = self._parts()
        return torch.cat(
            [
                torch.linspace(1, level, high),
                torch.full((middle,), level),
                torch.linspace(level, self.eps, count - high - middle),
            ]
        )

    def updates(self) -> list[Update]:
        """The updates of a run, closing step included.

        Raises:
            SettingError: an unknown profile or mode.
        """
        times, (high, middle) = self.times(), self._parts()
        modes = {
            "high_mode": slice(high),
            "middle_mode": slice(high, high + middle),
            "low_mode": slice(high + middle, None),
        }
        kappas = torch.cat([_kappas(name, getattr(self, name), times[part]) for name, part in modes.items()])
        found = [
            Update(clean_share(time), clean_share(time - (time - later)), kappa)  # rounded as in the published code
            for (time, later), kappa in zip(pairwise(times), kappas, strict=False)  # none for the last time
        ]
        if self.final_step != "none":
            one = torch.ones(())
            found.append(Update(clean_share(times[-1]), one, one, greedy=self.final_step == "greedy"))
        return found

    def denoise(self, state: State) -> Iterator[None]:
        self.begin(state)
        updates = self.updates()
        for number, update in enumerate(updates):
            yield
            self._step(state, update, last=number == len(updates) - 1)

    def _step(self, state: State, update: Update, last: bool) -> None:
        state.time = -update.alpha_t.log().to(state.canvas.device).expand(len(state.canvas))
        canvas = state.begin_step()
        where = answer(state, self.gen_length)
        present = canvas[where]
        logs = self.log_probs(state, state.logits(canvas, where), present).double()
        probs = logs.exp()
        if update.greedy:
            drawn = logs.argmax(dim=-1)
        else:
            if self.top_p is not None:
                probs = decisions.truncate(logs, Truncation(top_p=self.top_p)).softmax(dim=-1)
            weights = self._weights(state, probs, present, update)
            drawn = decisions.exponential_race(weights, state.uniform(where, weights.shape[-1], torch.float64))
        proposed = state.propose_drawn(where, drawn, canvas, lambda: probs)
        state.commit(where, proposed, undecided=self.undecided(state, last))

    def _weights(
        self, state: State, probs: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"], update: Update
    ) -> Float[Tensor, "drawn vocab"]:
        """The weights of the draw: κ · posterior + (1 − κ) · noised posterior at time 0."""
        weights = self.posterior(state, probs, present, update.alpha_t, update.alpha_s)
        if update.kappa == 1:
            return weights
        clean = self.posterior(state, probs, present, update.alpha_t, torch.ones_like(update.alpha_s))
        return update.kappa * weights + (1 - update.kappa) * self.noised(state, clean, update.alpha_s)

    def begin(self, state: State) -> None:
        """Set the first canvas and its undecided positions, where they are not masks."""
        return

    def undecided(self, state: State, last: bool) -> Bool[Tensor, "batch pos"] | None:
        """As `State.undecided`, after a step that may be the `last` one."""
        return None

    @abstractmethod
    def log_probs(
        self, state: State, logits: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"]
    ) -> Float[Tensor, "drawn vocab"]:
        """Log probabilities of the clean tokens, where the canvas has the tokens `present`."""

    @abstractmethod
    def posterior(
        self,
        state: State,
        probs: Float[Tensor, "drawn vocab"],
        present: Int[Tensor, " drawn"],
        alpha_t: Float[Tensor, ""],
        alpha_s: Float[Tensor, ""],
    ) -> Float[Tensor, "drawn vocab"]:
        """Weights of the tokens at time s, given those at time t and the probabilities of the clean ones."""

    @abstractmethod
    def noised(
        self, state: State, probs: Float[Tensor, "drawn vocab"], alpha_s: Float[Tensor, ""]
    ) -> Float[Tensor, "drawn vocab"]:
        """Weights of the tokens at time s, given the probabilities of the clean ones alone."""


def clean_share(time: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """α(t) = 1 − 0.999 t, the share of clean tokens in the log-linear schedule."""
    return 1 - (1 - 1e-3) * time


def answer(state: State, gen_length: int) -> Bool[Tensor, "batch pos"]:
    """True at the answer's positions, without tokens appended to it."""
    columns = torch.arange(state.canvas.shape[1], device=state.canvas.device) - state.prompt_length
    return ((columns >= 0) & (columns < gen_length)).expand_as(state.canvas)


def _kappas(name: str, mode: str, times: Float[Tensor, " time"]) -> Float[Tensor, " time"]:
    """κ at the `times` of one part of the schedule; see `PsiSampler`.

    Raises:
        SettingError: `mode`, the value of the setting `name`, is unknown.
    """
    if (fixed := {"pure-posterior": 1.0, "pure-pc": 0.0}.get(mode)) is not None:
        return torch.full_like(times, fixed)
    found = MODE.fullmatch(mode)
    if found is None:
        raise SettingError(f"{name} must be one of {MODES}, with E from 0 to 1; got {mode!r}.")
    kind, eta = found[1], float(found[2])
    if kind == "constant":
        return torch.full_like(times, eta)
    alphas = clean_share(times)
    alpha_t, alpha_s = alphas[:-1], alphas[1:]
    share = torch.full_like(alpha_s, eta)
    if kind != "constant-remdm":
        share = torch.minimum(share, (1 - alpha_s) / alpha_t)
    if kind == "max-rescale":
        share = share * eta
    return torch.cat([(1 - share / (1 - alpha_s)).clamp(0, 1), torch.ones_like(times[:1])])
