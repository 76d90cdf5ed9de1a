"""The commands ``sinklens analyse``, which runs a study, and ``sinklens table``, which prints its tables again.

``table`` prints what is in a folder: studies, an evaluation (sinklens/evaluation/commands.py), or both.
"""

import argparse
from pathlib import Path
from typing import Any

from sinklens.cli.options import add_settings, natural, settings_given
from sinklens.errors import SettingError, SinklensError


def add_analyse(commands: Any) -> None:
    """Add ``analyse``."""
    from sinklens.analyses import questions

    text = "ask a question of one or several models; print and write tables, figures and a manifest"
    asked = "\n".join(f"  {name:<12} {question}" for name, question in questions().items())
    analyse = commands.add_parser(
        "analyse", help=text, description=text, epilog=f"studies:\n{asked}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    analyse.add_argument("name", metavar="NAME", help="a study of those below, or STUDY.py, a file of your own")
    analyse.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    analyse.add_argument(
        "--out", type=Path, help="folder for the results; prompts finished there are not measured again (analyses-NAME)"
    )
    analyse.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="one prompt per line, or JSON Lines (*.jsonl) with a text or a list of token ids under 'prompt' (or "
        "'question') in each (the shipped held-out problems)",
    )  # fmt: skip
    analyse.add_argument(
        "--number", type=int, metavar="N", help="the first N prompts (100 of the shipped ones; or all)"
    )
    analyse.add_argument(
        "--batch", type=int, default=10, metavar="N",
        help="prompts that run together, where a study can; no number depends on it (%(default)s)",
    )  # fmt: skip
    analyse.add_argument("--seed", type=natural, default=0, help="of the runs and of the intervals (%(default)s)")
    add_settings(analyse)
    analyse.set_defaults(command=run_analyse)


def add_table(commands: Any) -> None:
    """Add ``table``."""
    text = "print the tables of what `sinklens evaluate` or `sinklens analyse` measured, with intervals"
    command = commands.add_parser("table", help=text, description=text)
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder that one of the two wrote")
    command.add_argument(
        "--out", type=Path, help="of an evaluation: folder for table.csv, accuracy.png and accuracy.svg (RESULTS)"
    )
    command.add_argument(
        "--mixed-devices", action="store_true",
        help="of an evaluation: pair runs of different device types, whose last bits differ (no)",
    )  # fmt: skip
    command.set_defaults(command=run_table)


def run_analyse(options: argparse.Namespace) -> None:
    """`sinklens analyse`."""
    from sinklens.analyses import find
    from sinklens.analyses.printing import show
    from sinklens.evaluation.counting import Counts

    kind = find(options.name)
    out = options.out or Path(f"analyses-{kind.name}")
    prompts = _prompts(options)
    study = kind(seed=options.seed, batch=options.batch, settings=settings_given(options))
    with Counts("prompts") as counts:
        try:
            findings = study.run(options.models, prompts, out, progress=counts)
        except KeyboardInterrupt:
            counts.stop(out, options.call)
    show(out, findings.manifest)
    print(f"{kind.name}: {len(prompts)} prompts, {', '.join(findings.measured)}. Written:")
    print("\n".join(f"  {file}" for file in findings.files))


def _prompts(options: argparse.Namespace) -> list[Any]:
    from sinklens.tasks.prompts import read_prompts
    from sinklens.tasks.word_problems import held_out

    number = options.number
    if number is not None and number < 1:
        raise SinklensError(f"--number is at least 1; got {number}.")
    if options.prompts is None:
        return [problem.prompt for problem in held_out(number or 100)]
    prompts = read_prompts(options.prompts, number)
    if number is not None and number > len(prompts):
        raise SinklensError(f"--number is {number}, and {options.prompts} holds {len(prompts)} prompts.")
    return prompts


def run_table(options: argparse.Namespace) -> None:
    """`sinklens table`."""
    from sinklens.analyses.printing import manifests, show
    from sinklens.cli.evaluation import write_table

    folder: Path = options.ledger
    if not folder.is_dir():
        raise SinklensError(f"there is no folder {folder}; give one that `sinklens evaluate` or `analyse` wrote.")
    studies = manifests(folder)
    evaluated = any(folder.glob("run-*/run.json"))
    if not studies and not evaluated:
        raise SinklensError(_nothing_in(folder))
    if not evaluated and (options.out or options.mixed_devices):
        raise SettingError(f"--out and --mixed-devices are for evaluations; {folder} holds a study alone.")
    for manifest in studies:
        show(folder, manifest)
    if evaluated:
        write_table(folder, options.out or folder, mixed_devices=options.mixed_devices)


def _nothing_in(folder: Path) -> str:
    """Why no table of `folder` can be printed."""
    from sinklens.analyses.units import finished

    kept = finished(folder)
    if kept:
        return f"{folder} holds an unfinished study ({kept}); run the same `sinklens analyse` again to resume it."
    return (
        f"{folder} holds neither an evaluation nor a study; `sinklens evaluate ... --out {folder}` or `sinklens "
        f"analyse ... --out {folder}` makes one."
    )
