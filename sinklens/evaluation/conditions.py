"""Conditions: the interventions, or none, under which a model answers. Each *condition* has a name.

The conditions of one evaluation get the same samples and the same seed, so their verdicts can be compared sample by
sample. The ledger stores a condition as the repr of its interventions, which contains all their settings.

Pitfall: two interventions with the same repr would share their records. An intervention whose repr is incomplete, such
as one that holds a recorded run, is therefore refused. For an intervention defined outside sinklens the ledger also
stores a hash of the source of its class, but not of the code that the class calls.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError
from sinklens.interventions import Intervention, MaskSinks
from sinklens.interventions.controls import Pick
from sinklens.interventions.masking import Reach
from sinklens.interventions.selection import Scope

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

CONTROLS: tuple[Pick, ...] = ("random", "weakest")


@dataclass(frozen=True)
class Condition:
    """A named list of interventions.

    Attributes:
        name: its name in tables.
        hooks: interventions, in order; empty for the unmodified model.
        masked: keys masked per head (K), for tables and figures; None where this does not apply.
        pick: how those keys are chosen; "" if no keys are masked.
        of_unmasked: run each batch unmasked first, and let `MaskSinks` take its keys from that run.

    Raises:
        SettingError: an intervention holds a value that its repr does not fully describe, such as a recorded run, or
            keeps state outside its dataclass fields.
    """

    name: str
    hooks: tuple[Intervention, ...] = ()
    masked: int | None = None
    pick: str = ""
    of_unmasked: bool = False

    def __post_init__(self) -> None:
        for hook in self.hooks:
            _check_state_in_fields(hook)
            for entry in fields(hook):
                if not _is_plain(getattr(hook, entry.name)):
                    raise SettingError(
                        f"{type(hook).__name__}({entry.name}=...) is a {type(getattr(hook, entry.name)).__name__}, "
                        f"which the ledger cannot distinguish from another one; use interventions with plain settings."
                    )

    def described(self) -> dict[str, Any]:
        """The condition as plain JSON values; only equal conditions give equal values."""
        hooks = [repr(hook) for hook in self.hooks]
        entry = {"name": self.name, "hooks": hooks, "masked": self.masked, "pick": self.pick}
        code = [_code_hash(type(hook)) for hook in self.hooks if not type(hook).__module__.startswith("sinklens.")]
        return entry | ({"of_unmasked": True} if self.of_unmasked else {}) | ({"code": code} if code else {})

    def hooks_for(self, unmasked: "Callable[[], SinkTrack]") -> list[Intervention]:
        """The interventions of one batch; calls `unmasked` for the batch's unmasked run if they need it."""
        if not self.of_unmasked:
            return list(self.hooks)
        track = unmasked()
        return [replace(hook, source=track) if isinstance(hook, MaskSinks) else hook for hook in self.hooks]


def _check_state_in_fields(hook: Intervention) -> None:
    """Refuse an intervention with state outside its dataclass fields, which its repr would omit."""
    kind = type(hook)
    outside = sorted(vars(hook).keys() - {entry.name for entry in fields(hook)})
    if "__dataclass_params__" not in vars(kind) or outside:
        raise SettingError(
            f"{kind.__name__} keeps {', '.join(outside) or 'its settings'} outside dataclass fields, so the ledger "
            f"cannot distinguish it from another intervention; decorate the class with @dataclass(frozen=True) and "
            f"declare its settings as fields."
        )


def _code_hash(kind: type) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # defined without a source file, as in a plain REPL
        return ""


def _is_plain(value: Any) -> bool:
    """Whether the repr of a value identifies it: numbers, strings, and tuples or dataclasses of these."""
    if value is None or isinstance(value, str | int | float | range):
        return True
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return is_dataclass(value) and all(_is_plain(getattr(value, entry.name)) for entry in fields(value))


UNMASKED = Condition("unmasked", masked=0)


def masking(
    counts: Sequence[int],
    controls: Sequence[str] = (),
    *,
    scope: Scope = "head",
    queries: Reach = "newest",
    of_unmasked: bool = False,
    seed: int = 0,
) -> list[Condition]:
    """The study's conditions (Rulli et al., 2510.15731, Sec. 4.3): no masking, and K sinks masked for each K.

    Args:
        counts: values of K. "unmasked" is always included as the baseline.
        controls: "random" and "weakest": for each K also mask the same number of other keys.
        scope, queries: as in `MaskSinks`.
        of_unmasked: for each K also mask the sinks of the unmasked run at step t − 1. Otherwise a key that was masked
            at t − 1 received no attention there, does not count as a sink, and is spared at t; with this option such
            keys are masked at every step.
        seed: for random keys.

    Raises:
        SettingError: a negative count or an unknown control.
    """
    if any(count < 0 for count in counts):
        raise SettingError(f"counts of masked sinks must be 0 or more; got {', '.join(map(str, counts))}.")
    for control in controls:
        if control not in CONTROLS:
            raise SettingError(f"a control masks {' or '.join(CONTROLS)} keys; got {control!r}.")
    picks: list[Pick] = ["strongest", *(pick for pick in CONTROLS if pick in controls)]
    found = [UNMASKED]
    for count in sorted(set(counts) - {0}):
        for pick in picks:
            pick_seed = seed if pick == "random" else 0  # the other picks draw nothing
            hook = MaskSinks(top_k=count, pick=pick, scope=scope, queries=queries, seed=pick_seed)
            found.append(Condition(_name(count, pick, hook), (hook,), count, pick))
            if pick == "strongest" and of_unmasked:
                name = f"{_name(count, pick, hook)} of the unmasked run"
                found.append(Condition(name, (hook,), count, "steady", of_unmasked=True))
    return found


def _name(count: int, pick: Pick, hook: MaskSinks) -> str:
    noun = {"strongest": "sink", "random": "random key", "weakest": "weakest key"}[pick]
    suffixes = [f"one set per {hook.scope}"] * (hook.scope != "head") + ["for all queries"] * (hook.queries == "all")
    suffixes += [f"seed {hook.seed}"] * (hook.seed != 0)
    return ", ".join([f"{count} {noun}{'s' if count > 1 else ''}", *suffixes])
