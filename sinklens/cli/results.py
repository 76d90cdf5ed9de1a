"""The commands about results that are there: table, score, merge and export.

Only ``score`` runs generated programs, and only with ``--run-generated-code``.

Pitfall: with ``--format``, nothing but the claims goes to standard output, so warnings go to standard error.
"""

import sys
import warnings
from pathlib import Path
from typing import Any, Literal

from sinklens.cli.options import Integer
from sinklens.errors import SettingError, SinklensError


def table(
    results: Path,
    /,
    *,
    out: Path | None = None,
    mixed_devices: bool = False,
    format: Literal["markdown", "latex", "csv", "json"] | None = None,
) -> None:
    """Print the tables of studies and of an evaluation.

    Args:
        results: folder written by either command
        out: for an evaluation: folder for table.csv and the figures (default: RESULTS)
        mixed_devices: for an evaluation: pair runs from different device types, whose last bits differ
        format: for an evaluation: print one line per claim in this format, and write nothing (default: tables to read)
    """
    from sinklens.analyses.printing import manifests, show
    from sinklens.evaluation.claim_lines import claims, format_claims
    from sinklens.evaluation.ledger import holds_runs
    from sinklens.evaluation.tables import read_lines

    if not results.is_dir():
        raise SinklensError(
            f"no such folder: {results}; give one written by `sinklens evaluate` or `sinklens analyse`."
        )
    studies, evaluated = manifests(results), holds_runs(results)
    if not studies and not evaluated:
        raise SinklensError(_nothing_in(results))
    if not evaluated and (out or mixed_devices or format):
        raise SettingError(
            f"--out, --format and --mixed-devices are for evaluations; {results} holds only a study; remove them."
        )
    if format and out:
        raise SettingError("--format prints and writes nothing; redirect its output to a file, and leave --out out.")
    if not format:
        for manifest in studies:
            show(results, manifest)
    if evaluated:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lines = read_lines(results, mixed_devices=mixed_devices)
            claimed = format_claims(claims(lines), format) if format else ""
        notes = [str(note.message) for note in caught]
        if format:
            print("".join(f"sinklens: {note}\n" for note in notes), file=sys.stderr, end="")
            print(claimed, end="")
        else:
            _write_table(lines, notes, out or results)


def _write_table(lines: Any, notes: list[str], out: Path) -> None:
    """Print the tables of a ledger, and write table.csv and the figures to `out`."""
    from sinklens.cli.printing import show
    from sinklens.evaluation.tables import frame
    from sinklens.utils.atomic import atomic_write
    from sinklens.utils.folders import require_writable
    from sinklens.views import accuracy_curves

    require_writable(out)
    with atomic_write(out / "table.csv") as part:
        frame(lines).to_csv(part, index=False)
    scored = [line for line in lines if line.accuracy.n]
    figures = {"accuracy": accuracy_curves(frame(scored))} if scored else {}
    files = {out / f"{name}.{kind}": figure for name, figure in figures.items() for kind in ("png", "svg")}
    for file, figure in files.items():
        with atomic_write(file) as part:
            figure.savefig(part, dpi=160, bbox_inches="tight")
    show(lines, notes)
    print(f"Written: {', '.join(map(str, [out / 'table.csv', *files]))}.")


def _nothing_in(folder: Path) -> str:
    """Why `folder` has no table to print."""
    from sinklens.analyses.units import finished

    progress = finished(folder)
    if progress:
        return (
            f"{folder} holds an unfinished study ({progress}); rerun the same `sinklens analyse` command to resume it."
        )
    return (
        f"{folder} holds neither an evaluation nor a study; `sinklens evaluate ... --out {folder}` or `sinklens "
        f"analyse ... --out {folder}` creates one."
    )


def score(
    results: Path,
    /,
    *,
    run_generated_code: bool = False,
    data: Path | None = None,
    seconds: float = 10.0,
    memory: Integer = 512,
) -> None:
    """Run the programs that models wrote, in isolation.

    Args:
        results: folder that `sinklens evaluate` wrote
        run_generated_code: allow programs written by a model to run on this machine
        data: local file or folder of the published task (default: the hub)
        seconds: time limit of each program
        memory: memory limit of each program, in MiB
    """
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.sandbox import Limits, available_isolation
    from sinklens.evaluation.scoring import score as run_programs
    from sinklens.tasks import find_task
    from sinklens.tasks.base import CodeTask

    if not run_generated_code:
        raise SinklensError(
            f"this command executes programs written by a model. Add --run-generated-code to allow that. Isolation on "
            f"this machine: {available_isolation()}."
        )
    print(f"Isolation: {available_isolation()}.", file=sys.stderr)
    names = sorted({str(run.what["protocol"]["task"]) for run in LedgerRun.all(results)})
    programs = [name for name in names if isinstance(find_task(name), CodeTask)]
    published = [name for name in programs if hasattr(find_task(name), "path")]
    if data is not None and not published:
        raise SinklensError(
            f"--data is for published tasks whose answers are programs; {results} holds {', '.join(names)}."
        )
    if not programs:
        raise SinklensError(f"{results} holds no generated programs ({', '.join(names)}); there is nothing to run.")
    paths = {} if data is None else dict.fromkeys(published, data)
    ran = run_programs(results, paths=paths, limits=Limits(seconds=seconds, memory_mb=memory), progress=_progress)
    print(f"{ran} programs were run. To print the table: sinklens table {results}")


def _progress(run: Any, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        print(f"{run.what['model']}, {run.what['condition']['name']}: {done} of {total}", file=sys.stderr)


def merge(results: list[Path], /, *, out: Path) -> None:
    """Copy the records of several evaluations into one folder.

    Args:
        results: folders of `sinklens evaluate`
        out: folder of the records; created, or added to
    """
    from sinklens.evaluation.ledger import merge as merged
    from sinklens.utils.folders import check_folder

    check_folder(out, "an evaluation")
    print(f"{merged(results, out)} records were copied. To print the table: sinklens table {out}")


def export(results: Path, /, *, out: Path) -> None:
    """Write every record of an evaluation as a line of JSON.

    Args:
        results: folder of `sinklens evaluate`
        out: the file, such as records.jsonl
    """
    from sinklens.evaluation.ledger import export as written

    print(f"{written(results, out)} records were written to {out}.")
