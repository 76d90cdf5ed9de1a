"""Conditions: named sets of interventions under which a model answers, with or without a cache policy.

The conditions of one evaluation get the same samples and the same seed, so their verdicts can be compared sample by
sample. The ledger stores a condition as the identity of its interventions and policy (identity.py), which covers their
settings, recorded runs that they hold, and the source of classes defined outside sinklens.

Pitfall: the identity does not cover the code that such a class calls. Two interventions that differ only there share
records.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sinklens.errors import nearest, require
from sinklens.interventions import Intervention, MaskKeys, MaskSinks, Where
from sinklens.interventions.controls import DRAWN, Pick
from sinklens.interventions.places import AtKeys, Reach
from sinklens.interventions.rules import as_rule
from sinklens.runs.identity import identify
from sinklens.runs.intervention import whole_numbers
from sinklens.runs.request import hook_list
from sinklens.sampling import Policy
from sinklens.sampling.policies import as_policy, policy_name
from sinklens.sinks import StrongestKeys
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Seed, as_tuple, checked

CONTROLS: dict[str, tuple[Pick, bool, str]] = {
    "random": ("random", True, "random key"),
    "random_any": ("random_any", False, "random key of any strength"),
    "weakest": ("weakest", False, "weakest key"),
    "same_mass": ("same_mass", True, "random key of the same mass"),
    "same_kind": ("same_kind", True, "random key of the same kind"),
    "nearest": ("nearest", False, "nearest key"),
}
"""Control -> the `pick` of `MaskSinks`, whether keys persist over the steps, and the name of one key."""


@dataclass(frozen=True)
class Condition:
    """A named list of interventions, and a cache policy.

    Attributes:
        name: its name in tables.
        hooks: interventions, in order; empty for the unmodified model.
        masked: keys masked per head (K), for tables and figures; None where this does not apply.
        pick: how those keys are chosen; "" if no keys are masked.
        of_unmasked: run each batch unmasked first, and let `MaskSinks` and `AblateValues` take keys from that run.
        cache: the cache policy of these runs; None computes every position in every step.
        control_of: the name of the condition that this one is a control of; tables compare the two on the same samples.
            "" for a condition that is not a control, and for those of `masking`, which tables pair by their settings.

    Raises:
        SettingError: `hooks` are not interventions; an intervention or the policy cannot be identified, see
            `sinklens.runs.identity.identify`; or the condition is a control of itself.
    """

    name: str
    hooks: tuple[Intervention, ...] = ()
    masked: int | None = None
    pick: str = ""
    of_unmasked: bool = False
    cache: Policy | None = None
    control_of: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache", as_policy(self.cache))
        object.__setattr__(self, "hooks", tuple(hook_list(self.hooks)))
        require(
            self.control_of != self.name,
            f"{self.name!r} cannot be a control of itself; name the condition it is a control of.",
        )
        other = next((hook for hook in self.hooks if not isinstance(hook, Intervention)), None)
        require(
            other is None,
            f"the hooks of a condition are interventions, whose settings the ledger records; got {other!r:.80}. "
            f"For a function of your own, write a subclass of Intervention.",
        )
        self.described()  # refuses what cannot be identified

    def described(self) -> dict[str, Any]:
        """The condition as plain JSON values; only equal conditions give equal values."""
        hooks = [identify(hook) for hook in self.hooks]
        cache = None if self.cache is None else identify(self.cache)
        code = list(dict.fromkeys(text for one in (*hooks, *([cache] if cache else [])) for text in one.code))
        entry = {"name": self.name, "hooks": [hook.text for hook in hooks], "masked": self.masked, "pick": self.pick}
        entry |= {"of_unmasked": True} if self.of_unmasked else {}
        entry |= {"control_of": self.control_of} if self.control_of else {}
        entry |= {"cache": cache.text} if cache else {}
        return entry | ({"code": code} if code else {})

    def hooks_for(self, unmasked: "Callable[[], SinkTrack]") -> list[Intervention]:
        """The interventions of one batch; calls `unmasked` for the batch's unmasked run if they need it."""
        if not self.of_unmasked:
            return list(self.hooks)
        track = unmasked()

        def of_unmasked(where: Where) -> Where:
            return replace(where, source=track) if where.track is None else where

        return [
            replace(hook, where=as_rule(hook.where).mapped(of_unmasked))
            if isinstance(hook, AtKeys) and hook.where is not None
            else hook
            for hook in self.hooks
        ]


UNMASKED = Condition("unmasked", masked=0)


