"""The command ``sinklens likelihood``: multiple choice by likelihood, unmasked and with sinks masked.

Pitfall: no intermediate results are saved; an interrupted command starts over.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.cli import declared
from sinklens.cli.options import add_declared, add_limit, add_loading, add_run, loading

if TYPE_CHECKING:
    from sinklens.evaluation.choices import ChoiceResult

WIDE = 400  # columns of a table written to a file or a pipe
LEGEND = (
    "Brackets: 95 % intervals (accuracy: Wilson; its differences: Tango; nats: Student's t over questions). nats: mean "
    "log-likelihood of the right answer, of a diffusion model its bound. 'vs control': sinks masked minus as many "
    "other keys masked. All conditions share the questions and the mask draws; shared draws: width of the interval in "
    "nats relative to independent draws."
)


def add_likelihood(command: argparse.ArgumentParser) -> None:
    """Add the options of ``likelihood``."""
    command.add_argument("models", metavar="MODEL", nargs="+", help="shipped names, hub names or folders")
    command.add_argument(
        "--choices", type=Path, metavar="FILE",
        help="JSON Lines with 'prompt', 'choices' (texts) and 'answer', the index of the right one (default: the "
        "shipped held-out problems, with three wrong results each)",
    )  # fmt: skip
    add_limit(command, "only the first N questions (default: all)")
    command.add_argument(
        "--mask-sinks", type=int, nargs="+", default=[], metavar="K",
        help="mask the K strongest keys of each head: of the same pass, or in an autoregressive model of the token "
        "before; 0, no masking, is always included (default: 0)",
    )  # fmt: skip
    command.add_argument(
        "--controls", nargs="+", default=[], metavar="CONTROL",
        help="for each K, also mask other keys, as in sinklens evaluate: random, same_kind, same_mass, nearest, "
        "permuted, weakest or random_any (default: no controls)",
    )  # fmt: skip
    add_declared(command, declared.DRAWS)
    add_declared(command, declared.LIKELIHOOD)
    add_run(command, "seed")
    add_loading(command)
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the table as CSV (default: no)")
    command.set_defaults(command=run_likelihood)


def run_likelihood(options: argparse.Namespace) -> None:
    """`sinklens likelihood`."""
    from sinklens.evaluation.choices import answer_questions, read_choices, word_problem_choices
    from sinklens.evaluation.conditions import masking
    from sinklens.experiments.nll.draws import DrawRule
    from sinklens.experiments.nll.estimate import LikelihoodRequest
    from sinklens.model import load
    from sinklens.utils.atomic import atomic_write

    conditions = masking(options.mask_sinks, options.controls, seed=options.seed)
    rule = DrawRule(options.mc_num, options.batch, options.masking, seed=options.seed)
    limit = options.limit
    questions = word_problem_choices(limit) if options.choices is None else read_choices(options.choices, limit)
    rows = []
    for name in options.models:
        model = load(name, **loading(options, name))
        guidance = 0.0 if model.causal else options.cfg_scale
        request = LikelihoodRequest(rule=rule, cfg_scale=guidance, rows=options.rows)
        rows += lines(name, answer_questions(model, questions, conditions, request))
    _show(rows)
    if options.out is not None:
        import pandas as pd

        with atomic_write(options.out) as file:
            pd.DataFrame(rows).to_csv(file, index=False)


def lines(model: str, results: Sequence["ChoiceResult"]) -> list[dict[str, Any]]:
    """One line of the table per condition."""
    from sinklens.evaluation.choices import treatment_of

    unmasked = results[0]
    found = []
    for result in results:
        accuracy = result.accuracy
        nats = [one.value for one in result.of_right]
        line: dict[str, Any] = {
            "model": model, "condition": result.condition.name, "accuracy": accuracy.value, "low": accuracy.low,
            "high": accuracy.high, "total": accuracy.n, "nats": sum(nats) / len(nats),
        }  # fmt: skip
        if result is not unmasked:
            line |= _against("unmasked", result, unmasked)
        if (treated := treatment_of(result, results)) is not None:
            line |= _against("control", treated, result)
        found.append(line)
    return found


def _against(what: str, changed: "ChoiceResult", base: "ChoiceResult") -> dict[str, Any]:
    """The columns of a comparison."""
    share, nats = changed.accuracy_against(base).difference, changed.likelihood_against(base)
    return {
        f"accuracy_vs_{what}": share.value, f"accuracy_vs_{what}_low": share.low,
        f"accuracy_vs_{what}_high": share.high, f"accuracy_vs_{what}_p": share.p, f"nats_vs_{what}": nats.value,
        f"nats_vs_{what}_low": nats.low, f"nats_vs_{what}_high": nats.high, f"shared_draws_vs_{what}": nats.narrowing,
    }  # fmt: skip


def _show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    table = Table("model", "condition", "accuracy", "nats")
    for what in ("unmasked", "control"):
        table.add_column(f"accuracy vs {what}")
        table.add_column(f"nats vs {what}")
        table.add_column("shared draws")
    for row in rows:
        cells = [f"{row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{row['nats']:.3f}"]
        for what in ("unmasked", "control"):
            cells += _compared(row, what) if f"nats_vs_{what}" in row else ["", "", ""]
        table.add_row(row["model"], row["condition"], *cells)
    console.print(table)
    console.print(LEGEND, markup=False, soft_wrap=not sys.stdout.isatty())


def _compared(row: dict[str, Any], what: str) -> list[str]:
    share, nats = (
        f"{row[name]:+.3f} [{row[f'{name}_low']:+.3f}, {row[f'{name}_high']:+.3f}]"
        for name in (f"accuracy_vs_{what}", f"nats_vs_{what}")
    )
    return [share, nats, f"× {row[f'shared_draws_vs_{what}']:.2f}"]
