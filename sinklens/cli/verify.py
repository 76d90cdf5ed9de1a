"""``sinklens verify``: check a checkpoint that you have, and write a report that can be pasted.

Pitfall: a statement of the study that does not hold is a finding about the model. Only checks of the checkpoint itself
make the command fail.
"""

import argparse
from pathlib import Path

from sinklens.cli.options import add_loading, add_out, add_settings, loading, settings_given
from sinklens.errors import SinklensError


def add_verify(command: argparse.ArgumentParser) -> None:
    """Add the options of ``sinklens verify``."""
    command.add_argument("model", metavar="MODEL", help="shipped name, hub name or folder")
    add_out(command, "folder for report.json, report.md and the records of the runs; rerun to resume")
    command.add_argument(
        "--problems", type=int, default=50, metavar="N", help="problems of the accuracies (default: %(default)s)"
    )
    command.add_argument("--data", type=Path, help="local file or folder of GSM8K (default: the hub)")
    command.add_argument("--fingerprint", default="", help="the expected fingerprint (default: of shipped models)")
    command.add_argument(
        "--protocol", default="", help="another protocol, or a task (default: a protocol with a published score)"
    )
    command.add_argument(
        "--score", type=float, metavar="SHARE",
        help="accuracy that was published for these settings on all problems (default: the protocol's)",
    )  # fmt: skip
    command.add_argument("--batch", type=int, default=10, metavar="N", help="problems at a time (default: %(default)s)")
    add_settings(command)
    add_loading(command)
    command.set_defaults(command=run_verify)


def run_verify(options: argparse.Namespace) -> None:
    """`sinklens verify`."""
    from sinklens.evaluation.verification import verify
    from sinklens.model import load
    from sinklens.utils.atomic import atomic_write

    for name in ("problems", "batch"):
        if (given := getattr(options, name)) < 1:
            raise SinklensError(f"--{name} must be at least 1; got {given}.")
    model = load(options.model, **loading(options, options.model), check=False)
    found = verify(
        model, options.out / "runs", problems=options.problems, data=options.data, fingerprint=options.fingerprint,
        protocol=options.protocol, score=options.score, batch=options.batch, settings=settings_given(options),
    )  # fmt: skip
    for name, text in (("report.json", found.to_json()), ("report.md", found.to_markdown())):
        with atomic_write(options.out / name) as part:
            part.write_text(text, encoding="utf-8")
    print(found.to_markdown())
    print(f"Written to {options.out}/: report.json and report.md, which docs/verified.md collects.")
    if found.failed:
        raise SinklensError(f"{found.model} failed: {', '.join(found.failed)}.")
