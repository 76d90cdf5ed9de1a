"""Cache policies: which keys and values a step of a bidirectional model computes, reuses or hides.

    run = sinklens.generate(model, prompt, cache=DualCache())

`NoCache` computes everything, the default. Every other policy approximates: compare it with the exact run. A policy of
your own is a `Policy` with the method `plan`; `register` gives it a name for the command line.
"""

from sinklens.caching.dkv import DelayedCache
from sinklens.caching.evict import Evict
from sinklens.caching.fast_dllm import DualCache, PrefixCache
from sinklens.caching.planned import Planned
from sinklens.caching.refresh import DriftAbove, Refresh, drift
from sinklens.caching.registry import POLICIES, NoCache, as_policy, find_policy, policy_name, register
from sinklens.caching.sinks import KeepSinks
from sinklens.sampling.key_cache import History, Keys, Policy

__all__ = [
    "POLICIES",
    "DelayedCache",
    "DriftAbove",
    "DualCache",
    "Evict",
    "History",
    "KeepSinks",
    "Keys",
    "NoCache",
    "Planned",
    "Policy",
    "PrefixCache",
    "Refresh",
    "as_policy",
    "drift",
    "find_policy",
    "policy_name",
    "register",
]
