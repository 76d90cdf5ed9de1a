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
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.errors import ControlWarning, LedgerError, SettingError
from sinklens.evaluation.conditions import CONTROLS, unpaired
from sinklens.evaluation.departures import departures
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, data_difference
from sinklens.evaluation.protocols import PROTOCOLS
from sinklens.evaluation.published import STUDY
from sinklens.evaluation.scoring import verdicts
from sinklens.utils.estimates import Estimate, Paired, holm, paired, proportion

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

PICKS = ("", "strongest", "steady", *CONTROLS)  # in the order of a table


@dataclass(frozen=True)
class Line:
    """A line of the results table: one condition, and how it compares with the others of its group.

    Attributes:
        task, protocol, model: names; `model` includes what distinguishes groups that would share a name.
        condition, masked, pick: as in `Condition`.
        cache: the cache policy of the runs; "" for exact ones.
        accuracy: over all samples with a verdict.
        against_unmasked: paired with the unmasked run; None for the unmasked run, or if there is no such run.
        against_random: paired with its control: the same number of random keys, masked in the same manner, or the
            condition whose `Condition.control_of` names this one (the first of several). None without one.
        chance: expected accuracy of a guess, in [0, 1].
        malformed: share of answers that are not of the required form (`Task.malformed`); NaN if the task requires none.
        formed: accuracy over the other answers; None where `malformed` is NaN.
        empty, masks, unended: shares of answers that are empty, contain masks, or have no end token.
        per_second: samples per second of model time.
        control: name of that control; "" without one.
        no_unmasked, no_random: why `against_unmasked` or `against_random` is None: "no unmasked run", "no control",
            "not scored" or "no shared samples". "" if it is not None, or where it does not apply: to the unmasked run,
            to controls, and to runs that change nothing but the cache policy.
        speed: seconds of the exact unmasked run over seconds of this one, on the samples that both have; NaN for the
            unmasked run, or if there is no such run.
        sinks: sinks per head and step, by the paper's definition.
        devices: device types.
        paper: accuracy in the study's Table 1 for the same model and protocol, else None.
        unscored: samples whose generated program has not been run. They are excluded from all other numbers, unless
            no program has been run: then `accuracy` has no samples, and the shares are over the unscored ones.
        checkpoint, revision, dtype, seed: of the runs; `checkpoint` is the model's name without additions.
        regime: how answers are decoded; see `regime_of`.
        versions: of sinklens, torch and transformers, each with its name.
        machines: names of the devices.
        departs: how the run differs from its protocol; see `departures`.
        keys_requested, keys_picked: mean over the samples of the keys that a control was to pick and did pick, summed
            over heads and steps; NaN for runs without a control.
    """

    task: str
    protocol: str
    model: str
    condition: str
    masked: int | None
    pick: str
    accuracy: Estimate
    against_unmasked: Paired | None
    against_random: Paired | None
    chance: float
    malformed: float
    formed: Estimate | None
    empty: float
    masks: float
    unended: float
    per_second: float
    sinks: float
    devices: tuple[str, ...]
    paper: float | None
    unscored: int = 0
    cache: str = ""
    speed: float = math.nan
    control: str = ""
    no_unmasked: str = ""
    no_random: str = ""
    checkpoint: str = ""
    revision: str = ""
    dtype: str = ""
    seed: int = 0
    regime: str = ""
    versions: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    departs: tuple[str, ...] = ()
    keys_requested: float = math.nan
    keys_picked: float = math.nan


def regime_of(sampler: str, settings: Mapping[str, Any]) -> str:
    """How a sampler decodes: "left to right", "diffusion" (all positions at once), "blocks of 32" or "canvases of 256".

    Autoregressive samplers decode from left to right. Samplers with blocks as long as the answer, or without blocks,
    may decide any position at any step.
    """
    length = settings.get("gen_length")
    for name, noun in (("block_length", "blocks"), ("canvas_length", "canvases")):
        size = settings.get(name)
        if size is not None and size != length:
            return f"{noun} of {size}"
    return "left to right" if sampler == "autoregressive" else "diffusion"


