"""Sampler settings: one frozen record per sampler, validated when made.

A setting left out takes the checkpoint's own default, then the sampler's. A setting that the model's sampler does not
have is an error, never ignored: ``alg`` given to LLaDA would otherwise look as if it had had an effect.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, TypedDict

from sinklens.errors import SettingError, nearest

Remasking = Literal["low_confidence", "random"]
Algorithm = Literal["origin", "maskgit_plus", "topk_margin", "entropy"]


class Settings(TypedDict, total=False):
    """Every sampler setting there is, for type checkers; which apply depends on the model's family."""

    gen_length: int
    steps: int
    block_length: int
    temperature: float
    cfg_scale: float
    remasking: Remasking
    threshold: float
    logits_eos_inf: bool
    confidence_eos_eot_inf: bool
    alg: Algorithm
    alg_temp: float
    top_p: float
    top_k: int
    eps: float
    use_cache: bool


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise SettingError(text)


def _whole(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _need(whole and value >= least, f"{name} is a whole number of at least {least}; got {value!r}.")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _least(name: str, value: Any) -> None:
    _need(_is_finite(value) and value >= 0, f"{name} is a finite number of at least 0; got {value!r}.")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


@dataclass(frozen=True)
class LladaSettings:
    """LLaDA's sampler (Nie et al., 2502.09992, and its reference code).

    Attributes:
        gen_length: positions of the answer; in a diffusion model all masked at the start.
        steps: denoising steps over the whole generation, through all blocks; default `gen_length`.
        block_length: blocks are finished from left to right; default 32, or `gen_length` where 32 does not divide it.
        temperature: randomness of the proposed tokens (for LLaDA, Gumbel noise in float64); 0 takes the likeliest.
        cfg_scale: classifier-free guidance w: logits = un + (w + 1)(cond − un); 0 is off.
        remasking: which proposals stay masked: the least confident, or random ones.
        threshold: commit also whatever is at least this confident; ends blocks early. None is off; with "random"
            there is no confidence to compare.
        logits_eos_inf: never propose an end-of-sequence token.
        confidence_eos_eot_inf: give proposals of end-of-sequence and end-of-turn no confidence.
    """

    gen_length: int = 128
    steps: int = 0
    block_length: int = 0
    temperature: float = 0.0
    cfg_scale: float = 0.0
    remasking: Remasking = "low_confidence"
    threshold: float | None = None
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False

    def __post_init__(self) -> None:
        _whole("gen_length", self.gen_length, 1)
        object.__setattr__(
            self, "block_length", self.block_length or (32 if self.gen_length % 32 == 0 else self.gen_length)
        )
        object.__setattr__(self, "steps", self.steps or self.gen_length)
        _whole("block_length", self.block_length, 1)
        _whole("steps", self.steps, 1)
        _need(
            self.gen_length % self.block_length == 0,
            f"block_length {self.block_length} does not divide gen_length {self.gen_length}; "
            f"it may be {_divisors(self.gen_length)}.",
        )
        blocks = self.gen_length // self.block_length
        _need(
            self.steps % blocks == 0,
            f"steps {self.steps} cannot be shared by {blocks} blocks (gen_length {self.gen_length} / "
            f"block_length {self.block_length}); give a multiple of {blocks} up to {self.gen_length}.",
        )
        _need(
            self.steps <= self.gen_length,
            f"steps {self.steps} is more than gen_length {self.gen_length}: each step commits at least one token.",
        )
        _least("temperature", self.temperature)
        _least("cfg_scale", self.cfg_scale)
        allowed = ("low_confidence", "random")
        _need(self.remasking in allowed, f"remasking is one of {', '.join(allowed)}; got {self.remasking!r}.")
        _need(
            self.remasking != "random" or self.threshold is None,
            "remasking 'random' commits at random and knows no confidence; drop threshold or take 'low_confidence'.",
        )
        if self.threshold is not None:
            _least("threshold", self.threshold)


@dataclass(frozen=True)
class DreamSettings:
    """Dream's sampler (Ye et al., 2508.15487, and its reference code).

    Attributes:
        gen_length: answer positions, all masked at the start.
        steps: denoising steps; default `gen_length`.
        alg: "origin" commits at random, "maskgit_plus" by probability, "topk_margin" by the lead over the second
            token, "entropy" by negative entropy.
        temperature: randomness of the proposed tokens; 0 takes the likeliest.
        top_p: propose from the smallest set of tokens that has this probability; None is off.
        top_k: propose from this many likeliest tokens; None is off.
        alg_temp: temperature of the choice of positions; None or 0 takes the most confident.
        eps: time at the end of the schedule, above 0.
        threshold: commit also whatever is at least this confident, in the unit of `alg`; None is off.
    """

    gen_length: int = 128
    steps: int = 0
    alg: Algorithm = "entropy"
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    alg_temp: float | None = None
    eps: float = 1e-3
    threshold: float | None = None

    def __post_init__(self) -> None:
        _whole("gen_length", self.gen_length, 1)
        object.__setattr__(self, "steps", self.steps or self.gen_length)
        _whole("steps", self.steps, 1)
        allowed = ("origin", "maskgit_plus", "topk_margin", "entropy")
        _need(self.alg in allowed, f"alg is one of {', '.join(allowed)}; got {self.alg!r}.")
        _need(0 < self.eps < 1, f"eps lies between 0 and 1; got {self.eps}.")
        _need(
            self.alg != "origin" or self.threshold is None,
            "alg 'origin' commits at random and knows no confidence; drop threshold or take another alg.",
        )
        _need(
            self.threshold is None or _is_finite(self.threshold),
            f"threshold is a finite number, in the unit of alg; got {self.threshold!r}.",
        )
        if self.alg_temp is not None:
            _least("alg_temp", self.alg_temp)
        _check_truncation(self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True)
class AutoregressiveSettings:
    """Left-to-right decoding; a step is one token.

    Attributes:
        gen_length: tokens at most; a row ends at its end-of-sequence token.
        temperature: randomness of the sampled token; 0 takes the likeliest.
        top_p: sample from the smallest set of tokens that has this probability; None is off.
        top_k: sample from this many likeliest tokens; None is off.
        use_cache: keep keys and values, so that a step computes one position.
    """

    gen_length: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        _whole("gen_length", self.gen_length, 1)
        _check_truncation(self.temperature, self.top_p, self.top_k)

    @property
    def steps(self) -> int:
        """One step per token."""
        return self.gen_length


AnySettings = LladaSettings | DreamSettings | AutoregressiveSettings
BY_SAMPLER: dict[str, type[AnySettings]] = {
    "llada": LladaSettings,
    "dream": DreamSettings,
    "autoregressive": AutoregressiveSettings,
}


def meaning(name: str) -> str:
    """What a setting means, from the docstrings above: the samplers that have it, and the text of the first of them."""
    owners = [sampler for sampler, kind in BY_SAMPLER.items() if name in {field.name for field in fields(kind)}]
    entries = re.split(r"\n {8}(?! )", BY_SAMPLER[owners[0]].__doc__ or "")
    texts = [entry.partition(":") for entry in entries if name in entry.partition(":")[0].split(", ")]
    return f"[{', '.join(owners)}] {' '.join(texts[0][2].split())}" if texts else f"[{', '.join(owners)}]"


def _check_truncation(temperature: float, top_p: float | None, top_k: int | None) -> None:
    _least("temperature", temperature)
    _need(top_p is None or (_is_finite(top_p) and 0 < top_p <= 1), f"top_p lies in (0, 1]; got {top_p!r}.")
    if top_k is not None:
        _whole("top_k", top_k, 1)


def make_settings(sampler: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> AnySettings:
    """The settings of a run.

    Args:
        sampler: a key of `BY_SAMPLER`.
        given: what the user asked for; None means the default. 0 is not None: ``gen_length=0`` is an error.
        defaults: what the checkpoint asks for. Where ``gen_length`` is given, its ``steps`` and ``block_length`` are
            dropped and follow the sampler's defaults, because the three belong together.

    Raises:
        SettingError: an unknown setting, one of another sampler, or a value out of range.
    """
    kind = BY_SAMPLER[sampler]
    known = [field.name for field in fields(kind)]
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name in known:
            continue
        owners = [other for other, cls in BY_SAMPLER.items() if name in [field.name for field in fields(cls)]]
        told = (
            f"it belongs to the {' and '.join(owners)} sampler{'s' * (len(owners) > 1)}."
            if owners
            else f"no sampler has it.{nearest(name, known)}"
        )
        raise SettingError(f"{name} is no setting of the {sampler} sampler: {told} It has: {', '.join(known)}.")
    for name in ("gen_length", "steps", "block_length"):
        if name in chosen:
            _whole(name, chosen[name], 1)
    kept = dict(defaults)
    if "gen_length" in chosen:  # lengths that the checkpoint asks for belong together
        kept = {name: value for name, value in kept.items() if name not in ("steps", "block_length")}
    try:
        return kind(**{**kept, **chosen})
    except TypeError as error:
        raise SettingError(f"a setting has the wrong type: {error}. Given: {dict(chosen)}.") from error
