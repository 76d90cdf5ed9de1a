"""The offline report of a run of the lab, or of two beside each other, as one HTML file.

The page of a pair begins with what was changed and with the comparison, for readers and, as JSON, for programs.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from sinklens.live.comparing import differences, divergence, why_not
from sinklens.live.outcome import RunOutcome
from sinklens.live.reading import patterns
from sinklens.live.spec import RunSpec
from sinklens.views.report import build
from sinklens.views.report_data import Material

if TYPE_CHECKING:
    from sinklens.model import Model

BUDGET = 15.0  # megabytes of a page
NAMES = ("First run", "Second run")
PAIR = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Two runs</title>
<style>
body {{ margin: 0; display: flex; flex-wrap: wrap; font: 14px/1.4 system-ui, sans-serif; }}
header {{ flex: 1 0 100%; padding: 8px 16px; overflow-x: auto; }}
th, td {{ padding: 2px 12px 2px 0; text-align: left; vertical-align: top; white-space: pre-wrap; }}
iframe {{ flex: 1 1 340px; height: 100vh; border: 0; outline: 1px solid #888; }}
</style>
<header>
<table>{runs}</table>
<p>{said}</p>
<details><summary>Step by step</summary><table>{steps}</table></details>
</header>
<script type="application/json" id="comparison">{data}</script>
{frames}
</html>
"""


def page(spec: RunSpec, outcome: RunOutcome, model: "Model", budget: float = BUDGET) -> str:
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
        facts=[] if changed(spec) == "none" else [("changes", changed(spec))],
    )
    return build(material, budget_mb=budget)


def changed(spec: RunSpec) -> str:
    """What changes a run, as its script writes it; "none" for an ordinary run."""
    changes = [change.source() for change in spec.changes]
    return "; ".join([*changes, *([] if spec.replay is None else [f"replays run {spec.replay}"])]) or "none"


def pair(pages: Sequence[str], specs: Sequence[RunSpec], outcomes: Sequence[RunOutcome], model: "Model") -> str:
    """Two reports beside each other, or below each other on a narrow screen, below their comparison.

    Args:
        pages: the reports.
        specs, outcomes: the runs.
        model: the model of both, if they have the same.
    """
    found, why = differences(*outcomes), why_not(specs, outcomes)
    found |= {"kl": None if why else divergence(specs, outcomes, model), "kl_why": why}
    facts: list[Sequence[Any]] = [("model", "prompt", "seed", "settings", "changes", "answer")]
    facts += [
        (spec.model, spec.prompt, spec.seed, outcome.settings, changed(spec), outcome.answer.text or "")
        for spec, outcome in zip(specs, outcomes, strict=True)
    ]
    frames = [
        f'<iframe title="{name}" srcdoc="{escape(text, quote=True)}"></iframe>'
        for name, text in zip(NAMES, pages, strict=True)
    ]
    data = json.dumps(found | {"runs": [spec.to_json() for spec in specs]}).replace("<", "\\u003c")
    rows = [("", *NAMES), *zip(*facts, strict=True)]
    return PAIR.format(
        frames="\n".join(frames), runs=_rows(rows), said=escape(_said(found)), steps=_rows(_by_step(found)), data=data
    )


def _said(found: Mapping[str, Any]) -> str:
    """The comparison in a sentence."""
    first, kl = found["first_difference"], [value for value in found["kl"] or [] if value is not None]
    parts = ["The canvases are the same." if first is None else f"The canvases differ from step {first} on."]
    parts += [f"KL {sum(kl) / len(kl):.3g} nats per step (mean of {len(kl)})."] if kl else []
    parts += [f"No KL: {found['kl_why']}"] if found["kl_why"] else []
    return " ".join(parts)


def _by_step(found: Mapping[str, Any]) -> list[Sequence[Any]]:
    """For each canvas the positions that differ; for each step the KL and the share of heads whose sink moved."""
    kl, moved = found["kl"] or [], found["sinks_moved"] or []
    last = max(len(kl), len(moved), *(step + 1 for step, _ in found["cells"]))
    rows: list[Sequence[Any]] = [("step", "positions that differ", "KL (nats)", "moved sinks")]
    for step in range(last):
        places = ", ".join(str(place) for at, place in found["cells"] if at == step)
        shown = ["" if step >= len(values) or values[step] is None else f"{values[step]:.3g}" for values in (kl, moved)]
        rows.append((step, places, *shown))
    return rows


def _rows(rows: Sequence[Sequence[Any]]) -> str:
    return "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
