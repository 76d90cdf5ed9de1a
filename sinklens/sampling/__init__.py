"""What samplers share: their base class, the loop, the state of a run, decisions, and cache policies.

The samplers themselves are in `sinklens.families`. Each is a loop of one function per decision.
"""

from sinklens.sampling.key_cache import History, Keys, Policy
from sinklens.sampling.policies import (
    POLICIES,
    DelayedCache,
    DualCache,
    KeepSinks,
    NoCache,
    Planned,
    PrefixCache,
    Refresh,
    as_policy,
)
from sinklens.sampling.sampler import Sampler

__all__ = [
    "POLICIES",
    "DelayedCache",
    "DualCache",
    "History",
    "KeepSinks",
    "Keys",
    "NoCache",
    "Planned",
    "Policy",
    "PrefixCache",
    "Refresh",
    "Sampler",
    "as_policy",
]
