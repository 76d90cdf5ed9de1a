"""How keys are chosen by their scores: the fields that interventions on sinks, `Where` and selections share.

Caveat: scores are those of the step before, so nothing is chosen at step 0; `same_step` and `source` change this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from sinklens.errors import SettingError
from sinklens.integers import as_integer, check_seed_of
from sinklens.interventions.controls import DRAWN, PICKS, Pick
from sinklens.sinks.strongest import check_only
from sinklens.sinks.track import SinkTrack, require_detector

if TYPE_CHECKING:
    from sinklens.runs.result import Generation
    from sinklens.sinks.detectors import Detector

Scope = Literal["head", "layer", "model"]
ITSELF: Literal["itself"] = "itself"


@dataclass(frozen=True, kw_only=True)
class ChoiceRule:
    """Which keys of a step are chosen by their scores.

    Attributes:
        top_k: number of strongest keys per head; None if `detector` chooses them. The paper masks 1, 5 and 10.
        detector: finds the keys in a one-step track; its strength is not used.
        scope: one set per "head", per "layer" (scores averaged over its heads), or for the "model".
        pick: "strongest", or other keys as a control:
            "weakest": as many of the weakest;
            "random": as many random keys that are weaker than all of the strongest;
            "random_any": as many random keys of any strength, possibly the strongest themselves;
            "same_mass": random keys of that rest, as many as together receive the attention of the strongest;
            "same_kind": for each of the strongest a random key of that rest with the same kind of token;
            "nearest": for each of the strongest the nearest position of that rest;
            "permuted": the strongest keys of another head, the same head throughout the run.
        only: states ("prompt", "masked", "committed") or token kinds that may be taken, any of them; "not digit", for
            example, leaves out digits.
        seed: seed of random keys, which depend only on the seed, the row's prompt, the step, the layer and the head.
        persistent: draw random keys once per run, not at every step: a key is replaced only while it may not be taken,
            as when it becomes one of the strongest. In an autoregressive run keys of the prompt are taken first,
            because only they exist at every step.
    """

    top_k: int | None = None
    detector: "Detector | None" = None
    scope: Scope = "head"
    pick: Pick = "strongest"
    only: str | Sequence[str] = ()
    seed: int = 0
    persistent: bool = False

    @property
    def only_names(self) -> tuple[str, ...]:
        """`only` as a tuple."""
        return as_tuple(self.only)

    def check_rule(self) -> None:
        """Reject settings that exclude each other.

        Raises:
            SettingError: neither or both of `top_k` and `detector`, an unknown name, a control without its scope, or an
                invalid seed.
        """
        if self.top_k is not None and self.detector is not None:
            raise SettingError("pass either top_k, a number of keys per head, or detector, not both.")
        if self.top_k is None and self.detector is None:
            raise SettingError(
                "no keys are named; pass top_k, a number of keys per head, or detector; an intervention also takes "
                "where=. positions= alone only restricts which of them count."
            )
        if self.detector is not None:
            require_detector(self.detector)
        count = as_integer(self.top_k)
        if self.top_k is not None and (count is None or count < 0):
            raise SettingError(f"top_k must be a number of keys, 0 or more; got {self.top_k}.")
        if self.pick not in PICKS:
            renamed = " It is now called 'random'." if self.pick == "random_rest" else ""
            raise SettingError(f"pick must be one of {', '.join(PICKS)}; got {self.pick!r}.{renamed}")
        if self.scope not in ("head", "layer", "model"):
            raise SettingError(f"scope must be 'head', 'layer' or 'model'; got {self.scope!r}.")
        if self.pick == "permuted" and self.scope != "head":
            raise SettingError(
                f"pick='permuted' exchanges sets of keys between heads, but scope={self.scope!r} makes all sets equal; "
                f"use scope='head'."
            )
        if self.persistent and self.pick not in DRAWN:
            raise SettingError(
                f"persistent=True needs random keys, pick={' or '.join(map(repr, DRAWN))}; pick={self.pick!r} draws "
                f"none. Leave it out."
            )
        check_only(self.only_names)
        check_seed_of(self)


@dataclass(frozen=True, kw_only=True)
class KeyChoice(ChoiceRule):
    """Which keys are chosen, and by the scores of which run and step.

    Attributes:
        same_step: use the scores of step t itself, from an unmasked pass before it; doubles the work, diffusion only.
        source: "itself", or another run of the same prompts, or its `sinks`: uses the scores of that run at step t − 1
            (at step t with `same_step`), by its recorded column sums, and nothing at steps that it lacks for the run or
            for a row. A part of a track holds the steps listed in its ``step`` coordinate.
    """

    same_step: bool = False
    source: "SinkTrack | Generation | Literal['itself']" = ITSELF

    @property
    def track(self) -> SinkTrack | None:
        """The recorded scores; None for those of the run itself.

        Raises:
            SettingError: `source` recorded no sinks, or is not a run.
        """
        if isinstance(self.source, str) and self.source == ITSELF:
            return None
        found = self.source if isinstance(self.source, SinkTrack) else getattr(self.source, "sinks", None)
        if not isinstance(found, SinkTrack):
            raise SettingError(
                f"source must be another run or its sinks; got {self.source!r}. A run made with record_sinks=False has "
                f"none; repeat it without that setting."
            )
        return found

    def is_default(self) -> bool:
        """Whether all but `top_k`, `detector` and `seed` have their default values."""
        return all(
            getattr(self, field.name) == field.default
            for field in fields(KeyChoice)
            if field.name not in ("top_k", "detector", "source", "seed")
        ) and (isinstance(self.source, str) and self.source == ITSELF)


def as_tuple(only: "str | Sequence[str]") -> tuple[str, ...]:
    """`only` as a tuple, from one name or several.

    Raises:
        SettingError: it is neither.
    """
    if not isinstance(only, Iterable):
        raise SettingError(f"give a name or a list of names; got {only!r}.")
    return (only,) if isinstance(only, str) else tuple(only)
