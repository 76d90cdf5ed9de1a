"""What ``where=`` of an intervention accepts: positions that may differ by row, step, layer and head.

Pitfall: the scores of a `Where` are those of the step before, so it finds nothing at step 0, unless it has a `source`.
"""

from dataclasses import dataclass
from typing import Any

from sinklens.errors import SettingError
from sinklens.interventions.choice import KeyChoice
from sinklens.runs.intervention import Intervention
from sinklens.sinks.detectors import Detector


@dataclass(frozen=True, kw_only=True)
class Where(KeyChoice):
    """Positions chosen by their scores at every step, for ``where=``: sinks, strongest keys, or a control of them.

        PatchHooks(source=kept.caches, where=Where(top_k=1, of=(3, 0)))  # follows the strongest key of head 3.0

    Attributes:
        top_k, detector, scope, pick, only, seed, persistent: the rule; see `ChoiceRule`.
        same_step, source: the step and the run of the scores; see `KeyChoice`.
        of: (layer, head) whose positions apply to every layer and head that the intervention changes. By default each
            head has its own positions; at a point without a head axis, those of any of the layer's heads.

    Raises:
        SettingError: settings that exclude each other.
    """

    of: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_rule()
        _ = self.track
        if self.of is not None and len(self.of) != 2:
            raise SettingError(f"of must be a pair (layer, head); got {self.of!r}.")


@dataclass(frozen=True, kw_only=True)
class AtPositions(Intervention):
    """Base class of interventions at positions that may follow the run.

    Attributes:
        where: limits the intervention to positions that may differ by row, step, layer and head; with `positions`, to
            those in both. One of:
            a `Where` or a detector: what it finds by the scores of the step before;
            a `SinkTrack` of another run of the same prompts: its sinks at the same step, as `EpsilonOverMean` defines
            them (for another definition pass ``track.detect(detector)``);
            states ("prompt", "masked", "committed") or token kinds ("digit", "newline", …), any of them; "not digit",
            for example, is all but digits. "mask" is "masked", and "decided" is "committed": a decided answer token;
            a boolean array [batch, step, layer, head, pos], each axis complete or of size 1; positions are columns of
            the canvas, as in a track. A DataArray may lack axes, and its steps are those of its coordinate;
            a function of the step, which returns ``positions=`` for it, a state or kind, a boolean array [batch, layer,
            head, pos], or None for nowhere.
    """

    where: Any = None


def follows_run(entry: Intervention) -> bool:
    """Whether the places of an intervention at a step may depend on what earlier steps of its run did."""
    where = entry.where if isinstance(entry, AtPositions) else None
    rule = where if isinstance(where, Where) else entry if where is None and isinstance(entry, KeyChoice) else None
    if rule is None:
        return isinstance(where, Detector) or callable(where)  # a function may keep what it saw
    earlier = rule.track is None or bool(rule.only) or rule.pick == "same_kind"  # scores or tokens of the step before
    return rule.persistent or (earlier and not rule.same_step)