@checked
def masking(
    counts: Sequence[int],
    controls: Sequence[str] = (),
    *,
    queries: Reach = "newest",
    of_unmasked: bool = False,
    sinks_only: bool = False,
    seed: Seed = 0,
) -> list[Condition]:
    """The study's conditions (Rulli et al., 2510.15731, Sec. 4.3): no masking, and K sinks masked for each K.

    Args:
        counts: values of K. "unmasked" is always included as the baseline.
        controls: for each K also mask other keys in the same heads and steps, the same number unless stated otherwise:
            "random", random keys weaker than the strongest, drawn once per run, since sinks last too; "same_kind", keys
            with the same kinds of token; "same_mass", keys that are not sinks and together receive as much attention in
            the unmasked run as a layer's strongest; "nearest", the nearest positions; "weakest"; "random_any", drawn at
            every step and possibly among the strongest.
        queries: as in `MaskSinks`.
        of_unmasked: for each K also mask the sinks of the unmasked run at step t − 1. Otherwise a key that was masked
            at t − 1 received no attention there, does not count as a sink, and is spared at t; with this option such
            keys are masked at every step. Controls of the strongest keys then take those of the unmasked run.
        sinks_only: for each K also mask only those of the K strongest keys that are sinks by Eq. 3, so that a head
            without a sink loses nothing.
        seed: for random keys.

    Raises:
        SettingError: a count that is not an integer of at least 0; an unknown control; an invalid seed.
    """
    numbers = whole_numbers("count", counts)
    require(
        not any(count < 0 for count in numbers),
        f"counts of masked sinks must be 0 or more; got {', '.join(map(str, counts))}.",
    )
    for control in controls:
        require(
            control in CONTROLS,
            f"a control is one of {', '.join(CONTROLS)}; got {control!r}.{nearest(control, CONTROLS)}",
        )
    found = [UNMASKED]
    for count in sorted(set(numbers) - {0}):
        strongest = MaskSinks(top_k=count, queries=queries)
        name = _name(count, "sink", strongest)
        found.append(Condition(name, (strongest,), count, "strongest"))
        if sinks_only:
            detected = MaskSinks(detector=StrongestKeys(k=count, part="sink"), queries=queries)
            found.append(Condition(f"{name}, only by Eq. 3", (detected,), count, "strongest"))
        if of_unmasked:
            found.append(Condition(f"{name} of the unmasked run", (strongest,), count, "steady", of_unmasked=True))
        found += [_control(count, name, strongest, of_unmasked, seed) for name in CONTROLS if name in controls]
    return found


@checked
def under_caches(
    conditions: Condition | Sequence[Condition], caches: "str | Policy | Sequence[str | Policy]"
) -> list[Condition]:
    """The conditions in exact runs, followed by the same conditions under each cache policy.

    Args:
        conditions: e.g. ``[UNMASKED]``, for the cost of the policies alone.
        caches: policies, or names such as "dual" and "keep-sinks:4"; `NoCache` adds nothing.

    Raises:
        SettingError: an unknown policy, or a condition that has a policy already.
    """
    conditions, policies = as_tuple(conditions), [one for one in map(as_policy, as_tuple(caches)) if one is not None]
    names = [policy_name(policy) for policy in policies]
    given = next((condition.name for condition in conditions if condition.cache is not None), None)
    require(
        not policies or given is None,
        f"the condition {given!r} has a cache policy already; drop cache=, or that policy.",
    )
    return [*conditions, *(
        replace(one, name=f"cache {name}" if one == UNMASKED else f"{one.name}, cache {name}", cache=policy,
                control_of=one.control_of and f"{one.control_of}, cache {name}")
        for name, policy in zip(names, policies, strict=True) for one in conditions
    )]  # fmt: skip


def unpaired(controls: Mapping[str, str], names: Collection[str]) -> str:
    """A warning if `names` lack a condition that has controls (name -> `Condition.control_of`); else ""."""
    texts = [
        f"{name!r} is a control of {of!r}, which is not evaluated, so it is compared with nothing.{nearest(of, names)}"
        for name, of in controls.items()
        if of and of not in names
    ]
    return " ".join(texts)


def _control(count: int, control: str, strongest: MaskKeys, of_unmasked: bool, seed: int) -> Condition:
    pick, persistent, noun = CONTROLS[control]
    seed = seed if pick in DRAWN else 0  # the others draw nothing
    hook = replace(strongest, where=replace(strongest.where, pick=pick, persistent=persistent, seed=seed))
    # once keys are masked, the attention is not theirs
    steady = (of_unmasked and pick not in ("random_any", "weakest")) or pick == "same_mass"
    return Condition(_name(count, noun, hook), (hook,), count, control, of_unmasked=steady)


def _name(count: int, noun: str, hook: MaskKeys) -> str:
    head, space, tail = noun.partition(" of ")
    keys: Any = hook.where
    suffixes = ["for all queries"] * (hook.queries == "all") + [f"seed {keys.seed}"] * (keys.seed != 0)
    return ", ".join([f"{count} {head}{'s' if count > 1 else ''}{space}{tail}", *suffixes])
