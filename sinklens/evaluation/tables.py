"""The table of a ledger: accuracy under each condition, paired with the unmasked run of the same model.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.errors import ControlWarning, LedgerError, require
from sinklens.evaluation.checked import evaluations, records_of
from sinklens.evaluation.conditions import CONTROLS, unpaired
from sinklens.evaluation.ledger import LedgerRecord, LedgerRun, data_difference
from sinklens.evaluation.protocols import PROTOCOLS, departures, is_checkpoint
from sinklens.evaluation.scoring import verdicts
from sinklens.utils import estimates
from sinklens.utils.arguments import checked
from sinklens.utils.estimates import Estimate, Paired, holm, paired, proportion

PICKS = ("", "strongest", "steady", *CONTROLS)  # in the order of a table
COMPARISONS = ("unmasked", "random", "same_mass")
NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, math.nan)


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
    def control_of(self) -> str:
        """The name of the condition that this one is a control of, or ""."""
        return str(self.condition.get("control_of", ""))


@checked
def frame(ledger: str | Path, *, mixed_devices: bool = False) -> "DataFrame":
    """Every condition of every group of a ledger, groups in order of task, protocol and model.

    Args:
        mixed_devices: pair runs on different device types, too.

    Returns:
        One row for each condition, with these columns; NaN where a number does not apply:

        - "task", "protocol", "model": names; "model" includes what distinguishes groups that would share a name;
        - "condition", "masked", "pick": as in `Condition`; "cache": the cache policy, "" for exact runs;
        - "right", "total": right answers and samples with a verdict; "estimate", "low", "high": the accuracy;
        - "unscored": samples whose generated program has not been run. They are excluded from all other numbers, unless
          no program has been run. Then "total" is 0, and the shares are over the unscored samples;
        - "against_unmasked_…", "against_random_…", "against_same_mass_…": the comparison with the unmasked run, with
          the "control", and of masked sinks with random keys of the same mass: "difference", "low", "high", "p",
          "total", and the samples "lost" and "gained" by this run. "no_unmasked" and "no_random" say why there is none;
        - "published", "source": the score published for this model, protocol and number of masked sinks;
          "published_difference", "published_low", "published_high": the accuracy minus that score, unless the run
          "departs" from its protocol;
        - "malformed", "empty", "masks", "unended": shares of answers that are not of the required form, are empty,
          contain masks, or have no end token; "right_of_formed": accuracy over the answers of the required form;
        - "sinks": per head and step, by the paper's definition; "per_second": samples per second of model time;
          "speed": seconds of the exact unmasked run over seconds of this one, on the samples that both have;
        - "keys_requested", "keys_picked": keys that a control was to pick and did pick, summed over heads and steps;
        - "checkpoint", "revision", "dtype", "seed", "versions", "devices": of the runs.

    Raises:
        LedgerError: there is no ledger, it holds no finished sample, or conditions were evaluated on different data.
        SettingError: runs to pair were made on different device types.

    Warns:
        UserWarning: generated programs have not been run, listed by run.
        ControlWarning: a condition is a control of one that its group does not include.
    """
    import pandas as pd

    read = [_scored(run) for run in evaluations(ledger)]
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
    require(groups, f"{ledger} holds no finished sample yet; rerun `sinklens evaluate` to resume.", LedgerError)
    tables = []
    for name, members in zip(_names(list(groups)), groups.values(), strict=True):
        tables.append(pd.DataFrame(_rows(name, sorted(members, key=_order), mixed_devices)))
        for kind in COMPARISONS:  # one correction for the comparisons of a kind
            tables[-1][f"against_{kind}_p"] = holm(tables[-1][f"against_{kind}_p"].tolist())
    return pd.concat(tables).sort_values(["task", "protocol", "model"], kind="stable", ignore_index=True)


def _scored(run: LedgerRun) -> _Scored:
    records = {str(record["sample"]): record for record in records_of(run)}
    found = verdicts(run) if records else {}
    kept = {sample: records[sample] for sample in records if sample in found or not found}
    return _Scored(run, kept, found, len(records) - len(found))


def _order(read: _Scored) -> tuple[str, float | int, int, str]:
    condition = read.condition
    masked = math.inf if condition["masked"] is None else condition["masked"]
    place = PICKS.index(condition["pick"]) if condition["pick"] in PICKS else len(PICKS)
    return condition.get("cache", ""), masked, place, str(condition["hooks"])


def _names(groups: Sequence[str]) -> list[str]:
    """The model's name for each group, with the settings that distinguish groups of the same name."""
    import pandas as pd

    flat = pd.json_normalize([json.loads(group, parse_int=str, parse_float=str) for group in groups]).astype(str)
    found = []
    for _, row in flat.iterrows():
        namesakes = flat[(flat["protocol.name"] == row["protocol.name"]) & (flat["model"] == row["model"])]
        details = [f"{key.rpartition('.')[2]} {row[key]}" for key in flat if namesakes[key].nunique() > 1]
        found.append(f"{row['model']} ({', '.join(details)})" if details else row["model"])
    return found


