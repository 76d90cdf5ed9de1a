"""What is done to a model while it answers: nothing, or interventions; each such *condition* has a name.

The conditions of one evaluation get the same samples and the same seed, so their verdicts can be compared sample by
sample. A condition is written into the ledger by the text of its interventions, which holds all their settings.

One way this fails: an intervention whose text does not tell it from another, such as one that holds a whole recorded
run, would share the other's records. Such interventions are refused. Of an intervention from outside sinklens the code
of its class is told too, but not the code of what that calls.
"""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError
from sinklens.interventions import Intervention, MaskSinks
from sinklens.interventions.masking import Reach
from sinklens.interventions.selection import Pick, Scope

if TYPE_CHECKING:
    from sinklens.sinks.track import SinkTrack

CONTROLS: tuple[Pick, ...] = ("random", "weakest")


@dataclass(frozen=True)
class Condition:
    """What is done to a model.

    Attributes:
        name: how tables call it.
        hooks: interventions, in order; none for the model as it is.
        masked: keys masked per head (K), for tables and pictures; None where that is no question.
        pick: how those keys are chosen; "" where none are.
        of_unmasked: each batch runs unmasked first, and its `MaskSinks` take their keys from that run.

    Raises:
        SettingError: an intervention holds something that its text does not tell, such as a recorded run, or a value
            that is no field.
    """

    name: str
    hooks: tuple[Intervention, ...] = ()
    masked: int | None = None
    pick: str = ""
    of_unmasked: bool = False

    def __post_init__(self) -> None:
        for hook in self.hooks:
            _check_told(hook)
            for entry in fields(hook):
                if not _is_plain(getattr(hook, entry.name)):
                    raise SettingError(
                        f"{type(hook).__name__}({entry.name}=...) is a {type(getattr(hook, entry.name)).__name__}, and "
                        f"its records could not be told from another's; use interventions with plain settings."
                    )

    def described(self) -> dict[str, Any]:
        """As plain JSON values; equal for equal conditions only."""
        hooks = [repr(hook) for hook in self.hooks]
        told = {"name": self.name, "hooks": hooks, "masked": self.masked, "pick": self.pick}
        code = [_code_hash(type(hook)) for hook in self.hooks if not type(hook).__module__.startswith("sinklens.")]
        return told | ({"of_unmasked": True} if self.of_unmasked else {}) | ({"code": code} if code else {})

    def hooks_for(self, unmasked: "Callable[[], SinkTrack]") -> list[Intervention]:
        """The interventions of one batch; `unmasked` is asked for its unmasked run where they need it."""
        if not self.of_unmasked:
            return list(self.hooks)
        track = unmasked()
        return [replace(hook, source=track) if isinstance(hook, MaskSinks) else hook for hook in self.hooks]


def _check_told(hook: Intervention) -> None:
    """Refuse an intervention with a state that is none of its fields, which its text would leave out."""
    kind = type(hook)
    untold = sorted(vars(hook).keys() - {entry.name for entry in fields(hook)})
    if "__dataclass_params__" not in vars(kind) or untold:
        raise SettingError(
            f"{kind.__name__} keeps {', '.join(untold) or 'its settings'} outside the fields of a dataclass, and its "
            f"records could not be told from another's; write @dataclass(frozen=True) above the class, and its "
            f"settings as fields."
        )


def _code_hash(kind: type) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # made where there is no file, as in a plain REPL
        return ""


def _is_plain(value: Any) -> bool:
    """Whether the text of a value tells it from every other: numbers, names, and tuples or records of these."""
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
        counts: K; "unmasked" is always among the conditions, as what the others are compared with.
        controls: "random" and "weakest": the same number of other keys, for each K.
        scope, queries: as in `MaskSinks`.
        of_unmasked: for each K also the sinks of the unmasked run at step t − 1. In the run itself a key that was
            masked at t − 1 got no attention there, is no sink, and is spared at t; these are masked at every step.
        seed: of random keys.

    Raises:
        SettingError: a negative count or an unknown control.
    """
    if any(count < 0 for count in counts):
        raise SettingError(f"numbers of masked sinks are 0 or more; got {', '.join(map(str, counts))}.")
    for control in controls:
        if control not in CONTROLS:
            raise SettingError(f"a control masks {' or '.join(CONTROLS)} keys; got {control!r}.")
    picks: list[Pick] = ["strongest", *(pick for pick in CONTROLS if pick in controls)]
    found = [UNMASKED]
    for count in sorted(set(counts) - {0}):
        for pick in picks:
            chance = seed if pick == "random" else 0  # nothing else is drawn
            hook = MaskSinks(top_k=count, pick=pick, scope=scope, queries=queries, seed=chance)
            found.append(Condition(_name(count, pick, hook), (hook,), count, pick))
            if pick == "strongest" and of_unmasked:
                name = f"{_name(count, pick, hook)} of the unmasked run"
                found.append(Condition(name, (hook,), count, "steady", of_unmasked=True))
    return found


def _name(count: int, pick: Pick, hook: MaskSinks) -> str:
    what = {"strongest": "sink", "random": "random key", "weakest": "weakest key"}[pick]
    more = [f"one set per {hook.scope}"] * (hook.scope != "head") + ["for all queries"] * (hook.queries == "all")
    more += [f"seed {hook.seed}"] * (hook.seed != 0)
    return ", ".join([f"{count} {what}{'s' if count > 1 else ''}", *more])
