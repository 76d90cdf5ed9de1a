"""The command ``sinklens likelihood``: multiple choice by likelihood, unmasked and with sinks masked.

Pitfall: no intermediate results are saved; an interrupted command starts over.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sinklens.cli.options import Integer, Integers, Loading, Names, Seeded, fitted

if TYPE_CHECKING:
    from sinklens.evaluation.choices import ChoiceResult

WIDE = 400  # columns of a table written to a file or a pipe
LEGEND = (
    "Brackets: 95 % intervals (accuracy: Wilson; its differences: Tango; nats: Student's t over questions). nats: mean "
    "log-likelihood of the right answer, of a diffusion model its bound. 'vs control': sinks masked minus as many "
    "other keys masked. All conditions share the questions and the mask draws; shared draws: width of the interval in "
    "nats relative to independent draws."
)


def likelihood(
    models: tuple[str, ...],
    /,
    *,
    choices: Path | None = None,
    limit: Integer | None = None,
    mask_sinks: Integers = (),
    controls: Names = (),
    mc_num: Integer = 128,
    batch: Integer = 16,
    masking: Literal["count", "rate"] = "count",
    cfg_scale: float = 0.0,
    rows: Integer | None = None,
    run: Seeded | None = None,
    loading: Loading | None = None,
    out: Path | None = None,
) -> None:
    """Answer multiple choice questions by likelihood.

    Args:
        models: shipped names, hub names or folders
        choices: JSON Lines with 'prompt', 'choices' (texts) and 'answer', the index of the right one (default: the
            shipped held-out problems, with three wrong results each)
        limit: only the first N questions (default: all)
        mask_sinks: mask the K strongest keys of each head: of the same pass, or in an autoregressive model of the token
            before; 0, no masking, is always included (default: 0)
        controls: for each K, also mask other keys, as in sinklens evaluate: random, same_kind, same_mass, nearest,
            permuted, weakest or random_any (default: no controls)
        mc_num: draws per pair, and per block of a block-causal model
        batch: draws that share one random start; it divides --mc-num
        masking: mask a given number of tokens, or each at a given rate
        cfg_scale: strength of classifier-free guidance; 0 for none
        rows: most rows in a pass (default: as many as have 16,384 positions)
        out: also write the table as CSV to this file (default: no)
    """
    import pandas as pd

    from sinklens.evaluation.choices import answer_questions, read_choices, word_problem_choices
    from sinklens.evaluation.conditions import masking as conditions_of
    from sinklens.experiments.nll.estimate import LikelihoodRequest
    from sinklens.experiments.nll.noise import DrawRule
    from sinklens.model import load
    from sinklens.utils.atomic import atomic_write

    seeded = run or {}
    conditions, rule = conditions_of(mask_sinks, controls, **seeded), DrawRule(mc_num, batch, masking, **seeded)
    questions = word_problem_choices(limit) if choices is None else read_choices(choices, limit)
    found = []
    for name in models:
        model = load(name, **fitted(name, loading))
        request = LikelihoodRequest(rule=rule, cfg_scale=0.0 if model.causal else cfg_scale, rows=rows)
        found += lines(name, answer_questions(model, questions, conditions, request))
    _show(found)
    if out is not None:
        with atomic_write(out) as file:
            pd.DataFrame(found).to_csv(file, index=False)


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
    against = [f"{name} vs {what}" for what in ("unmasked", "control") for name in ("accuracy", "nats", "shared draws")]
    table = Table("model", "condition", "accuracy", "nats", *against)
    for row in rows:
        compared = [_cell(row, name.replace(" ", "_")) for name in against]
        table.add_row(row["model"], row["condition"], _cell(row, "accuracy", ""), f"{row['nats']:.3f}", *compared)
    console.print(table)
    console.print(LEGEND, markup=False, soft_wrap=not sys.stdout.isatty())


def _cell(row: dict[str, Any], name: str, sign: str = "+") -> str:
    """A value with its limits; a ratio of widths has none."""
    if name not in row:
        return ""
    if name.startswith("shared"):
        return f"× {row[name]:.2f}"
    before = "" if name == "accuracy" else f"{name}_"
    numbers = (f"{row[one]:{sign}.3f}" for one in (name, f"{before}low", f"{before}high"))
    return "{} [{}, {}]".format(*numbers)