def _rows(name: str, members: Sequence[_Scored], mixed_devices: bool) -> list[dict[str, Any]]:
    base = next((one for one in members if not one.condition["hooks"] and "cache" not in one.condition), None)
    names = {str(one.condition["name"]): one.control_of for one in members}
    if note := unpaired(names, names):
        warnings.warn(note, ControlWarning, stacklevel=3)
    rows = []
    for one in members:
        control = _control_of(one, members)
        treated = one.condition["hooks"] and not one.control_of and one.condition["pick"] not in CONTROLS
        rows.append({
            **_row(name, one), **_compared("unmasked", base, one, "no unmasked run", mixed_devices),
            **_compared("random", control, one, "no control" if treated else "", mixed_devices),
            **_compared("same_mass", _masked_alike(one, members, "same_mass"), one, "", mixed_devices),
            "control": "" if control is None else str(control.condition["name"]),
            "speed": math.nan if base is None or one is base else _speed(base, one),
        })  # fmt: skip
    return rows


def _compared(
    kind: str, base: _Scored | None, changed: _Scored, absent: str, mixed_devices: bool
) -> dict[str, Any]:  # fmt: skip
    """The columns of a comparison."""
    pair, why = (None, "") if base is changed else _against(base, changed, absent, mixed_devices)
    found, lost, gained = pair or (NOTHING, math.nan, math.nan)
    columns = {
        "difference": found.value, "low": found.low, "high": found.high, "lost": lost, "gained": gained, "p": found.p,
        "total": found.n,
    }  # fmt: skip
    return {f"against_{kind}_{name}": value for name, value in columns.items()} | {f"no_{kind}": why}


def _control_of(read: _Scored, members: Sequence[_Scored]) -> _Scored | None:
    """The first control of a run: one that names its condition, or random keys masked in the same manner."""
    name = read.condition["name"]
    named = [one for one in members if one.control_of == name]
    if len(named) > 1:
        first, *others = (repr(one.condition["name"]) for one in named)
        text = f"{name!r} has several controls; it is compared with {first}, not with {', '.join(others)}."
        warnings.warn(text, ControlWarning, stacklevel=4)
    return named[0] if named else _masked_alike(read, members, "random")


def _masked_alike(read: _Scored, members: Sequence[_Scored], pick: str) -> _Scored | None:
    """For masked sinks, the first run that masks other keys in the same manner."""
    alike = (one for one in members if one.condition["pick"] == pick and not one.control_of)
    sinks = read.condition["pick"] in ("strongest", "steady")
    return next((one for one in alike if sinks and _masking_key(one) == _masking_key(read)), None)


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
    require(
        len(devices) <= 1 or mixed_devices,
        f"{model} ran on {' and '.join(sorted(devices))} {names}, and verdicts from different device types are not "
        f"paired. Run both on one device type, or give mixed_devices=True (--mixed-devices).",
    )
    shared = sorted(base.verdicts.keys() & changed.verdicts.keys())
    for sample in shared:
        require(
            data_difference(base.records[sample], changed.records[sample]) != "prompt",
            f"{model} got different prompts for {sample} {names}, so their verdicts cannot be paired. Evaluate one "
            f"of them again on the data of the other, or keep them in separate folders ({base.run.folder}, "
            f"{changed.run.folder}).",
            LedgerError,
        )
    first, second = (np.array([one.verdicts[sample] for sample in shared]) for one in (base, changed))
    return (paired(first, second), "") if shared else (None, "no shared samples")


