"""Tables of a ledger: accuracy under each condition, paired with the unmasked run of the same model.

Runs that differ only in their condition form a *group*: one model under one protocol. Within a group, every condition
is compared with "unmasked", on the samples that both have, and with its control. The control of masked sinks is the
same number of random keys, selected and masked in the same manner (the first of several seeds). The control of any
other condition is the one whose `Condition.control_of` names it. p values (McNemar's exact test) are corrected by
Holm's method over a group's comparisons of one kind, with "unmasked" or with controls. A condition under a cache policy
is compared with the exact unmasked run, and its controls are those under the same policy.

Caveat: a model's results differ in the last bits between device types, and so can its answers. Runs on different device
types are not paired unless requested.
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinklens.errors import ControlWarning, LedgerError, SettingError
from sinklens.evaluation.conditions import CONTROLS, unpaired
from sinklens.evaluation.departures import departures
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, data_difference
from sinklens.evaluation.lines import Line, regime_of
from sinklens.evaluation.protocols import PROTOCOLS
from sinklens.evaluation.published import STUDY
from sinklens.evaluation.scoring import verdicts
from sinklens.evaluation.statistics import Accuracy, Paired, holm, paired

PICKS = ("", "strongest", "steady", *CONTROLS)  # in the order of a table


class _Against(NamedTuple):
    """A comparison with another run, or why there is none."""

    pair: Paired | None
    missing: str


@dataclass(frozen=True)
class _ScoredRun:
    """A run, its records that have a verdict (or all, if none has), the verdicts by sample, and the unscored count."""

    run: LedgerRun
    records: Mapping[str, LedgerRecord]
    verdicts: Mapping[str, bool]
    unscored: int

    @property
    def condition(self) -> dict[str, Any]:
        return dict(self.run.what["condition"])

    @property
    def name(self) -> str:
        return str(self.condition["name"])

    @property
    def controls(self) -> str:
        """The name of the condition that it is a control of, or ""."""
        return str(self.condition.get("control_of", ""))

    @property
    def devices(self) -> set[str]:
        return {str(record["device"]) for record in self.records.values()}


def read_lines(ledger: str | Path, *, mixed_devices: bool = False) -> list[Line]:
    """Every condition of every group of a ledger, groups in order of task, protocol and model.

    Args:
        mixed_devices: pair runs on different device types, too.

    Raises:
        LedgerError: there is no ledger, it holds no finished sample, or conditions were evaluated on different data.
        SettingError: runs to pair were made on different device types.

    Warns:
        UserWarning: generated programs have not been run, listed by run; see `Line.unscored`.
        ControlWarning: a condition is a control of one that its group does not include.
    """
    read = [_read(run) for run in LedgerRun.all(Path(ledger))]
    left_out = _unscored(read, ledger)
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    groups: dict[str, list[_ScoredRun]] = {}
    for one in read:
        if one.records:
            groups.setdefault(json.dumps(_group(one.run), sort_keys=True), []).append(one)
    if not groups:
        raise LedgerError(f"{ledger} holds no finished sample yet; rerun `sinklens evaluate` to resume.")
    names = _names([json.loads(key) for key in groups])
    lines = []
    for name, members in zip(names, groups.values(), strict=True):
        lines += _lines(name, sorted(members, key=_order), mixed_devices)
    return sorted(lines, key=lambda line: (line.task, line.protocol, line.model))


def _read(run: LedgerRun) -> _ScoredRun:
    records = {str(record["sample"]): record for record in run.records()}
    found = verdicts(run) if records else {}
    kept = {sample: records[sample] for sample in records if sample in found or not found}
    return _ScoredRun(run, kept, found, len(records) - len(found))


def _unscored(read: Sequence[_ScoredRun], ledger: str | Path) -> str:
    """The warning about unscored programs; empty if there are none."""
    left = [f"{one.unscored} of {one.run.what['model']} ({one.condition['name']})" for one in read if one.unscored]
    if not left:
        return ""
    return (
        f"Generated programs that have not been run are excluded from all accuracies: {', '.join(left)}. "
        f"`sinklens score {ledger} --run-generated-code` runs them, in isolation."
    )


def _group(run: LedgerRun) -> dict[str, Any]:
    return {name: value for name, value in run.what.items() if name != "condition"}


def _order(read: _ScoredRun) -> tuple[str, float | int, int, str]:
    condition = read.condition
    masked = condition["masked"]
    place = PICKS.index(condition["pick"]) if condition["pick"] in PICKS else len(PICKS)
    return condition.get("cache", ""), math.inf if masked is None else masked, place, str(condition["hooks"])


def _names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """The model's name for each group, with the settings that distinguish groups of the same name."""
    found = []
    for group in groups:
        namesakes = [other for other in groups if _label(other) == _label(group)]
        differing = {name for other in namesakes for name, _ in {*_flat(other)} ^ {*_flat(group)}}
        details = [f"{name.rpartition('.')[2]} {value}" for name, value in _flat(group) if name in differing]
        found.append(f"{group['model']} ({', '.join(details)})" if details else str(group["model"]))
    return found


