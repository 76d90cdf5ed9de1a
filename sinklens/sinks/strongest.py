"""The strongest keys of a kind of token, and only where they are sinks, or only where they are not.

Every head has a strongest key at every step; it is a sink only where it stands out. A key can be strong because of what
its token says: a digit that an answer has to copy is attended to for its content. `StrongestKeys` selects by token and
by sink, so that a study can separate the two. Names of states and kinds (``only=``) are as in
`sinklens.interventions.MaskSinks`.

Pitfall: the strongest digit of a head may be its fifth strongest key. Its rank among all keys, and how often it is a
sink, differ between kinds; with ``overall=True`` only keys of the same rank are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xarray as xr
from jaxtyping import Bool, Int

from sinklens.errors import nearest, require
from sinklens.sinks.data import TrackData
from sinklens.sinks.detectors import Detector, EpsilonOverMean
from sinklens.sinks.kinds import STATES, Kind, PlaceState, kinds, states
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Count, as_tuple, checked, plainly_shown

Part = Literal["all", "sink", "other"]
SYNONYMS = {"mask": "masked", "decided": "committed"}
"""Further names of states."""
KIND_NAMES = tuple(kind.name.lower() for kind in Kind if kind not in (Kind.MISSING, Kind.MASK))
NOT = "not "


def check_only(only: Sequence[str], argument: str = "only") -> None:
    """Check names of states and token kinds, each possibly after "not "; `argument` is how the error names them.

    Raises:
        SettingError: an unknown name.
    """
    known = [*STATES, *SYNONYMS, *KIND_NAMES]
    for name in only:
        require(
            str(name).removeprefix(NOT) in known,
            f"{argument}= takes states or token kinds, or 'not' and one of them; {name!r} is neither. Known: "
            f"{', '.join(known)}.{nearest(str(name).removeprefix(NOT), known)}",
        )


def needs_text(only: Sequence[str]) -> bool:
    """Whether `only` names a token kind."""
    return any(name.removeprefix(NOT) in KIND_NAMES for name in only)


def in_only(
    only: Sequence[str], states: Int[np.ndarray, "*places"], codes: "Int[np.ndarray, '*places'] | None"
) -> Bool[np.ndarray, "*places"]:
    """Places in any set that `only` names (in all, if each name begins with "not ") and in none named with "not ".

    Args:
        states: the `PlaceState` of each place.
        codes: the `Kind` of each place; needed where `only` names a kind.
    """

    def union(names: Sequence[str]) -> np.ndarray:
        found = np.zeros(states.shape, dtype=bool)
        for name in names:
            values, enum = (codes, Kind) if name in KIND_NAMES else (states, PlaceState)
            found = found | (values == int(enum[SYNONYMS.get(name, name).upper()]))
        return found

    kept = [name for name in only if not name.startswith(NOT)]
    left_out = union([name.removeprefix(NOT) for name in only if name.startswith(NOT)])
    return ~left_out & (union(kept) if kept else True)


@plainly_shown
@dataclass(frozen=True)
class StrongestKeys(Detector):
    """The `k` strongest keys of a kind, per head and step: all of them, only the sinks, or only the others.

    A head whose scores are all 0 has no strongest key. The first of equal keys is taken.

    Attributes:
        k: how many keys; fewer where fewer exist.
        only: states or token kinds that may be taken, as in `MaskSinks`; none means all.
        part: "all" of them; only those that are a "sink", or only the "other" ones.
        sink: the definition of a sink.
        overall: take the `k` strongest keys of any kind first, and of these the ones in `only`.

    Raises:
        SettingError: an unknown part or name, or fewer than one key.
    """

    k: Count = 1
    only: str | tuple[str, ...] = ()
    part: Part = "all"
    sink: Detector = field(default_factory=EpsilonOverMean)
    overall: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_only(as_tuple(self.only))

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        score = track.scores()
        values = score.fillna(-np.inf).where((score > 0).any("pos"), -np.inf)
        allowed = self._allowed(track) if self.only else values > -np.inf
        if not self.overall:
            values = values.where(allowed, -np.inf)
        order = np.argsort(-values.to_numpy(), axis=-1, kind="stable")[..., : self.k]
        found = np.zeros(score.shape, dtype=bool)
        np.put_along_axis(found, order, True, axis=-1)
        strongest = (score.copy(data=found) & (values > -np.inf) & allowed).transpose(*score.dims)
        if self.part == "all":
            return strongest
        sinks = self.sink.detect(track)
        return strongest & (sinks if self.part == "sink" else ~sinks)

    def _allowed(self, track: TrackData) -> xr.DataArray:
        """Places in `only`, [batch, step, pos]."""
        part = SinkTrack(track.data)
        state = states(part)
        codes = kinds(part).to_numpy() if needs_text(as_tuple(self.only)) else None
        return state.copy(data=in_only(as_tuple(self.only), state.to_numpy(), codes))


@dataclass(frozen=True)
class Marked(Detector):
    """The keys that a boolean variable of the track marks, for detectors that are slow to evaluate at every step.

    ``mark(track, {"digits": StrongestKeys(only="digit")})`` returns the track with such variables; pass it as the
    `source` of an intervention.

    Attributes:
        name: name of the variable.
    """

    name: str

    @checked
    def detect(self, track: TrackData) -> xr.DataArray:
        return track[self.name]


def mark(track: SinkTrack, detectors: Mapping[str, Detector]) -> SinkTrack:
    """`track` with one variable for each detector, which `Marked` reads."""
    return SinkTrack(track.data.assign({name: detector.detect(track) for name, detector in detectors.items()}))