def _speed(base: _Scored, changed: _Scored) -> float:
    """Seconds of `base` over those of `changed` on the samples that both have; NaN without such samples."""
    shared = base.records.keys() & changed.records.keys()
    first, second = (sum(one.records[sample]["seconds"] for sample in shared) for one in (base, changed))
    return first / second if second else math.nan


def _row(name: str, read: _Scored) -> dict[str, Any]:
    """A row without its comparisons."""
    what, condition, records = read.run.what, read.condition, list(read.records.values())
    seconds, accuracy = sum(record["seconds"] for record in records), _accuracy(read, read.verdicts)
    forms: list[Any] = [record.get("malformed") for record in records]
    formed = [str(record["sample"]) for record in records if not record.get("malformed")]

    def mean(values: Iterable[float | bool]) -> float:
        listed = list(values)
        return float(np.mean(listed)) if listed else math.nan

    def all_of(values: Iterable[Any]) -> str:
        return "; ".join(sorted({str(value) for value in values if value}))

    return {
        "task": what["protocol"]["task"], "protocol": what["protocol"]["name"], "model": name,
        "condition": condition["name"], "masked": condition["masked"], "pick": condition["pick"],
        "cache": condition.get("cache", ""),
        "right": sum(read.verdicts.values()), "total": accuracy.n, "estimate": accuracy.value, "low": accuracy.low,
        "high": accuracy.high, "unscored": read.unscored, **_published(what, condition, accuracy),
        "malformed": math.nan if None in forms else mean(forms),
        "right_of_formed": math.nan if None in forms else _accuracy(read, formed).value,
        "empty": mean(record["empty"] for record in records),
        "masks": mean(record["masks"] > 0 for record in records),
        "unended": mean(not record["ended"] for record in records),
        "sinks": mean(record["sinks"]["per_head"] for record in records),
        "per_second": len(records) / seconds if seconds else math.nan,
        "keys_requested": mean(record["control_requested"] for record in records if "control_requested" in record),
        "keys_picked": mean(record["control_picked"] for record in records if "control_picked" in record),
        "checkpoint": what["model"], "revision": what["revision"], "dtype": what["dtype"], "seed": what["seed"],
        "versions": all_of(f"{one} {value}" for record in records for one, value in record.get("versions", {}).items()),
        "devices": all_of(record[name] for record in records for name in ("device", "device_name") if name in record),
    }  # fmt: skip


def _accuracy(read: _Scored, samples: Iterable[str]) -> Estimate:
    """The share of right answers of some samples."""
    listed = list(samples)
    return proportion(sum(read.verdicts.get(sample, False) for sample in listed), len(listed))


def _published(what: Mapping[str, Any], condition: Mapping[str, Any], accuracy: Estimate) -> dict[str, Any]:
    """The score published for a run with as many sinks masked (one set of keys per head), beside its accuracy."""
    departs, protocol = departures(what), PROTOCOLS.get(str(what["protocol"]["name"]))
    covered = condition["name"] == "unmasked" or (condition["pick"] == "strongest" and "," not in condition["name"])
    listed = protocol.published if covered and protocol is not None else ()
    score = next(
        (one for one in listed if one.masked == condition["masked"] and is_checkpoint(str(what["model"]), one.model)),
        None,
    )
    known = None if score is None or departs or not accuracy.n else score.accuracy
    gap = NOTHING if known is None else estimates.unpaired(known, accuracy)
    return {
        "published": math.nan if score is None or score.score is None else score.score,
        "source": "" if score is None else score.source, "departs": "; ".join(departs),
        "published_difference": gap.value, "published_low": gap.low, "published_high": gap.high,
    }  # fmt: skip
