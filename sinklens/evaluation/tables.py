"""What ledgers say: accuracy under each condition, paired with the unmasked self of the same model.

Runs that differ in nothing but their condition form a *group*: one model, asked in one way. In a group every condition
is compared with "unmasked" on the samples that both have, and masked sinks also with the same number of random keys,
chosen and masked in the same way (of several seeds, the first). p values (McNemar's exact test) are corrected by Holm's
method over the comparisons of one kind, with "unmasked" or with random keys, of a group.

One way this misleads: the same model gives other last bits on another kind of device, and with them other answers. Runs
of different device types are not paired unless that is asked for.
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

from sinklens.errors import LedgerError, SettingError
from sinklens.evaluation.ledger import LedgerRun, Record
from sinklens.evaluation.scoring import verdicts
from sinklens.evaluation.statistics import Accuracy, Paired, holm, paired

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

# Rulli et al., 2510.15731, Table 1: accuracy with 0, 1, 5 and 10 sinks masked. They say "instruct" of the checkpoints
# without naming them; these are the models' own of that kind.
PAPER = {
    "gsm8k": {
        "Dream-v0-Instruct-7B": {0: 0.82, 1: 0.79, 5: 0.78, 10: 0.75},
        "LLaDA-8B-Instruct": {0: 0.76, 1: 0.75, 5: 0.73, 10: 0.55},
        "MMaDA-8B-MixCoT": {0: 0.54, 1: 0.53, 5: 0.54, 10: 0.37},
        "Llama-3.1-8B-Instruct": {0: 0.85, 1: 0.02, 5: 0.02, 10: 0.01},
    },
    "humaneval": {
        "Dream-v0-Instruct-7B": {0: 0.60, 1: 0.64, 5: 0.61, 10: 0.57},
        "LLaDA-8B-Instruct": {0: 0.37, 1: 0.37, 5: 0.39, 10: 0.35},
        "MMaDA-8B-MixCoT": {0: 0.16, 1: 0.16, 5: 0.18, 10: 0.09},
        "Llama-3.1-8B-Instruct": {0: 0.66, 1: 0.00, 5: 0.00, 10: 0.00},
    },
}


PICKS = ("", "strongest", "steady", "random", "weakest")  # in the order of a table


@dataclass(frozen=True)
class Line:
    """One condition of one group.

    Attributes:
        task, protocol, model: names; `model` tells apart groups that would share one.
        condition, masked, pick: as in `Condition`.
        accuracy: of all its samples.
        against_unmasked: paired with the unmasked run; None for that run, and where there is none.
        against_random: paired with the same number of random keys, masked in the same way; None where that does not
            apply.
        chance: expected accuracy of a guess, in [0, 1].
        empty, masks, unended: shares of answers that are empty, hold masks, have no end.
        per_second: samples, over the time that the model ran.
        sinks: per head and step, by the paper's definition.
        devices: types.
        paper: accuracy in the paper's Table 1 where model and task are the same, else None.
        unscored: samples whose generated program was not run yet; they have no part in any number, unless that is all
            of them: then `accuracy` is of none, and the shares are of these.
    """

    task: str
    protocol: str
    model: str
    condition: str
    masked: int | None
    pick: str
    accuracy: Accuracy
    against_unmasked: Paired | None
    against_random: Paired | None
    chance: float
    empty: float
    masks: float
    unended: float
    per_second: float
    sinks: float
    devices: tuple[str, ...]
    paper: float | None
    unscored: int = 0


@dataclass(frozen=True)
class _Read:
    """A run with its records that have a verdict (all if none has), the verdicts by sample, and how many have none."""

    run: LedgerRun
    records: Mapping[str, Record]
    verdicts: Mapping[str, bool]
    unscored: int

    @property
    def condition(self) -> dict[str, Any]:
        return dict(self.run.what["condition"])

    @property
    def devices(self) -> set[str]:
        return {str(record["device"]) for record in self.records.values()}


def read_lines(ledger: str | Path, *, mixed_devices: bool = False) -> list[Line]:
    """Every condition of every group of a ledger, groups in order of task, protocol and model.

    Args:
        mixed_devices: pair runs of different device types all the same.

    Raises:
        LedgerError: no ledger, no finished sample in it, or conditions that were given different data.
        SettingError: runs are of different device types.

    Warns:
        UserWarning: generated programs that were not run yet, by run; see `Line.unscored`.
    """
    read = [_read(run) for run in LedgerRun.all(Path(ledger))]
    left_out = _unscored(read, ledger)
    if left_out:
        warnings.warn(left_out, stacklevel=2)
    groups: dict[str, list[_Read]] = {}
    for one in read:
        if one.records:
            groups.setdefault(json.dumps(_group(one.run), sort_keys=True), []).append(one)
    if not groups:
        raise LedgerError(f"{ledger} holds no finished sample yet; run `sinklens evaluate` again to go on.")
    names = _names([json.loads(key) for key in groups])
    lines = []
    for name, members in zip(names, groups.values(), strict=True):
        lines += _lines(name, sorted(members, key=_order), mixed_devices)
    return sorted(lines, key=lambda line: (line.task, line.protocol, line.model))


def _read(run: LedgerRun) -> _Read:
    records = {str(record["sample"]): record for record in run.records()}
    found = verdicts(run) if records else {}
    kept = {sample: records[sample] for sample in records if sample in found or not found}
    return _Read(run, kept, found, len(records) - len(found))


def _unscored(read: Sequence[_Read], ledger: str | Path) -> str:
    """What is still to be scored, and how; empty if nothing is."""
    left = [f"{one.unscored} of {one.run.what['model']} ({one.condition['name']})" for one in read if one.unscored]
    if not left:
        return ""
    return (
        f"Generated programs that have not been run have no part in any accuracy: {', '.join(left)}. "
        f"`sinklens score {ledger} --run-generated-code` runs them, in isolation."
    )


def _group(run: LedgerRun) -> dict[str, Any]:
    return {name: value for name, value in run.what.items() if name != "condition"}


def _order(read: _Read) -> tuple[float | int, int, str]:
    condition = read.condition
    masked = condition["masked"]
    place = PICKS.index(condition["pick"]) if condition["pick"] in PICKS else len(PICKS)
    return (math.inf if masked is None else masked, place, str(condition["hooks"]))


def _names(groups: Sequence[dict[str, Any]]) -> list[str]:
    """The model's name of each group; where several share it, with what tells them apart."""
    found = []
    for group in groups:
        rivals = [other for other in groups if _asked(other) == _asked(group)]
        differing = sorted(
            {name for rival in rivals for name, value in _flat(rival) if (name, value) not in _flat(group)}
        )
        own = [f"{name.rpartition('.')[2]} {value}" for name, value in _flat(group) if name in differing]
        found.append(f"{group['model']} ({', '.join(own)})" if own else str(group["model"]))
    return found


