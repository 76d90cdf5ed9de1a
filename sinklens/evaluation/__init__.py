"""Evaluation: tasks under interventions, records of every sample, and what they say.

    evaluate("tiny-llada", "tiny-gsm", masking([0, 1, 5, 10], controls=["random"]), "results")
    frame(read_lines("results"))

`OnRay` needs the extra ``ray`` when it runs; the harness's model needs the extra ``lm-eval`` to be imported, and is
imported from its file, harness.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import UNMASKED, Condition, masking
    from sinklens.evaluation.distributed import OnRay
    from sinklens.evaluation.ledger import LedgerRun, Writer
    from sinklens.evaluation.protocols import PROTOCOLS, EvalProtocol
    from sinklens.evaluation.runner import Estimate, estimate, evaluate
    from sinklens.evaluation.sandbox import Limits, available_isolation, run_program
    from sinklens.evaluation.scoring import score
    from sinklens.evaluation.statistics import Accuracy, Paired, holm, paired
    from sinklens.evaluation.tables import Line, frame, read_lines

__all__ = [
    "PROTOCOLS",
    "UNMASKED",
    "Accuracy",
    "Condition",
    "Estimate",
    "EvalProtocol",
    "LedgerRun",
    "Limits",
    "Line",
    "OnRay",
    "Paired",
    "Writer",
    "available_isolation",
    "estimate",
    "evaluate",
    "frame",
    "holm",
    "masking",
    "paired",
    "read_lines",
    "run_program",
    "score",
]

_HOMES = {
    "conditions": ("UNMASKED", "Condition", "masking"),
    "distributed": ("OnRay",),
    "runner": ("Estimate", "estimate", "evaluate"),
    "ledger": ("LedgerRun", "Writer"),
    "protocols": ("PROTOCOLS", "EvalProtocol"),
    "sandbox": ("Limits", "available_isolation", "run_program"),
    "scoring": ("score",),
    "statistics": ("Accuracy", "Paired", "holm", "paired"),
    "tables": ("Line", "frame", "read_lines"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"sinklens.evaluation.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
