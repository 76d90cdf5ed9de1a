"""A cache policy in a run: which runs can have one, and the scores and queries that it reads.

Pitfall: what a policy reads is measured in the step before; step 0 has no step before it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklens.errors import require
from sinklens.model import Model
from sinklens.sampling import Policy
from sinklens.sampling.key_cache import KeyCache, PolicyCache
from sinklens.sampling.policies import as_policy
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State

OWN_CACHE = "its steps already reuse keys exactly. Leave cache= out; use_cache=False turns the exact cache off."
VARIABLES = {"fresh": ("layer", "pos"), "staleness": ("layer", "pos")}
"""Variables of a track under a policy: keys that the step computed; steps since each was, -1 for hidden keys."""


def recorded(keys: KeyCache | None) -> dict[str, np.ndarray]:
    """`VARIABLES` of the step that just ended; none without a policy."""
    if not isinstance(keys, PolicyCache):
        return {}
    fresh, staleness = keys.fresh.cpu().numpy(), keys.staleness().to(torch.int32).cpu().numpy()
    return {"fresh": fresh, "staleness": staleness}


def follow(cache: Any, model: Model, settings: Sampler, state: State) -> None:
    """Let a run reuse keys under the policy `cache`, an object or a name, if it is one that reuses any.

    Raises:
        SettingError: `cache` is not a policy, or this run cannot have one.
    """
    policy = as_policy(cache)
    if policy is not None:
        check_policy(model, settings, policy)
        state.cache_keys(policy)


def check_policy(model: Model, settings: Sampler, policy: Policy) -> None:
    """Refuse runs that a policy cannot apply to.

    Raises:
        SettingError: the model is not bidirectional or reads a noise level, or the settings need positions that a
            policy leaves out.
    """
    name, attention = type(policy).__name__, model.family_record.attention
    refused = {
        f"{name} is for bidirectional models; {model.name} is autoregressive, and {OWN_CACHE}": attention == "causal",
        f"{name} is for bidirectional models; {model.name} is block-causal, and {OWN_CACHE}": attention
        == "block-causal",
        f"{name} is for bidirectional models; the attention of {model.name} changes from pass to pass, and its steps "
        f"reuse keys exactly with use_cache=True. Leave cache= out.": attention == "per-pass",
        f"{name} is for bidirectional models; the encoder of {model.name} already keeps the keys of the text before "
        f"the canvas. Leave cache= out.": attention == "encoder-decoder",
        f"{name} reuses keys of earlier steps, and those of {model.name} change with the noise level of each step; "
        f"leave cache= out.": model.tree.timed,
        f"{name} computes passes over the complete text, and the {settings.name} sampler slides a window over it; "
        f"leave cache= out.": settings.slides,
        f"{name} does not support guidance; leave cfg_scale out, or cache=.": settings.guided,
        f"{settings.judges_all_by} judges every answer position in every step, which {name} does not compute; choose "
        f"another, or leave cache= out.": bool(settings.judges_all_by),
    }
    for text, applies in refused.items():
        require(not applies, text)


def read_by_policy(keys: KeyCache | None) -> list[tuple[Any, Callable[[Tensor], None]]]:
    """The points whose scores a policy reads, and the functions that collect them."""
    if not isinstance(keys, PolicyCache) or not keys.policy.reads_scores:
        return []
    points = keys.tree.hook_dict
    return [(points[f"blocks.{n}.attn.hook_sink_scores"], partial(keys.see, n)) for n in range(keys.layers)]