def frame(lines: Sequence[Line]) -> "DataFrame":
    """All lines as a table of plain numbers; `p` columns are Holm-corrected."""
    import pandas as pd

    return pd.DataFrame([_row(line) for line in lines])


def _row(line: Line) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: "; ".join(value) if type(value) is tuple else value for name, value in vars(line).items()
    }
    accuracy, formed = row.pop("accuracy"), row.pop("formed")
    row |= {"right": _right(accuracy), "total": accuracy.n, "estimate": accuracy.value}
    row |= {"low": accuracy.low, "high": accuracy.high, "right_of_formed": math.nan if formed is None else formed.value}
    for kind in ("against_unmasked", "against_random"):
        nothing = Estimate(math.nan, math.nan, math.nan, math.nan, math.nan)
        found, lost, gained = row.pop(kind) or (nothing, math.nan, math.nan)
        row |= {f"{kind}_difference": found.value, f"{kind}_low": found.low, f"{kind}_high": found.high}
        row |= {f"{kind}_lost": lost, f"{kind}_gained": gained, f"{kind}_p": found.p, f"{kind}_total": found.n}
    return row


def _right(accuracy: Estimate) -> int:
    """The number of right answers."""
    return round(accuracy.value * accuracy.n) if accuracy.n else 0


@dataclass(frozen=True)
class _Scored:
    """A run, its records that have a verdict (or all, if none has), the verdicts by sample, and the unscored count."""

    run: LedgerRun
    records: Mapping[str, LedgerRecord]
    verdicts: Mapping[str, bool]
    unscored: int

    @property
    def condition(self) -> Mapping[str, Any]:
        return self.run.what["condition"]

    @property
    def controls(self) -> str:
        """The name of the condition that it is a control of, or ""."""
        return str(self.condition.get("control_of", ""))


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
    read = [_scored(run) for run in LedgerRun.all(Path(ledger))]
    left = [f"{one.unscored} of {one.run.what['model']} ({one.condition['name']})" for one in read if one.unscored]
    if left:
        warnings.warn(
            f"Generated programs that have not been run are excluded from all accuracies: {', '.join(left)}. "
            f"`sinklens score {ledger} --run-generated-code` runs them, in isolation.",
            stacklevel=2,
        )
    groups: dict[str, list[_Scored]] = {}
    for one in read:
        if one.records:
            shared = {name: value for name, value in one.run.what.items() if name != "condition"}
            groups.setdefault(json.dumps(shared, sort_keys=True), []).append(one)
    if not groups:
        raise LedgerError(f"{ledger} holds no finished sample yet; rerun `sinklens evaluate` to resume.")
    lines = []
    for name, members in zip(_names([json.loads(key) for key in groups]), groups.values(), strict=True):
        lines += _lines(name, sorted(members, key=_order), mixed_devices)
    return sorted(lines, key=lambda line: (line.task, line.protocol, line.model))


def _scored(run: LedgerRun) -> _Scored:
    records = {str(record["sample"]): record for record in run.records()}
    found = verdicts(run) if records else {}
    kept = {sample: records[sample] for sample in records if sample in found or not found}
    return _Scored(run, kept, found, len(records) - len(found))


def _order(read: _Scored) -> tuple[str, float | int, int, str]:
    condition = read.condition
    masked = math.inf if condition["masked"] is None else condition["masked"]
    place = PICKS.index(condition["pick"]) if condition["pick"] in PICKS else len(PICKS)
    return condition.get("cache", ""), masked, place, str(condition["hooks"])


