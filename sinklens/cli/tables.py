"""What ``sinklens table`` does for an evaluation: tables to read, with files and figures, or one line per claim.

Pitfall: `print_claims` writes nothing but the claims to standard output, so warnings go to standard error.
"""

import sys
import warnings
from pathlib import Path


def write_table(ledger: Path, out: Path, *, mixed_devices: bool) -> None:
    """Print the tables of a ledger, and write table.csv and the figures to `out`."""
    from sinklens.cli.printing import show
    from sinklens.evaluation.tables import frame, read_lines
    from sinklens.utils.atomic import atomic_write
    from sinklens.utils.folders import require_writable
    from sinklens.views import accuracy_by_speed, accuracy_curves

    require_writable(out)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = read_lines(ledger, mixed_devices=mixed_devices)
    with atomic_write(out / "table.csv") as part:
        frame(lines).to_csv(part, index=False)
    written = ["table.csv"]
    scored = [line for line in lines if line.accuracy.n]
    figures = {"accuracy": accuracy_curves(frame(scored))} if scored else {}
    if any(line.cache and line.masked == 0 for line in scored):
        figures["speed"] = accuracy_by_speed(frame(scored))
    for name in (f"{name}.{kind}" for name in figures for kind in ("png", "svg")):
        with atomic_write(out / name) as part:
            figures[name.partition(".")[0]].savefig(part, dpi=160, bbox_inches="tight")
        written.append(name)
    show(lines, [str(note.message) for note in caught])
    print(f"Written: {', '.join(str(out / name) for name in written)}.")


def print_claims(ledger: Path, kind: str, *, mixed_devices: bool) -> None:
    """Print one line per claim of a ledger; warnings go to standard error."""
    from sinklens.evaluation.claim_lines import claims, format_claims
    from sinklens.evaluation.tables import read_lines

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = claims(read_lines(ledger, mixed_devices=mixed_devices))
    for note in caught:
        print(f"sinklens: {note.message}", file=sys.stderr)
    print(format_claims(found, kind), end="")