def _asked(group: Mapping[str, Any]) -> tuple[str, str]:
    return str(group["protocol"]["name"]), str(group["model"])


def _flat(group: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Names and values, of the inner dictionaries too; hashes and what follows from other entries are left out."""
    found = []
    for name, value in sorted(group.items()):
        if isinstance(value, Mapping) and name != "protocol":
            found += _flat(value, f"{before}{name}.")
        elif name == "protocol":
            found += [(f"protocol.{key}", str(value[key])) for key in ("chat_template", "extractor", "shots", "task")]
        else:
            found.append((f"{before}{name}", str(value)))
    return found


def _lines(name: str, members: Sequence[_Read], mixed_devices: bool) -> list[Line]:
    base = next((one for one in members if not one.condition["hooks"]), None)
    random = {_way(one): one for one in reversed(members) if one.condition["pick"] == "random"}
    lines = []
    for one in members:
        condition = one.condition
        control = random.get(_way(one)) if condition["pick"] in ("strongest", "steady") else None
        lines.append(
            _line(
                name, one,
                None if base is None or one is base else _pair(base, one, mixed_devices),
                None if control is None else _pair(control, one, mixed_devices),
            )
        )  # fmt: skip
    return _corrected(lines)


def _way(read: _Read) -> str:
    """How many keys are masked and how, whichever they are."""
    hooks = [re.sub(r"pick='\w*'|seed=\d+", "", hook) for hook in read.condition["hooks"]]
    return json.dumps([read.condition["masked"], hooks])


def _pair(base: _Read, changed: _Read, mixed_devices: bool) -> Paired | None:
    """Paired verdicts of the samples that both have; None where there are none."""
    if not base.verdicts or not changed.verdicts:
        return None
    devices = base.devices | changed.devices
    if len(devices) > 1 and not mixed_devices:
        raise SettingError(
            f"{base.run.what['model']} ran on {' and '.join(sorted(devices))} under {base.condition['name']!r} and "
            f"{changed.condition['name']!r}, and verdicts of different device types are not paired. Run both on one, "
            f"or give mixed_devices=True (--mixed-devices)."
        )
    shared = sorted(base.verdicts.keys() & changed.verdicts.keys())
    if not shared:
        return None
    for sample in shared:
        if base.records[sample].get("prompt_sha256") != changed.records[sample].get("prompt_sha256"):
            raise LedgerError(
                f"{base.run.what['model']} was given another prompt of {sample} under {base.condition['name']!r} than "
                f"under {changed.condition['name']!r}: their data differ, and nothing can be paired. Evaluate one of "
                f"them anew, or put the data apart in two folders ({base.run.folder}, {changed.run.folder})."
            )
    first, second = (np.array([one.verdicts[sample] for sample in shared]) for one in (base, changed))
    return paired(first, second)


def _line(name: str, read: _Read, against_unmasked: Paired | None, against_random: Paired | None) -> Line:
    what, condition, records = read.run.what, read.condition, list(read.records.values())
    seconds = sum(record["seconds"] for record in records)

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
        against_unmasked=against_unmasked,
        against_random=against_random,
        chance=mean(record["chance"] for record in records),
        empty=mean(record["empty"] for record in records),
        masks=mean(record["masks"] > 0 for record in records),
        unended=mean(not record["ended"] for record in records),
        per_second=len(records) / seconds if seconds else math.nan,
        sinks=mean(record["sinks"]["per_head"] for record in records),
        devices=tuple(sorted(read.devices)),
        paper=_published(what, condition),
        unscored=read.unscored,
    )


def _published(what: Mapping[str, Any], condition: Mapping[str, Any]) -> float | None:
    """The paper's accuracy, for its own models, tasks and conditions (one set of keys per head)."""
    usual = condition["name"] == "unmasked" or (condition["pick"] == "strongest" and "," not in condition["name"])
    numbers = PAPER.get(str(what["protocol"]["task"]).split("-")[0], {}).get(str(what["model"]).split("/")[-1], {})
    return numbers.get(condition["masked"]) if usual else None


def _corrected(lines: list[Line]) -> list[Line]:
    """Lines with Holm's correction of p over the comparisons of one kind."""
    for kind in ("against_unmasked", "against_random"):
        places = [place for place, line in enumerate(lines) if getattr(line, kind) is not None]
        adjusted = holm([getattr(lines[place], kind).p for place in places])
        for place, p in zip(places, adjusted, strict=True):
            lines[place] = replace(lines[place], **{kind: replace(getattr(lines[place], kind), p=p)})
    return lines


def frame(lines: Sequence[Line]) -> "DataFrame":
    """All lines as a table of plain numbers; `p` columns are corrected."""
    import pandas as pd

    rows = []
    for line in lines:
        low, high = line.accuracy.interval
        row = {
            "task": line.task, "protocol": line.protocol, "model": line.model, "condition": line.condition,
            "masked": line.masked, "pick": line.pick, "right": line.accuracy.right, "total": line.accuracy.total,
            "estimate": line.accuracy.share, "low": low, "high": high, "chance": line.chance,
        }  # fmt: skip
        for kind in ("against_unmasked", "against_random"):
            pair = getattr(line, kind)
            for name in ("difference", "low", "high", "lost", "gained", "p", "total"):
                row[f"{kind}_{name}"] = math.nan if pair is None else getattr(pair, name)
        rows.append(row | {
            "empty": line.empty, "masks": line.masks, "unended": line.unended, "per_second": line.per_second,
            "sinks": line.sinks, "devices": " ".join(line.devices), "paper": line.paper,
            "unscored": line.unscored,
        })  # fmt: skip
    return pd.DataFrame(rows)