def _names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """The model's name for each group, with the settings that distinguish groups of the same name."""
    found, flat = [], [dict(_flat(group)) for group in groups]
    for group, own in zip(groups, flat, strict=True):
        name = (group["protocol"]["name"], group["model"])
        namesakes = [
            other for one, other in zip(groups, flat, strict=True) if (one["protocol"]["name"], one["model"]) == name
        ]
        details = [
            f"{key.rpartition('.')[2]} {value}"
            for key, value in own.items()
            if any(other.get(key) != value for other in namesakes)
        ]
        found.append(f"{group['model']} ({', '.join(details)})" if details else str(group["model"]))
    return found


def _flat(group: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    """Names and values as text, with nested dictionaries flattened; of the protocol only the settings of the task."""
    for name, value in sorted(group.items()):
        if f"{before}{name}" == "protocol":
            value = {key: value[key] for key in ("chat_template", "extractor", "shots", "task")}
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)


def _lines(name: str, members: Sequence[_Scored], mixed_devices: bool) -> list[Line]:
    base = next((one for one in members if not one.condition["hooks"] and "cache" not in one.condition), None)
    names = {str(one.condition["name"]): one.controls for one in members}
    if note := unpaired(names, names):
        warnings.warn(note, ControlWarning, stacklevel=3)
    lines = []
    for one in members:
        control = _control_of(one, members)
        treated = one.condition["hooks"] and not one.controls and one.condition["pick"] not in CONTROLS
        exact, no_exact = (None, "") if one is base else _against(base, one, "no unmasked run", mixed_devices)
        other, no_other = _against(control, one, "no control" if treated else "", mixed_devices)
        lines.append(
            replace(
                _line(name, one),
                against_unmasked=exact, no_unmasked=no_exact, against_random=other, no_random=no_other,
                control="" if control is None else str(control.condition["name"]),
                speed=math.nan if base is None or one is base else _speed(base, one),
            )
        )  # fmt: skip
    for kind in ("against_unmasked", "against_random"):  # one correction for the comparisons of a kind
        places = [place for place, line in enumerate(lines) if getattr(line, kind) is not None]
        for place, p in zip(places, holm([getattr(lines[place], kind).difference.p for place in places]), strict=True):
            pair = getattr(lines[place], kind)
            lines[place] = replace(lines[place], **{kind: pair._replace(difference=replace(pair.difference, p=p))})
    return lines


def _control_of(read: _Scored, members: Sequence[_Scored]) -> _Scored | None:
    """The first control of a run: one that names its condition, or random keys masked in the same manner."""
    name = read.condition["name"]
    named = [one for one in members if one.controls == name]
    if len(named) > 1:
        first, *others = (repr(one.condition["name"]) for one in named)
        text = f"{name!r} has several controls; it is compared with {first}, not with {', '.join(others)}."
        warnings.warn(text, ControlWarning, stacklevel=4)
    if not named and read.condition["pick"] in ("strongest", "steady"):
        random = [one for one in members if one.condition["pick"] == "random" and not one.controls]
        named = [one for one in random if _masking_key(one) == _masking_key(read)]
    return named[0] if named else None


def _masking_key(read: _Scored) -> str:
    """The number of masked keys, all masking settings except which keys are picked, and the cache policy."""
    hooks = [re.sub(r"pick='\w*'|seed=\d+|persistent=\w+", "", hook) for hook in read.condition["hooks"]]
    return json.dumps([read.condition["masked"], hooks, read.condition.get("cache")])


def _against(base: _Scored | None, changed: _Scored, absent: str, mixed_devices: bool) -> tuple[Paired | None, str]:
    """Verdicts paired on the samples that both runs have, or why there are none: `absent` without another run."""
    if base is None:
        return None, absent
    if not (base.verdicts and changed.verdicts):
        return None, "not scored"
    model, names = base.run.what["model"], f"under {base.condition['name']!r} and {changed.condition['name']!r}"
    devices = {str(record["device"]) for one in (base, changed) for record in one.records.values()}
    if len(devices) > 1 and not mixed_devices:
        raise SettingError(
            f"{model} ran on {' and '.join(sorted(devices))} {names}, and verdicts from different device types are not "
            f"paired. Run both on one device type, or give mixed_devices=True (--mixed-devices)."
        )
    shared = sorted(base.verdicts.keys() & changed.verdicts.keys())
    for sample in shared:
        if data_difference(base.records[sample], changed.records[sample]) == "prompt":
            raise LedgerError(
                f"{model} got different prompts for {sample} {names}, so their verdicts cannot be paired. Evaluate one "
                f"of them again on the data of the other, or keep them in separate folders ({base.run.folder}, "
                f"{changed.run.folder})."
            )
    first, second = (np.array([one.verdicts[sample] for sample in shared]) for one in (base, changed))
    return (paired(first, second), "") if shared else (None, "no shared samples")


