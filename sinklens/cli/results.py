"""The commands that work on existing results (table, score, merge, export), and lm-eval.

Only ``score`` runs generated programs, and only with ``--run-generated-code``.
"""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

from cyclopts import Parameter

from sinklens.cli.options import Integer
from sinklens.cli.writing import write_figure
from sinklens.errors import SinklensError, require
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import in_csv, say


def lm_eval(*options: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Run lm-evaluation-harness on sinklens models.

    Args:
        options: those of the harness, such as --model sinklens --model_args pretrained=tiny-llada --tasks gsm8k
    """
    import sinklens.evaluation.harness  # noqa: F401  registers the model

    from lm_eval.__main__ import cli_evaluate  # isort: skip

    with patch.object(sys, "argv", ["sinklens lm-eval", *options]):  # the harness reads it
        cli_evaluate()


def table(
    results: Path,
    /,
    *,
    out: Path | None = None,
    mixed_devices: bool = False,
) -> None:
    """Print the tables of a study or an evaluation.

    Args:
        results: folder of `sinklens analyse` or `sinklens evaluate`
        out: for an evaluation: folder for table.csv and the figures (default: RESULTS)
        mixed_devices: for an evaluation: pair runs from different device types, whose last bits differ
    """
    from sinklens.analyses.printing import manifests
    from sinklens.analyses.printing import show as show_study
    from sinklens.cli.printing import show
    from sinklens.evaluation.ledger import holds_runs
    from sinklens.evaluation.tables import frame
    from sinklens.utils.folders import require_writable
    from sinklens.views import accuracy_curves

    require(
        results.is_dir(),
        f"no such folder: {results}; give one written by `sinklens evaluate` or `sinklens analyse`.",
        SinklensError,
    )
    studies, evaluated = manifests(results), holds_runs(results)
    require(
        studies or evaluated,
        f"{results} holds neither an evaluation nor a finished study; `sinklens evaluate ... --out {results}` or "
        f"`sinklens analyse ... --out {results}` creates one, and resumes what was interrupted.",
        SinklensError,
    )
    for manifest in studies:
        show_study(results, manifest)
    if not evaluated:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = frame(results, mixed_devices=mixed_devices)
    written = [(out or results) / "table.csv"]
    require_writable(written[0].parent)
    write_file(written[0], in_csv(rows))
    if (rows["total"] > 0).any():
        written.append(written[0].with_name("accuracy.png"))
        write_figure(written[1], accuracy_curves(rows[rows["total"] > 0]))
    show(rows, [str(note.message) for note in caught])
    say(f"Written: {', '.join(map(str, written))}.")


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
    from sinklens.evaluation.sandbox import Limits, available_isolation
    from sinklens.evaluation.scoring import score as run_programs

    if not run_generated_code:
        raise SinklensError(
            f"this command executes programs written by a model. Add --run-generated-code to allow that. Isolation on "
            f"this machine: {available_isolation()}."
        )
    say(f"Isolation: {available_isolation()}.", to=sys.stderr)
    ran = run_programs(results, data=data, limits=Limits(seconds=seconds, memory_mb=memory), progress=_progress)
    say(f"{ran} programs were run. To print the table: sinklens table {results}")


def _progress(run: Any, done: int, total: int) -> None:
    if done == total or done % 25 == 0:
        say(f"{run.what['model']}, {run.what['condition']['name']}: {done} of {total}", to=sys.stderr)


def merge(results: list[Path], /, *, out: Path) -> None:
    """Copy the records of several evaluations into one folder.

    Args:
        results: folders of `sinklens evaluate`
        out: folder of the records; created, or added to
    """
    from sinklens.evaluation.ledger import merge as merged
    from sinklens.utils.folders import check_folder

    check_folder(out, "an evaluation")
    say(f"{merged(results, out)} records were copied. To print the table: sinklens table {out}")


def export(results: Path, /, *, out: Path) -> None:
    """Write every record of an evaluation as a line of JSON.

    Args:
        results: folder of `sinklens evaluate`
        out: the file, such as records.jsonl
    """
    from sinklens.evaluation.ledger import export as written

    say(f"{written(results, out)} records were written to {out}.")
