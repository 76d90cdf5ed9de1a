"""Cache policies: which keys and values a step of a bidirectional model computes, reuses or hides.

    run = sinklens.generate(model, prompt, cache=DualCache())

`NoCache`, the default, computes everything. Every other policy approximates: compare it with the exact run. Each class
says what it approximates. A policy of your own is a `Policy` (key_cache.py) with the method `plan`; an entry in
`POLICIES` gives it a name where objects cannot be written, as on the command line: "dual", or "keep-sinks:4" with an
argument.

Pitfall: a name can set only one argument of its policy; write the object to set others.

Pitfall: for a sampler without blocks, the answer is the only block, so the complete step at the beginning of each block
is the first step of the run alone.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, nearest, require
from sinklens.sampling.key_cache import History, Keys, Policy
from sinklens.sinks.detectors import Detector, EpsilonOverMean
from sinklens.sinks.track import build_track
from sinklens.utils.arguments import Count, Words, plainly_shown, read_as

CachePolicy = Annotated[Policy | str, Words("a policy such as sinklens.sampling.DualCache() or its name, 'dual',")]


@dataclass(frozen=True)
class NoCache(Policy):
    """Compute every position in every step: the exact run, and the default."""

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Everything is fresh."""
        return torch.ones_like(history.in_block)


@dataclass(frozen=True)
class PrefixCache(Policy):
    """Reuse the keys and values of the columns before the active block until the next block begins.

    Fast-dLLM's prefix cache (Wu et al., 2505.22618, v1 of the code). What it approximates: a reused entry belongs to
    the canvas of the block's first step, where the block was still masked, so the entries of the prompt and of earlier
    blocks do not reflect the tokens decided in the block since then.
    """

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Fresh from the block's first column on; everything in its first step."""
        columns = torch.arange(history.canvas.shape[1], device=history.canvas.device)
        return columns >= (history.block.start if history.step_in_block else 0)


@dataclass(frozen=True)
class DualCache(Policy):
    """Reuse the keys and values of the columns before and after the active block until the next block begins.

    Fast-dLLM's dual cache; it approximates as `PrefixCache` does.
    """

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Fresh inside the block; everything in its first step."""
        return history.in_block if history.step_in_block else torch.ones_like(history.in_block)


@plainly_shown
@dataclass(frozen=True)
class DelayedCache(Policy):
    """Reuse the entries of positions from the second step after their token was written.

    dKV-Cache's delayed cache (Ma et al., 2505.15781; horseee/dKV-Cache, `llada_dkv_cache_decode.py`). The first step
    that sees a token computes its entry, and later steps reuse it. The first two steps of a block and every
    `refresh`-th one compute everything. Undecided positions are always computed, those of later blocks included.

    Where logits at j predict the token at j + 1, j is reused only if both tokens were written by then, dKV-Cache's rule
    "un_right". Its other two rules skip positions that a policy here must compute: "right" (only j is written) skips
    those that predict undecided ones, and "un" (only j + 1 is written) skips undecided ones.

    What it approximates: a reused entry reflects the tokens written up to the step after its own token, but no later
    ones. The published code needs rows with equally many decided positions; here each row reuses its own.

    Attributes:
        refresh: steps of a block between complete steps (`cache_reloading_step`); 1 computes everything always.
    """

    refresh: Count = 8

    def plan(self, history: History) -> Bool[Tensor, "batch pos"]:
        """Fresh where undecided, or written in the step before; with shifted logits also before such positions."""
        if history.step_in_block < 2 or history.step_in_block % self.refresh == 0:
            return torch.ones_like(history.undecided)
        fresh = history.undecided | (history.decided == 1)
        if history.shift:
            fresh[:, :-1] |= (fresh & history.real)[:, 1:].clone()
        return fresh


@plainly_shown
@dataclass(frozen=True)
class Refresh(Policy):
    """Compute everything every `every` steps of a block; another policy decides in between.

    Attributes:
        every: steps of a block between complete steps.
        within: the policy of the other steps.
    """

    every: Count
    within: Policy = field(default_factory=DualCache)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reads_scores", self.within.reads_scores)

    def plan(self, history: History) -> Tensor:
        """The plan of `within`, or everything."""
        if history.step_in_block % self.every == 0:
            return torch.ones_like(history.undecided)
        return self.within.plan(history)


@plainly_shown
@dataclass(frozen=True)
class KeepSinks(Policy):
    """Compute the sinks in every step and leave other keys stale, or keep the sinks and hide the others.

    It asks what a cache owes to its sinks. A detector finds sinks in the scores of the step before, in each layer: a
    position that is a sink of any head counts. Outside the block, either the sinks are computed and the others stale
    (`others="stale"`), or the sinks are stale and the others hidden (`others="gone"`). The negation,
    ``~KeepSinks(...)``, exchanges sinks and others. With these exceptions, it approximates as `DualCache` does, and the
    first step of a block computes everything.

    Pitfall: a key that is hidden has no attention, so it cannot become a sink again before the next complete step.

    Attributes:
        detector: what a sink is; it may read the scores only.
        k: at most this many sinks per layer, those that are strongest in any head; None for all that are found.
        others: what happens to the other positions outside the block: "stale" (sinks are fresh) or "gone" (sinks are
            stale).
        negated: exchange sinks and others; write ``~KeepSinks(...)``.
    """

    detector: Detector = field(default_factory=EpsilonOverMean)
    k: Count | None = None
    others: Literal["stale", "gone"] = "stale"
    negated: bool = False
    reads_scores: bool = field(default=True, init=False, repr=False)

    def __invert__(self) -> "KeepSinks":
        return replace(self, negated=not self.negated)

    def plan(self, history: History) -> Int[Tensor, "batch layer pos"]:
        """Everything fresh in the block's first step; then the block, and the sinks or the others."""
        if history.step_in_block == 0:
            return torch.full_like(history.age, int(Keys.FRESH))
        favored, rest = (Keys.FRESH, Keys.STALE) if self.others == "stale" else (Keys.STALE, Keys.GONE)
        chosen = ~history.gone
        if self.others == "stale" or bool(history.complete.any()):
            found = self._sinks(history) ^ self.negated
            chosen = found if self.others == "stale" else torch.where(history.complete[:, :, None], found, chosen)
        return torch.where(history.in_block, int(Keys.FRESH), torch.where(chosen, int(favored), int(rest)))

    def _sinks(self, history: History) -> Bool[Tensor, "batch layer pos"]:
        track = _track(history)
        found = torch.from_numpy(self.detector.detect(track).to_numpy()[:, 0])
        if self.k is not None:
            strength = torch.from_numpy(np.nan_to_num(self.detector.strength(track).to_numpy()[:, 0], nan=-np.inf))
            best = torch.where(found, strength, -torch.inf).amax(dim=2)
            kth = best.topk(min(self.k, best.shape[-1]), dim=-1).values[..., -1:]
            return ((best >= kth) & (best > -torch.inf)).to(history.real.device)
        return found.any(dim=2).to(history.real.device)


