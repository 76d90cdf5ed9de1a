"""The commands ``sinklens analyse``, which runs a study, and ``sinklens table``, which prints its tables again.

``table`` prints what a folder holds: studies, an evaluation (evaluation.py), or both.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from sinklens.cli.options import (
    add_former,
    add_limit,
    add_loading,
    add_out,
    add_run,
    add_settings,
    loading,
    run_given,
    settings_given,
)
from sinklens.errors import SettingError, SinklensError


def add_analyse(analyse: argparse.ArgumentParser) -> None:
    """Add the options of ``analyse``."""
    from sinklens.analyses import questions

    listed = "\n".join(f"  {name:<12} {question}" for name, question in questions().items())
    analyse.epilog, analyse.formatter_class = f"studies:\n{listed}", argparse.RawDescriptionHelpFormatter
    analyse.add_argument(
        "name", metavar="NAME", help="one of the studies below, or a Python file that defines one (STUDY.py)"
    )
    analyse.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    add_out(analyse, "folder for the results; prompts already finished there are skipped")
    analyse.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="one prompt per line; or JSON Lines (*.jsonl), also for prompts with line breaks, with a text or a list "
        "of token ids under 'prompt' or 'question', and what is measured of answers needs the right one, a text or a "
        "number under 'expected' or 'answer' (default: the shipped held-out problems)",
    )  # fmt: skip
    analyse.add_argument(
        "--group", metavar="COLUMN",
        help="key of each line of FILE.jsonl that holds what its prompt shares with others, such as its template, "
        "document or author; matched comparisons compare within groups, and intervals resample groups (default: the "
        "templates of the shipped problems; none for a file)",
    )  # fmt: skip
    add_limit(analyse, "only the first N prompts (default: 100 of the shipped problems; all prompts of a file)")
    add_former(analyse, "--number", "--limit", "limit")
    analyse.add_argument(
        "--batch", type=int, default=10, metavar="N",
        help="prompts run together, where the study supports it; does not affect the results (default: %(default)s)",
    )  # fmt: skip
    analyse.add_argument(
        "--seeds", action="store_true",
        help="the models are training runs that differ in their seed: also print and write every measure over all of "
        "them, with an interval over seeds and prompts, and whether they agree in sign (default: no)",
    )  # fmt: skip
    add_settings(analyse)
    add_run(analyse)
    add_loading(analyse)
    analyse.set_defaults(command=run_analyse)


def add_table(command: argparse.ArgumentParser) -> None:
    """Add the options of ``table``."""
    command.add_argument("ledger", metavar="RESULTS", type=Path, help="folder written by either command")
    command.add_argument(
        "--out",
        type=Path,
        help="for an evaluation: folder for table.csv and the figures (default: RESULTS)",
    )
    command.add_argument(
        "--mixed-devices", action="store_true",
        help="for an evaluation: pair runs from different device types, whose last bits differ (default: no)",
    )  # fmt: skip
    command.add_argument(
        "--format", choices=("markdown", "latex", "csv", "json"),
        help="for an evaluation: print one line per claim in this format, and write nothing (default: tables to read)",
    )  # fmt: skip
    command.set_defaults(command=run_table)


def run_analyse(options: argparse.Namespace) -> None:
    """`sinklens analyse`."""
    from sinklens.analyses import find
    from sinklens.analyses.printing import show
    from sinklens.analyses.seeds import write_seeds
    from sinklens.evaluation.counting import Counts
    from sinklens.model import load
    from sinklens.utils.folders import check_folder

    kind = find(options.name)
    out = _out(options.out, kind.name)
    prompts = _prompts(options)
    if options.seeds and len(options.models) < 2:
        raise SettingError(
            f"--seeds compares training runs of one recipe; give at least two models, not {options.models[0]} alone."
        )
    answers = _answers(options, kind, prompts)
    study = kind(batch=options.batch, settings=settings_given(options), answers=answers, **run_given(options))
    check_folder(out, "a study")
    models = [load(name, **loading(options, name)) for name in options.models]
    with Counts("prompts") as counts:
        try:
            findings = study.run(models, prompts, out, progress=counts, group=_group(options))
        except KeyboardInterrupt:
            counts.stop(out, options.call)
    show(out, findings.manifest)
    files = findings.files
    if options.seeds:
        table, file = write_seeds(study, findings, out, options.seed)
        print(f"over {len(findings.measured)} seeds and {len(prompts)} prompts:")
        print(table.dropna(axis="columns", how="all").round(3).to_string(index=False, na_rep=""))
        print(
            "low, high: 95 % t interval of the mean over seeds and prompts, on the scale given. agree: whether all "
            "seeds are on the same side of 0, which three are in 25 % of all cases by chance. compared: a measurement "
            "of each seed, or a difference between two conditions within each seed. p_holm: corrected over all "
            'differences; verdict: "cannot tell" unless the interval excludes 0 and p_holm is at most 0.05.'
        )
        files = (*files, file)
    print(f"{kind.name}: {len(prompts)} prompt{'s' * (len(prompts) != 1)}, {', '.join(findings.measured)}. Written:")
    print("\n".join(f"  {file}" for file in files))


def _out(given: Path, study: str) -> Path:
    """The folder of the results; the default of earlier versions where it exists and the present one does not."""
    former = Path(f"analyses-{study}")
    if given != Path("sinklens-analyse") or given.exists() or not former.exists():
        return given
    print(f"sinklens: going on in {former}, the default of earlier versions; now it is {given}.", file=sys.stderr)
    return former


def _prompts(options: argparse.Namespace) -> list[Any]:
    from sinklens.tasks.prompts import read_prompts
    from sinklens.tasks.word_problems import held_out

    number = options.limit
    if number is not None and number < 1:
        raise SinklensError(f"--limit must be at least 1; got {number}.")
    if options.prompts is None:
        return [problem.prompt for problem in held_out(number or 100)]
    prompts = read_prompts(options.prompts, number)
    if number is not None and number > len(prompts):
        raise SinklensError(
            f"--limit is {number}, but {options.prompts} holds {len(prompts)} prompts; give at most that many."
        )
    return prompts


def _answers(options: argparse.Namespace, study: Any, prompts: list[Any]) -> dict[str, str]:
    """The expected answers of the file of prompts.

    Raises:
        SettingError: the study measures nothing but right answers, and the file has none.
    """
    from sinklens.analyses.answers import known
    from sinklens.tasks.prompts import read_answers

    answers = {} if options.prompts is None else read_answers(options.prompts, options.limit)
    unknown = sum(not known(prompt, answers) for prompt in prompts)
    if not unknown or not study.scored:
        return answers
    lacks = (
        f"{unknown} of {len(prompts)} prompts in {options.prompts} have no known answer. Write lines such as "
        f'{{"prompt": "Question: ...", "expected": "42"}} in a .jsonl file; prompts must be texts'
    )
    if study.scored == "all" and unknown == len(prompts):
        raise SettingError(f"the study {study.name} counts answers lost, and {lacks}.")
    print(f"sinklens: {lacks}. Where right answers are counted, they are left out.", file=sys.stderr)
    return answers


def _group(options: argparse.Namespace) -> list[str] | None:
    """The groups of the prompts of a file; None without ``--group``."""
    from sinklens.tasks.prompts import read_groups

    if options.group is None:
        return None
    if options.prompts is None:
        raise SettingError(
            "--group names a key of the lines of a file of prompts; give the file (--prompts FILE.jsonl)."
        )
    return read_groups(options.prompts, options.group, options.limit)


def run_table(options: argparse.Namespace) -> None:
    """`sinklens table`."""
    from sinklens.analyses.printing import manifests, show
    from sinklens.cli.tables import print_claims, write_table
    from sinklens.evaluation.ledger import holds_runs

    folder: Path = options.ledger
    if not folder.is_dir():
        raise SinklensError(f"no such folder: {folder}; give one written by `sinklens evaluate` or `sinklens analyse`.")
    studies = manifests(folder)
    evaluated = holds_runs(folder)
    if not studies and not evaluated:
        raise SinklensError(_nothing_in(folder))
    if not evaluated and (options.out or options.mixed_devices or options.format):
        raise SettingError(
            f"--out, --format and --mixed-devices are for evaluations; {folder} holds only a study; remove them."
        )
    if options.format and options.out:
        raise SettingError("--format prints and writes nothing; redirect its output to a file, and leave --out out.")
    if options.format:
        print_claims(folder, options.format, mixed_devices=options.mixed_devices)
        return
    for manifest in studies:
        show(folder, manifest)
    if evaluated:
        write_table(folder, options.out or folder, mixed_devices=options.mixed_devices)


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
