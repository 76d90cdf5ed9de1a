"""The likelihood of an answer with its standard error, its curve over the share masked, and paired differences.

All values are natural logarithms (nats). Standard errors of one answer come from the spread between independent batches
of draws; those of many answers come from the spread between answers, which includes that of the draws.

Pitfall: the bounds of two models may differ by more than their likelihoods do, because the gap between bound and
likelihood differs from model to model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from sinklens.errors import SettingError

ValueKind = Literal["likelihood", "bound", "estimate"]


@dataclass(frozen=True)
class LossCurve:
    """The loss by the share of answer tokens that is masked.

    Attributes:
        shares: mean share in each bin, ascending, in (0, 1].
        losses: mean of −log p per masked token.
        standard_errors: of `losses`; 0 if all masks were enumerated, NaN from a single draw.
        draws: number of draws, or masks, in each bin.
    """

    shares: Float[np.ndarray, " bin"]
    losses: Float[np.ndarray, " bin"]
    standard_errors: Float[np.ndarray, " bin"]
    draws: Int[np.ndarray, " bin"]


@dataclass(frozen=True, eq=False, repr=False)
class Likelihood:
    """The log-likelihood of one answer given its prompt.

    Attributes:
        value: log p of the answer, or a lower bound of it.
        standard_error: of `value`; 0 if nothing was drawn, NaN if there is a single batch of draws.
        kind: "likelihood" of an autoregressive model; "bound" from all masks; "estimate" of the bound from draws.
        tokens: ids of the answer.
        losses: −log p of the masked tokens in each draw; NaN where not masked. In SEDD, Duo and GIDD, the terms of
            their bounds (noise.py).
        shares: share that is masked, or noise, of the block of each token.
        weights: factor of each loss in −`value`.
        blocks: block of each token, from 0; all 0 unless the model is block-causal.
        batch: draws that share one random start.
    """

    value: float
    standard_error: float
    kind: ValueKind
    tokens: tuple[int, ...]
    losses: Float[np.ndarray, "draw pos"]
    shares: Float[np.ndarray, "draw pos"]
    weights: Float[np.ndarray, "draw pos"]
    blocks: Int[np.ndarray, " pos"]
    batch: int = 1

    @classmethod
    def of(
        cls,
        kind: ValueKind,
        tokens: Sequence[int],
        losses: Float[np.ndarray, "draw pos"],
        shares: Float[np.ndarray, "draw pos"],
        weights: Float[np.ndarray, "draw pos"],
        blocks: Int[np.ndarray, " pos"],
        batch: int = 1,
    ) -> "Likelihood":
        """The result of these losses."""
        parts = -np.where(np.isnan(losses), 0.0, losses * weights)
        error = float(_between_batches(parts.sum(axis=1), batch)) if kind == "estimate" else 0.0
        return cls(float(parts.sum()), error, kind, tuple(tokens), losses, shares, weights, blocks, batch)

    def __repr__(self) -> str:
        """Value, standard error and what they rest on, on one line: the arrays are long."""
        error = f" ± {self.standard_error:.3f}" if self.kind == "estimate" else ""
        drawn = {"estimate": f", {len(self.losses)} draws", "bound": f", {len(self.losses)} masks"}.get(self.kind, "")
        return f"Likelihood({self.value:.3f}{error} nats, {self.kind}, {len(self.tokens)} tokens{drawn})"

    @property
    def draws(self) -> Float[np.ndarray, " draw"]:
        """The part of `value` that each draw contributes."""
        return -np.where(np.isnan(self.losses), 0.0, self.losses * self.weights).sum(axis=1)

    @property
    def positions(self) -> Float[np.ndarray, " pos"]:
        """The part of `value` that each token contributes."""
        return -np.where(np.isnan(self.losses), 0.0, self.losses * self.weights).sum(axis=0)

    @property
    def position_errors(self) -> Float[np.ndarray, " pos"]:
        """Standard errors of `positions`."""
        if self.kind != "estimate":
            return np.zeros(len(self.tokens))
        return _between_batches(-np.where(np.isnan(self.losses), 0.0, self.losses * self.weights), self.batch)

    @property
    def perplexity(self) -> float:
        """exp(−`value` / number of tokens); an upper bound if `value` is a lower one."""
        return math.exp(-self.value / len(self.tokens))

    def curve(self, bins: int = 10) -> LossCurve:
        """The loss by share masked, in at most `bins` bins of equal width; fewer distinct shares get a bin each.

        Raises:
            SettingError: an autoregressive model, which masks nothing.
        """
        return curve([self], bins)


def curve(likelihoods: Sequence[Likelihood], bins: int = 10) -> LossCurve:
    """The loss by share masked over several answers; see `Likelihood.curve`."""
    if bins < 1 or not likelihoods or any(one.kind == "likelihood" for one in likelihoods):
        raise SettingError(
            f"a curve needs likelihoods of masked diffusion models and at least one bin; got {len(likelihoods)} and "
            f"{bins} bins. An autoregressive model masks nothing; see its positions."
        )
    points = np.concatenate([_points(one) for one in likelihoods])
    distinct = np.unique(points[:, 0])
    place = np.ceil(points[:, 0] * bins - 1e-9) if len(distinct) > bins else np.searchsorted(distinct, points[:, 0])
    groups = [points[place == number] for number in np.unique(place)]
    enumerated = all(one.kind == "bound" for one in likelihoods) and len(likelihoods) == 1
    return LossCurve(
        np.array([group[:, 0].mean() for group in groups]),
        np.array([group[:, 1].mean() for group in groups]),
        np.array([0.0 if enumerated else float(_standard_error(group[:, 1])) for group in groups]),
        np.array([len(group) for group in groups]),
    )


def _points(one: Likelihood) -> Float[np.ndarray, "point 2"]:
    """Share masked and mean loss of the masked tokens, for each draw and block with a masked token."""
    found = []
    for block in np.unique(one.blocks):
        there = one.blocks == block
        losses, shares = one.losses[:, there], one.shares[:, there]
        some = ~np.isnan(losses).all(axis=1)
        found.append(np.stack([shares[some, 0], np.nanmean(losses[some], axis=1)], axis=1))
    return np.concatenate(found)


@dataclass(frozen=True)
class Difference:
    """How much likelihood a change costs or gains, from pairs with the same mask draws.

    Attributes:
        value: mean over the answers of changed − base, in nats.
        standard_error: of `value` over the answers; of one answer, over its batches of draws.
        independent: what `standard_error` would be if the two had been estimated with independent draws.
        low, high: 95 % interval of `value`, by Student's t.
        samples: number of answers.
    """

    value: float
    standard_error: float
    independent: float
    low: float
    high: float
    samples: int

    @property
    def narrowing(self) -> float:
        """Width of the interval with shared draws, relative to independent draws."""
        return self.standard_error / self.independent if self.independent else 1.0


def difference(base: Sequence[Likelihood] | Likelihood, changed: Sequence[Likelihood] | Likelihood) -> Difference:
    """Compare two conditions on the same answers, in the same order.

    Raises:
        SettingError: the answers or the mask draws differ, or no answers are given.
    """
    from scipy.stats import t

    first, second = ([one] if isinstance(one, Likelihood) else list(one) for one in (base, changed))
    _check_paired(first, second)
    pairs = list(zip(first, second, strict=True))
    gaps = np.array([two.value - one.value for one, two in pairs])
    shared = np.array([_paired_error(one, two) for one, two in pairs])
    apart = np.array([math.hypot(one.standard_error, two.standard_error) for one, two in pairs])
    if len(first) > 1:
        error, freedom = float(_standard_error(gaps)), len(first) - 1
        independent = math.sqrt(max(0.0, error**2 + float((apart**2 - shared**2).sum()) / len(first) ** 2))
    else:
        error, independent = float(shared[0]), float(apart[0])
        freedom = max(1, len(first[0].losses) // first[0].batch - 1)
    reach = float(t.ppf(0.975, freedom)) * error
    value = float(gaps.mean())
    return Difference(value, error, independent, value - reach, value + reach, len(first))


def _check_paired(first: Sequence[Likelihood], second: Sequence[Likelihood]) -> None:
    if len(first) != len(second) or not first:
        raise SettingError(
            f"paired likelihoods need the same answers, at least one; got {len(first)} and {len(second)}."
        )
    for number, (one, two) in enumerate(zip(first, second, strict=True)):
        same = one.tokens == two.tokens and _draws_of(one) == _draws_of(two)
        if not same:
            raise SettingError(
                f"answer {number} has other {'tokens' if one.tokens != two.tokens else 'mask draws'} in the two "
                f"conditions, so they cannot be paired; give the same answers, seed, mc_num, batch and masking."
            )


def _draws_of(one: Likelihood) -> tuple[bytes, ...]:
    """What distinguishes the draws of an answer: which tokens have a loss, and the shares of noise."""
    return np.isnan(one.losses).tobytes(), one.shares.tobytes()


def _paired_error(one: Likelihood, two: Likelihood) -> float:
    """Standard error, over the draws, of the difference of one answer's two estimates."""
    return float(_between_batches(two.draws - one.draws, one.batch)) if one.kind == "estimate" else 0.0


def _between_batches(parts: Float[np.ndarray, "draw *rest"], batch: int) -> Float[np.ndarray, "*rest"]:
    """Standard error of the sum of `parts`, from the spread between independent batches of draws."""
    batches = parts.reshape(-1, batch, *parts.shape[1:]).sum(axis=1)
    return np.asarray(_standard_error(batches) * len(batches))


def _standard_error(values: Float[np.ndarray, "sample *rest"]) -> Float[np.ndarray, "*rest"]:
    """Standard error of the mean over the first axis; NaN for one value."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(values.std(axis=0, ddof=1) / math.sqrt(len(values)))