def _track(history: History) -> Any:
    """The step before as a track of one step; scores are scaled to a mean of 1, as if every position were a query."""
    assert history.scores is not None
    scores = history.scores.float()
    mean = scores.sum(dim=-1, keepdim=True) / history.real.sum(dim=-1)[:, None, None, None]
    scaled = (scores / mean.clamp(min=torch.finfo(torch.float32).tiny)).cpu().numpy()
    masked = history.undecided.cpu().numpy()
    return build_track(
        score=scaled[:, None], token_id=history.canvas.to(torch.int32).cpu().numpy()[:, None],
        masked=masked[:, None], committed=np.zeros_like(masked)[:, None], is_real=history.real.cpu().numpy(),
        unmask_step=np.full(masked.shape, -1), attrs={"model": "", "prompt_length": 0},
    )  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class Planned(Policy):
    """Compute, reuse and hide the keys that a table lists for each step.

        stale = exact.sinks.detect().any("head")  # [batch, step, layer, pos]
        stale[:, 0] = False
        run = sinklens.generate(model, prompt, replay=exact, cache=Planned(~stale))

    Chosen from an exact run and carried out on its canvases (``replay=``), the plan leaves stale exactly the keys in
    question, or as many others as a control. A run also computes what it must, whatever the plan says (key_cache.py);
    the track's ``staleness`` shows the keys that were used.

    Attributes:
        table: [batch, step, layer, pos], a tensor, array or DataArray: numbers of `Keys`, or booleans (True for fresh,
            False for stale). Axes that do not matter have size 1.
    """

    table: Any

    def __post_init__(self) -> None:
        values = self.table if isinstance(self.table, Tensor) else np.array(self.table)
        require(values.ndim == 4, f"Planned takes a table [batch, step, layer, pos]; got shape {list(values.shape)}.")
        object.__setattr__(self, "table", torch.as_tensor(values))

    def __repr__(self) -> str:
        return f"Planned({list(self.table.shape)})"

    def plan(self, history: History) -> Tensor:
        """The table's entries for the step.

        Raises:
            SettingError: the table has no such step.
        """
        steps = self.table.shape[1]
        require(
            steps <= 1 or history.step < steps,
            f"the table of Planned has {steps} steps, and the run reached step {history.step}; make it as long as "
            f"the run, or give the step axis size 1.",
        )
        return self.table[:, history.step if steps > 1 else 0]


POLICIES: dict[str, Callable[..., Policy]] = {
    "none": NoCache,
    "prefix": PrefixCache,
    "dual": DualCache,
    "delayed": DelayedCache,
    "refresh": lambda every=8: Refresh(every=every),
    "keep-sinks": lambda k=None: KeepSinks(k=k),
    "drop-sinks": lambda k=None: ~KeepSinks(k=k, others="gone"),
}
"""Name -> a function that makes the policy, from a number if one follows the name after a colon."""


def as_policy(cache: Any) -> Policy | None:
    """What `cache=` of a run takes, a policy or a name, as a policy; None for the exact run.

    Raises:
        SettingError: it is neither, or no policy has this name.
    """
    given = read_as(CachePolicy | None, "cache", cache)
    policy = find_policy(given) if isinstance(given, str) else given
    return None if isinstance(policy, NoCache) else policy


def policy_name(policy: Policy) -> str:
    """The text for which `find_policy` returns an equal policy; else its repr."""
    numbers = [value for value in vars(policy).values() if type(value) in (int, float)]
    texts = [text for name in POLICIES for text in (name, *(f"{name}:{number}" for number in numbers))]
    for text in texts:
        with suppress(SettingError):
            if find_policy(text) == policy:
                return text
    return repr(policy)


def find_policy(text: str) -> Policy:
    """The policy that a name, with an optional number as in "keep-sinks:4", selects.

    Raises:
        SettingError: no policy has this name, or its argument is not a number that it takes.
    """
    name, colon, number = text.partition(":")
    require(
        name in POLICIES, f"no cache policy is called {name!r}; known: {', '.join(POLICIES)}.{nearest(name, POLICIES)}"
    )
    try:
        return POLICIES[name](*[float(number) if "." in number else int(number)] if colon else [])
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"{text!r} is not a cache policy: write {name!r} alone, or if it takes one with a number after the colon "
            f"({error})."
        ) from error
