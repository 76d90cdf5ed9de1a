"""The runs and records of an evaluation, read from a ledger and checked against one schema.

A ledger holds any JSON; what tables and scores rely on is declared here and checked where it is read: types, ranges and
sizes. In a schema, a mapping declares the fields of an object (a "?" after the name: it may be missing), a list its
entries, `EACH` all values of an object, and any other entry is a type with a range, as for arguments.

Records may have further fields, which tables ignore; descriptions of runs may not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from sinklens.errors import LedgerError, SettingError, require
from sinklens.evaluation.ledger import FILE, LedgerRecord, LedgerRun, RecordKind
from sinklens.utils.arguments import Seed, Words, read_as

EACH = "*"
Size = Annotated[int, Ge(0), Le(10**9), Words("an integer from 0 to 10**9")]
Measured = Annotated[float | int, Ge(0), Le(10**9), Words("a number from 0 to 10**9")]
Sinks = Annotated[float | int, Ge(0), Le(10**9), Words("a number from 0 to 10**9, or NaN")]

CONDITION = {
    "name": str, "hooks": [str], "masked": Size | None, "pick": str, "random?": str, "of_unmasked?": bool,
    "control_of?": str, "cache?": str, "code?": [str],
}  # fmt: skip
PROTOCOL = {
    "name": str, "task": str, "settings?": {EACH: dict}, "shots": Size | None, "extractor": str | None,
    "chat_template": bool | Literal["plain"], "mode?": str, "sampler?": str,
}  # fmt: skip
RUN = {
    "model": str, "family": str, "sampler": str, "revision": str, "weights": str, "dtype": str, "seed": Seed,
    "protocol": PROTOCOL, "task?": dict, "settings": dict, "condition": CONDITION,
}  # fmt: skip
RECORDS: dict[RecordKind, Mapping[str, Any]] = {
    "records": {
        "sample": str, "verdict": bool | None, "text": str, "empty": bool, "ended": bool, "masks": Size, "steps": Size,
        "device": str, "seconds": Measured, "sinks": {"per_head": Sinks, EACH: Sinks}, "malformed?": bool | None,
        "kind?": str, "prompt_sha256?": str, "reference_sha256?": str, "tokens?": [int], "unmask_step?": [int],
        "control_requested?": Size, "control_picked?": Size, "device_name?": str, "versions?": {EACH: str},
        "batch?": Size,
    },
    "verdicts": {"sample": str, "verdict": bool, "text_sha256": str},
}  # fmt: skip


def evaluations(ledger: str | Path) -> list[LedgerRun]:
    """Every run of an evaluation's ledger.

    Raises:
        LedgerError: the ledger holds no run, is damaged, or holds a run of something else.
    """
    runs = LedgerRun.all(Path(ledger))
    for run in runs:
        _check(run, "its description", RUN, run.what)
    return runs


def records_of(run: LedgerRun, kind: RecordKind = "records") -> list[LedgerRecord]:
    """The records of a run of an evaluation.

    Raises:
        LedgerError: the ledger is damaged, or a record has a field of another type or size.
    """
    records = run.records(kind)
    for record in records:
        _check(run, f"the {kind} of {record['sample']!r:.60}", RECORDS[kind], record)
    return records


def _check(run: LedgerRun, what: str, schema: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    try:
        _fits(schema, "it", given)
        if schema is RUN and (unknown := given.keys() - {name.rstrip("?") for name in RUN}):
            raise SettingError(f"{min(unknown)!r:.40} is not a field of an evaluation")
    except SettingError as error:
        raise LedgerError(
            f"{run.folder / FILE}, {run.name}, {what}: {str(error).rstrip('.')}. Restore the file from a copy, or "
            f"evaluate this run in another folder."
        ) from error


def _fits(schema: Any, name: str, given: Any) -> None:
    """Check JSON against a schema.

    Raises:
        SettingError: it has another type or range.
    """
    if isinstance(schema, Mapping):
        read_as(dict, name, given)
        for field, kind in schema.items():
            if field == EACH:
                for each, value in given.items():
                    _fits(kind, repr(each)[:40], value)
            elif field.rstrip("?") in given:
                _fits(kind, field.rstrip("?"), given[field.rstrip("?")])
            else:
                require(field.endswith("?"), f"it has no field {field!r}.")
    elif isinstance(schema, list):
        read_as(list, name, given)
        for other in {type(one) for one in given} - {schema[0]}:
            raise SettingError(f"{name} must hold {schema[0].__name__} only; got a {other.__name__}.")
    elif not (schema is Sinks and given != given):  # NaN: no step of the row was counted
        read_as(schema, name, given)