def _speed(base: _Scored, changed: _Scored) -> float:
    """Seconds of `base` over those of `changed` on the samples that both have; NaN without such samples."""
    shared = base.records.keys() & changed.records.keys()
    first, second = (sum(one.records[sample]["seconds"] for sample in shared) for one in (base, changed))
    return first / second if second else math.nan


def _line(name: str, read: _Scored) -> Line:
    """A line without its comparisons."""
    what, condition, records = read.run.what, read.condition, list(read.records.values())
    seconds, formed = sum(record["seconds"] for record in records), _formed(read)

    def mean(values: Iterable[float]) -> float:
        listed = list(values)
        return float(np.mean(listed)) if listed else math.nan

    def all_of(values: Iterable[Any]) -> tuple[str, ...]:
        return tuple(sorted({str(value) for value in values if value}))

    return Line(
        task=what["protocol"]["task"], protocol=what["protocol"]["name"], model=name, condition=condition["name"],
        masked=condition["masked"], pick=condition["pick"], cache=condition.get("cache", ""),
        accuracy=proportion(sum(read.verdicts.values()), len(read.verdicts)),
        against_unmasked=None, against_random=None,
        chance=mean(record["chance"] for record in records),
        malformed=math.nan if formed is None else 1 - formed.n / len(records), formed=formed,
        empty=mean(record["empty"] for record in records),
        masks=mean(record["masks"] > 0 for record in records),
        unended=mean(not record["ended"] for record in records),
        per_second=len(records) / seconds if seconds else math.nan,
        sinks=mean(record["sinks"]["per_head"] for record in records),
        paper=_published(what, condition), unscored=read.unscored,
        checkpoint=str(what["model"]), revision=str(what.get("revision", "")), dtype=str(what.get("dtype", "")),
        seed=int(what["seed"]), regime=regime_of(str(what["sampler"]), what["settings"]),
        versions=all_of(f"{one} {value}" for record in records for one, value in record.get("versions", {}).items()),
        devices=all_of(record["device"] for record in records),
        machines=all_of(record.get("device_name") for record in records), departs=tuple(departures(what)),
        keys_requested=mean(record["control_requested"] for record in records if "control_requested" in record),
        keys_picked=mean(record["control_picked"] for record in records if "control_picked" in record),
    )  # fmt: skip


def _formed(read: _Scored) -> Estimate | None:
    """Accuracy over the answers of the required form; None unless every record says whether its answer is."""
    malformed = {sample: record.get("malformed") for sample, record in read.records.items()}
    if None in malformed.values():
        return None
    formed = [sample for sample, bad in malformed.items() if not bad]
    return proportion(sum(read.verdicts.get(sample, False) for sample in formed), len(formed))


def _published(what: Mapping[str, Any], condition: Mapping[str, Any]) -> float | None:
    """The study's accuracy, for the protocols, models and conditions it covers (one set of keys per head)."""
    covered = condition["name"] == "unmasked" or (condition["pick"] == "strongest" and "," not in condition["name"])
    protocol = PROTOCOLS.get(str(what["protocol"]["name"]))
    for one in protocol.published if covered and protocol is not None else ():
        if one.source == STUDY and one.masked == condition["masked"] and one.of(str(what["model"])):
            return one.score
    return None
