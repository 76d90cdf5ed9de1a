"""The command ``sinklens analyse``: run a study of prompts.

Pitfall: prompts of a file without known answers are left out where right answers are counted.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from sinklens.analyses import questions
from sinklens.cli.options import Call, Integer, LoadingOfRun, Run, fitted
from sinklens.cli.settings import Settings
from sinklens.errors import require
from sinklens.utils.escaping import say

SEEDS = (
    "low, high: 95 % t interval of the mean over seeds and prompts, on the scale given. compared: a measurement of "
    "each seed, or a difference between two conditions within each seed. p_holm: corrected over all differences; "
    'verdict: "cannot tell" unless the interval excludes 0 and p_holm is at most 0.05.'
)
STUDIES = "\n".join(f"  {name:<12} {question}" for name, question in questions().items())
analyse = App(name="analyse", help_epilogue=f"studies:\n{STUDIES}\n")


@analyse.default
def run_study(
    name: str,
    models: tuple[str, ...],
    /,
    *,
    call: Call,
    out: Path = Path("sinklens-analyse"),
    prompts: Path | None = None,
    group: str | None = None,
    limit: Integer | None = None,
    batch_size: Integer = 10,
    length: Integer | None = None,
    seeds: bool = False,
    shares: Annotated[tuple[float, ...], Parameter(show_default=False)] = (),
    edits: Integer | None = None,
    after: str = "",
    settings: Settings | None = None,
    run: Run | None = None,
    loading: LoadingOfRun | None = None,
) -> None:
    """Run a study on one or several models.

    Args:
        name: one of the studies below, or a Python file that defines one (STUDY.py)
        models: shipped names, hub names or folders
        out: folder for the results; prompts already finished there are skipped
        prompts: one prompt per line; or JSON Lines (*.jsonl), also for prompts with line breaks, with a text or a list
            of token ids under 'prompt' or 'question', and what is measured of answers needs the right one, a text or a
            number under 'expected' or 'answer' (default: the shipped held-out problems)
        group: key of each line of FILE.jsonl that holds what its prompt shares with others, such as its template,
            document or author; matched comparisons compare within groups, and intervals resample groups (default:
            the templates of the shipped problems; none for a file)
        limit: only the first N prompts (default: 100 of the shipped problems; all prompts of a file)
        batch_size: prompts run together, where the study supports it; does not affect the results
        length: tokens of the longest prompt and its answer together (default: as --gen-length says)
        seeds: the models are training runs that differ in their seed: also print and write every measure over all of
            them, with an interval over seeds and prompts
        shares: texts and pair: shares of a text that are masked, such as 0.15 0.9 (default: the study's)
        edits: texts and pair: edits of each sort for each text (default: the study's)
        after: texts and pair: what a text is predicted after, such as "Answer:" (default: its first token)
    """
    from sinklens.analyses import find
    from sinklens.analyses.printing import show
    from sinklens.analyses.seeds import write_seeds
    from sinklens.analyses.study import own_settings
    from sinklens.evaluation.counting import counting
    from sinklens.model import load
    from sinklens.tasks.prompts import read_groups
    from sinklens.utils.folders import check_folder

    kind, asked = find(name), _prompts(prompts, limit)
    require(
        not seeds or len(models) > 1,
        f"--seeds compares training runs of one recipe; give at least two models, not {models[0]} alone.",
    )
    require(
        group is None or prompts is not None,
        "--group names a key of the lines of a file of prompts; give the file (--prompts FILE.jsonl).",
    )
    groups = read_groups(prompts, group, limit) if group is not None and prompts is not None else None
    answers = _answers(prompts, limit, kind, asked)
    study = kind(
        batch_size=batch_size, length=length, settings=settings or {}, answers=answers, **run or {},
        **own_settings(kind, shares=shares, edits=edits, after=after),
    )  # fmt: skip
    check_folder(out, "a study")
    loaded = [load(model, **fitted(model, loading, settings)) for model in models]
    with counting("prompts", out, call) as count:
        findings = study.run(loaded, asked, out, progress=count, group=groups)
    show(out, findings.manifest)
    files = list(findings.files)
    if seeds:
        table, file = write_seeds(study, findings, out, study.seed)
        shown = table.dropna(axis="columns", how="all").round(3).to_string(index=False, na_rep="")
        say(f"over {len(findings.measured)} seeds and {len(asked)} prompts:", *shown.split("\n"), SEEDS)
        files.append(file)
    say(f"{kind.name}: {len(asked)} prompt{'s' * (len(asked) != 1)}, {', '.join(findings.measured)}. Written:")
    say(*(f"  {file}" for file in files))


def _prompts(file: Path | None, limit: int | None) -> list[Any]:
    from sinklens.tasks.base import check_limit
    from sinklens.tasks.prompts import read_prompts
    from sinklens.tasks.word_problems import held_out

    check_limit(limit)
    return read_prompts(file, limit) if file is not None else [one.prompt for one in held_out(limit or 100)]


def _answers(file: Path | None, limit: int | None, study: Any, prompts: list[Any]) -> dict[str, str]:
    """The expected answers of the file of prompts.

    Raises:
        SettingError: the study measures nothing but right answers, and the file has none.
    """
    from sinklens.analyses.answers import known
    from sinklens.tasks.prompts import read_answers

    answers = {} if file is None else read_answers(file, limit)
    unknown = sum(not known(prompt, answers) for prompt in prompts)
    lacks = (
        f"{unknown} of {len(prompts)} prompts in {file} have no known answer. Write lines such as "
        f'{{"prompt": "Question: ...", "expected": "42"}} in a .jsonl file; prompts must be texts'
    )
    require(
        study.scored != "all" or unknown != len(prompts), f"the study {study.name} counts answers lost, and {lacks}."
    )
    if study.scored and unknown:
        say(f"sinklens: {lacks}. Where right answers are counted, they are left out.", to=sys.stderr)
    return answers
