"""The likelihood of an answer with its standard error, and paired differences.

All values are natural logarithms (nats). Standard errors of one answer come from the spread between independent batches
of draws; those of many answers come from the spread between answers, which includes that of the draws.

Pitfall: the bounds of two models may differ by more than their likelihoods do, because the gap between bound and
likelihood differs from model to model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from sinklens.errors import require
from sinklens.utils.arguments import checked
from sinklens.utils.estimates import Estimate


class PromptAnswer(NamedTuple):
    """Token ids of a prompt and its answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Likelihood:
    """The log-likelihood of one answer given its prompt.

    Attributes:
        kind: "likelihood" of an autoregressive model; "bound" from all masks; "estimate" of the bound from draws.
        tokens: ids of the answer.
        losses: −log p of the masked tokens in each draw; NaN where not masked. In SEDD, Duo and GIDD, the terms of
            their bounds (noise.py).
        shares: share that is masked, or noise, of the block of each token.
        weights: factor of each loss in −`value`.
        blocks: block of each token, from 0; all 0 unless the model is block-causal.
        draws_per_start: draws that share one random start.
        greedy: whether every token of the answer is the most likely one; False in diffusion models.
    """

    kind: Literal["likelihood", "bound", "estimate"]
    tokens: tuple[int, ...]
    losses: Float[np.ndarray, "draw pos"]
    shares: Float[np.ndarray, "draw pos"]
    weights: Float[np.ndarray, "draw pos"]
    blocks: Int[np.ndarray, " pos"]
    draws_per_start: int = 1
    greedy: bool = False

    def __repr__(self) -> str:
        """Value, standard error and what they rest on, on one line: the arrays are long."""
        error = f" ± {self.standard_error:.3f}" if self.kind == "estimate" else ""
        drawn = {"estimate": f", {len(self.losses)} draws", "bound": f", {len(self.losses)} masks"}.get(self.kind, "")
        return f"Likelihood({self.value:.3f}{error} nats, {self.kind}, {len(self.tokens)} tokens{drawn})"

    @property
    def value(self) -> float:
        """Log p of the answer, or a lower bound of it."""
        return float(self.parts.sum())

    @property
    def standard_error(self) -> float:
        """Of `value`; 0 if nothing was drawn, NaN if there is a single batch of draws."""
        return float(self.error_of(self.draws)) if self.kind == "estimate" else 0.0

    @property
    def parts(self) -> Float[np.ndarray, "draw pos"]:
        """The part of `value` that each token contributes in each draw."""
        return -np.where(np.isnan(self.losses), 0.0, self.losses * self.weights)

    @property
    def draws(self) -> Float[np.ndarray, " draw"]:
        """The part of `value` that each draw contributes."""
        return self.parts.sum(axis=1)

    @property
    def positions(self) -> Float[np.ndarray, " pos"]:
        """The part of `value` that each token contributes."""
        return self.parts.sum(axis=0)

    def error_of(self, parts: Float[np.ndarray, "draw *rest"]) -> Float[np.ndarray, "*rest"]:
        """Standard error of the sum of `parts` over the draws, from the spread between independent batches of draws."""
        batches = parts.reshape(-1, self.draws_per_start, *parts.shape[1:]).sum(axis=1)
        return np.asarray(_standard_error(batches) * len(batches))


@checked
def likelihood_difference(
    base: Sequence[Likelihood] | Likelihood, changed: Sequence[Likelihood] | Likelihood
) -> Estimate:
    """How much likelihood a change costs or gains, from pairs with the same mask draws.

    The mean over the answers, in the same order, of changed − base, in nats, with limits by Student's t: over the
    answers, or of one answer over its batches of draws. ``n`` is the number of answers.

    Raises:
        SettingError: the answers or the mask draws differ, or no answers are given.
    """
    from scipy.stats import t

    first, second = ([one] if isinstance(one, Likelihood) else list(one) for one in (base, changed))
    require(
        len(first) == len(second) and first,
        f"paired likelihoods need the same answers, at least one; got {len(first)} and {len(second)}.",
    )
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        drawn = np.array_equal(np.isnan(one.losses), np.isnan(two.losses)) and np.array_equal(one.shares, two.shares)
        require(
            one.tokens == two.tokens and drawn,
            f"answer {number} has other {'tokens' if one.tokens != two.tokens else 'mask draws'} in the two "
            f"conditions, so they cannot be paired; give the same answers, seed, mc_num, draws_per_start and masking.",
        )
    pairs = list(zip(first, second, strict=True))
    gaps = np.array([two.value - one.value for one, two in pairs])
    if len(pairs) > 1:
        error, freedom = float(_standard_error(gaps)), len(pairs) - 1
    else:
        (one, two), freedom = pairs[0], max(1, len(first[0].losses) // first[0].draws_per_start - 1)
        error = float(one.error_of(two.draws - one.draws)) if one.kind == "estimate" else 0.0
    value, reach = float(gaps.mean()), float(t.ppf(0.975, freedom)) * error
    return Estimate(value, value - reach, value + reach, len(pairs))


def _standard_error(values: Float[np.ndarray, "sample *rest"]) -> Float[np.ndarray, "*rest"]:
    """Standard error of the mean over the first axis; NaN for one value."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / math.sqrt(len(values)))
