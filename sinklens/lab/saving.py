"""The offline report of a run of the lab, or of two beside each other, as one HTML file."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from sinklens.lab.outcome import Outcome
from sinklens.lab.reading import patterns
from sinklens.lab.spec import RunSpec
from sinklens.views.report import build
from sinklens.views.report_data import Material

if TYPE_CHECKING:
    from sinklens.model import Model

BUDGET = 15.0  # megabytes of a page
PAIR = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Two runs</title>
<style>
body {{ margin: 0; display: flex; flex-wrap: wrap; height: 100vh; }}
iframe {{ flex: 1 1 340px; min-height: 100vh; border: 0; outline: 1px solid #888; }}
</style>
{frames}
</html>
"""


def page(spec: RunSpec, outcome: Outcome, model: "Model", budget: float = BUDGET) -> str:
    """The report of a run.

    Raises:
        SettingError: the run is too large for the budget.
    """
    tokenizer, start = model.tokenizer, outcome.prompt_length
    ids = outcome.canvas[0, :start][outcome.real[:start]].tolist()
    material = Material(
        track=outcome.track(),
        canvas=outcome.canvas,
        prompt=f"token ids {ids}" if tokenizer is None else str(tokenizer.decode(ids)),
        answer=f"token ids {outcome.canvas[-1, start:].tolist()}" if tokenizer is None else outcome.answer.text or "",
        patterns=lambda step, layers: patterns(spec, outcome, model, step, layers),
    )
    return build(material, budget_mb=budget)


def pair(pages: Sequence[str]) -> str:
    """Two reports beside each other, or below each other on a narrow screen."""
    names = ("First run", "Second run")
    frames = [
        f'<iframe title="{name}" srcdoc="{escape(text, quote=True)}"></iframe>'
        for name, text in zip(names, pages, strict=True)
    ]
    return PAIR.format(frames="\n".join(frames))
