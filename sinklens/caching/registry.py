"""The policies by name.

A name selects a policy where objects cannot be written, as on the command line: "dual", or "keep-sinks:4" with an
argument. `register` adds a policy in this process.

Pitfall: a name selects a policy with its default arguments but one; write the object to set others.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.caching.dkv import DelayedCache
from sinklens.caching.evict import Evict
from sinklens.caching.fast_dllm import DualCache, PrefixCache
from sinklens.caching.refresh import Refresh
from sinklens.caching.sinks import KeepSinks
from sinklens.errors import SettingError, nearest
from sinklens.sampling.key_cache import History, Policy
from sinklens.utils.arguments import Words, read_as

CachePolicy = Annotated[Policy | str, Words("a policy such as sinklens.caching.DualCache() or its name, 'dual',")]
Maker = Callable[..., Policy]


@dataclass(frozen=True)
class NoCache(Policy):
    """Compute every position in every step: the exact run, and the default."""

    def plan(self, history: History) -> Bool[Tensor, " pos"]:
        """Everything is fresh."""
        return torch.ones_like(history.in_block)


POLICIES: dict[str, Maker] = {
    "none": NoCache,
    "prefix": PrefixCache,
    "dual": DualCache,
    "delayed": DelayedCache,
    "refresh": lambda every=8: Refresh(every=every),
    "evict": Evict,
    "keep-sinks": lambda k=None: KeepSinks(k=k),
    "drop-sinks": lambda k=None: ~KeepSinks(k=k, others="gone"),
}
"""Name -> a function that makes the policy, from a number if one follows the name after a colon."""


def register(name: str, make: Maker) -> None:
    """Add a policy in this process; registering the same again has no effect.

    Raises:
        SettingError: another policy has the name.
    """
    if POLICIES.get(name, make) is not make:
        raise SettingError(f"a cache policy called {name!r} already exists; choose another name.")
    POLICIES[name] = make


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
    if not isinstance(text, str):
        raise SettingError(f"a cache policy is found by its name, such as 'dual'; got {text!r}.")
    name, colon, argument = text.partition(":")
    if name not in POLICIES:
        raise SettingError(
            f"no cache policy is called {name!r}; known: {', '.join(POLICIES)}.{nearest(name, POLICIES)}"
        )
    if not colon:
        return POLICIES[name]()
    if not _takes_number(POLICIES[name]):
        raise SettingError(f"{text!r} is not a cache policy: {name!r} takes no number. Write {name!r} alone.")
    try:
        number = float(argument) if "." in argument else int(argument)
    except ValueError:
        raise SettingError(
            f"{text!r} is not a cache policy: {argument!r} is not a number. Write a number after the colon, or "
            f"{name!r} alone."
        ) from None
    try:
        return POLICIES[name](number)
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"{text!r} is not a cache policy: {error} Write another number after the colon, or {name!r} alone."
        ) from error


def _takes_number(make: Maker) -> bool:
    try:
        inspect.signature(make).bind(1)
    except TypeError:
        return False
    return True