def _label(group: Mapping[str, Any]) -> tuple[str, str]:
    return str(group["protocol"]["name"]), str(group["model"])


def _flat(group: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Names and values as text, with nested dictionaries flattened; of the protocol only the settings of the task."""
    found = []
    for name, value in sorted(group.items()):
        if isinstance(value, Mapping) and name != "protocol":
            found += _flat(value, f"{before}{name}.")
        elif name == "protocol":
            found += [(f"protocol.{key}", str(value[key])) for key in ("chat_template", "extractor", "shots", "task")]
        else:
            found.append((f"{before}{name}", str(value)))
    return found


def _lines(name: str, members: Sequence[_ScoredRun], mixed_devices: bool) -> list[Line]:
    base = next((one for one in members if not one.condition["hooks"] and "cache" not in one.condition), None)
    if note := unpaired({one.name: one.controls for one in members}, [one.name for one in members]):
        warnings.warn(note, ControlWarning, stacklevel=3)
    lines = []
    for one in members:
        control = _control_of(one, members)
        treated = one.condition["hooks"] and not one.controls and one.condition["pick"] not in CONTROLS
        lines.append(
            _line(
                name, one,
                _Against(None, "") if one is base else _against(base, one, "no unmasked run", mixed_devices),
                _against(control, one, "no control" if treated else "", mixed_devices),
                math.nan if base is None or one is base else _speed(base, one),
                "" if control is None else control.name,
            )
        )  # fmt: skip
    return _corrected(lines)


def _control_of(read: _ScoredRun, members: Sequence[_ScoredRun]) -> _ScoredRun | None:
    """The first control of a run: one that names its condition, or random keys masked in the same manner."""
    named = [one for one in members if one.controls == read.name]
    if len(named) > 1:
        others = ", ".join(repr(one.name) for one in named[1:])
        warnings.warn(
            f"{read.name!r} has several controls; it is compared with {named[0].name!r}, not with {others}.",
            ControlWarning,
            stacklevel=4,
        )
    if not named and read.condition["pick"] in ("strongest", "steady"):
        random = [one for one in members if one.condition["pick"] == "random" and not one.controls]
        named = [one for one in random if _masking_key(one) == _masking_key(read)]
    return named[0] if named else None


def _against(other: _ScoredRun | None, read: _ScoredRun, absent: str, mixed_devices: bool) -> _Against:
    """The comparison with `other`, or why there is none: `absent` without another run."""
    if other is None:
        return _Against(None, absent)
    pair = _pair(other, read, mixed_devices)
    unscored = not (other.verdicts and read.verdicts)
    return _Against(pair, "" if pair is not None else "not scored" if unscored else "no shared samples")


def _masking_key(read: _ScoredRun) -> str:
    """The number of masked keys, all masking settings except which keys are picked, and the cache policy."""
    hooks = [re.sub(r"pick='\w*'|seed=\d+|persistent=\w+", "", hook) for hook in read.condition["hooks"]]
    return json.dumps([read.condition["masked"], hooks, read.condition.get("cache")])


def _pair(base: _ScoredRun, changed: _ScoredRun, mixed_devices: bool) -> Paired | None:
    """Paired verdicts on the samples that both runs have; None if they share none."""
    if not base.verdicts or not changed.verdicts:
        return None
    devices = base.devices | changed.devices
    if len(devices) > 1 and not mixed_devices:
        raise SettingError(
            f"{base.run.what['model']} ran on {' and '.join(sorted(devices))} under {base.condition['name']!r} and "
            f"{changed.condition['name']!r}, and verdicts from different device types are not paired. Run both on one "
            f"device type, or give mixed_devices=True (--mixed-devices)."
        )
    shared = sorted(base.verdicts.keys() & changed.verdicts.keys())
    if not shared:
        return None
    for sample in shared:
        if data_difference(base.records[sample], changed.records[sample]) == "prompt":
            raise LedgerError(
                f"{base.run.what['model']} got different prompts for {sample} under {base.condition['name']!r} and "
                f"{changed.condition['name']!r}, so their verdicts cannot be paired. Evaluate one of them again on the "
                f"data of the other, or keep them in separate folders ({base.run.folder}, {changed.run.folder})."
            )
    first, second = (np.array([one.verdicts[sample] for sample in shared]) for one in (base, changed))
    return paired(first, second)


def _speed(base: _ScoredRun, changed: _ScoredRun) -> float:
    """Seconds of `base` over those of `changed` on the samples that both have; NaN without such samples."""
    shared = base.records.keys() & changed.records.keys()
    first, second = (sum(one.records[sample]["seconds"] for sample in shared) for one in (base, changed))
    return first / second if second else math.nan


def _line(
    name: str, read: _ScoredRun, against_unmasked: _Against, against_random: _Against, speed: float, control: str
) -> Line:
    what, condition, records = read.run.what, read.condition, list(read.records.values())
    seconds = sum(record["seconds"] for record in records)
    formed = _formed(read)

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    return Line(
        task=what["protocol"]["task"],
        protocol=what["protocol"]["name"],
        model=name,
        condition=condition["name"],
        masked=condition["masked"],
        pick=condition["pick"],
        accuracy=Accuracy(sum(read.verdicts.values()), len(read.verdicts)),
        against_unmasked=against_unmasked.pair,
        against_random=against_random.pair,
        chance=mean(record["chance"] for record in records),
        malformed=math.nan if formed is None else 1 - formed.total / len(records),
        formed=formed,
        empty=mean(record["empty"] for record in records),
        masks=mean(record["masks"] > 0 for record in records),
        unended=mean(not record["ended"] for record in records),
        per_second=len(records) / seconds if seconds else math.nan,
        sinks=mean(record["sinks"]["per_head"] for record in records),
        devices=tuple(sorted(read.devices)),
        paper=_published(what, condition),
        unscored=read.unscored,
        cache=condition.get("cache", ""),
        speed=speed,
        control=control,
        no_unmasked=against_unmasked.missing,
        no_random=against_random.missing,
        **_made(read),
    )


def _made(read: _ScoredRun) -> dict[str, Any]:
    """The columns that say how a run was made."""
    what, records = read.run.what, list(read.records.values())
    versions = {f"{name} {value}" for record in records for name, value in record.get("versions", {}).items()}
    requested, picked = (
        [record[name] for record in records if name in record] for name in ("control_requested", "control_picked")
    )
    return {
        "checkpoint": str(what["model"]), "revision": str(what.get("revision", "")),
        "dtype": str(what.get("dtype", "")), "seed": int(what["seed"]),
        "regime": regime_of(str(what["sampler"]), what["settings"]),
        "versions": tuple(sorted(versions)),
        "machines": tuple(sorted({str(record["device_name"]) for record in records if record.get("device_name")})),
        "departs": tuple(departures(what)),
        "keys_requested": float(np.mean(requested)) if requested else math.nan,
        "keys_picked": float(np.mean(picked)) if picked else math.nan,
    }  # fmt: skip


def _formed(read: _ScoredRun) -> Accuracy | None:
    """Accuracy over the answers of the required form; None unless every record says whether its answer is."""
    malformed = {sample: record.get("malformed") for sample, record in read.records.items()}
    if None in malformed.values():
        return None
    formed = [sample for sample, bad in malformed.items() if not bad]
    return Accuracy(sum(read.verdicts.get(sample, False) for sample in formed), len(formed))


def _published(what: Mapping[str, Any], condition: Mapping[str, Any]) -> float | None:
    """The study's accuracy, for the protocols, models and conditions it covers (one set of keys per head)."""
    covered = condition["name"] == "unmasked" or (condition["pick"] == "strongest" and "," not in condition["name"])
    protocol = PROTOCOLS.get(str(what["protocol"]["name"]))
    for one in protocol.published if covered and protocol is not None else ():
        if one.source == STUDY and one.masked == condition["masked"] and one.of(str(what["model"])):
            return one.score
    return None


def _corrected(lines: list[Line]) -> list[Line]:
    """The lines with p values corrected by Holm's method over the comparisons of each kind."""
    for kind in ("against_unmasked", "against_random"):
        places = [place for place, line in enumerate(lines) if getattr(line, kind) is not None]
        adjusted = holm([getattr(lines[place], kind).p for place in places])
        for place, p in zip(places, adjusted, strict=True):
            lines[place] = replace(lines[place], **{kind: replace(getattr(lines[place], kind), p=p)})
    return lines
