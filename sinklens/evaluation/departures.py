"""How a run differs from the protocol it names, and how its unmasked accuracy compares with published scores.

A run keeps the name of its protocol if settings are changed (``--protocol llada-base-gsm8k --steps 128``). The ledger
records the settings that were used, so the differences are found from it alone, also in ledgers of other machines and
earlier versions.

Pitfall: a run without departures can still differ in settings that the source leaves open; see
`EvalProtocol.unstated`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sinklens.errors import SettingError
from sinklens.evaluation.protocols import PROTOCOLS, EvalProtocol
from sinklens.evaluation.published import Published
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import make_settings
from sinklens.utils.estimates import Estimate, unpaired

OF_TASK = ("task", "shots", "extractor", "chat_template", "sampler")


def departures(what: Mapping[str, Any]) -> list[str]:
    """The settings of a run that are not those of the protocol it names, e.g. "steps 128, not 1024".

    Empty also for a task without a protocol, or a protocol that this version does not know.
    """
    protocol = PROTOCOLS.get(str(what["protocol"]["name"]))
    if protocol is None:
        return []
    wanted = protocol.what
    given = what["protocol"]
    found = [_text(name, given.get(name), wanted.get(name)) for name in OF_TASK if given.get(name) != wanted.get(name)]
    return found + _of_sampler(what, protocol)


def _of_sampler(what: Mapping[str, Any], protocol: EvalProtocol) -> list[str]:
    sampler = str(what["sampler"])
    stated = protocol.of(sampler)
    if protocol.settings and not stated:
        return [f"the {sampler} sampler, for which {protocol.name} states nothing"]
    try:
        known = find_sampler(sampler).setting_names()
        lengths = {
            name: value for name, value in what["settings"].items() if name in ("gen_length", "steps") and name in known
        }
        expected = vars(make_settings(sampler, lengths | stated, {})) if stated else {}  # lengths may be left open
    except SettingError:  # a sampler that is not installed here, or settings that need the checkpoint's
        expected = stated
    return [
        _text(name, value, expected[name], "" if name in stated else ", the sampler's default")
        for name, value in what["settings"].items()
        if name in expected and value != expected[name]
    ]


def _text(name: str, value: Any, wanted: Any, whose: str = "") -> str:
    words = {None: "unset", True: "on", False: "off"}
    got, right = (words[one] if one is None or isinstance(one, bool) else str(one) for one in (value, wanted))
    return f"{name} {got}, not {right}{whose}"


@dataclass(frozen=True)
class Baseline:
    """An unmasked accuracy beside a published score of the same model and protocol.

    Attributes:
        published: the score.
        accuracy: the unmasked one.
        departs: how the run differs from the protocol; the two are compared only if this is empty.
        gap: accuracy minus published score; None if the source states no number, or the run departs.
    """

    published: Published
    accuracy: Estimate
    departs: tuple[str, ...]
    gap: Estimate | None

    @property
    def verdict(self) -> str:
        """ "agrees", "below" or "above" by the interval of `gap`; "departs", or "no number"."""
        if self.gap is None:
            return "no number" if self.published.score is None else "departs"
        return "below" if self.gap.high < 0 else "above" if self.gap.low > 0 else "agrees"


def baselines(protocol: str, model: str, accuracy: Estimate, departs: tuple[str, ...]) -> list[Baseline]:
    """The published scores of a model under a protocol without intervention, each beside `accuracy`.

    Samples that the run lacks are a departure: the published score is of the complete test set.
    """
    found = []
    for score in PROTOCOLS[protocol].published if protocol in PROTOCOLS else ():
        if not score.masked and score.of(model) and accuracy.n:
            part = bool(score.samples and accuracy.n < score.samples)
            missing = (f"{accuracy.n} of {score.samples:,} samples",) if part else ()
            gap = None if departs or score.accuracy is None else unpaired(score.accuracy, accuracy)
            found.append(Baseline(score, accuracy, (*departs, *missing), gap))
    return found
