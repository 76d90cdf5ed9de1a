"""Evaluation: tasks under interventions, records of every sample, and what they say.

    evaluate("tiny-llada", "tiny-gsm", masking([0, 1, 5, 10], controls=["random"]), "results")
    frame(read_lines("results"))

`OnRay` (distributed.py) and the harness's model (harness.py) need an extra each and are imported from their files.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import UNMASKED, Condition, masking
    from sinklens.evaluation.evaluating import Estimate, estimate, evaluate
    from sinklens.evaluation.ledger import Run
    from sinklens.evaluation.protocols import PROTOCOLS, Protocol
    from sinklens.evaluation.scoring import score
    from sinklens.evaluation.statistics import Accuracy, Paired, holm, paired
    from sinklens.evaluation.tables import Line, frame, read_lines

__all__ = [
    "PROTOCOLS",
    "UNMASKED",
    "Accuracy",
    "Condition",
    "Estimate",
    "Line",
    "Paired",
    "Protocol",
    "Run",
    "estimate",
    "evaluate",
    "frame",
    "holm",
    "masking",
    "paired",
    "read_lines",
    "score",
]

_HOMES = {
    "conditions": ("UNMASKED", "Condition", "masking"),
    "evaluating": ("Estimate", "estimate", "evaluate"),
    "ledger": ("Run",),
    "protocols": ("PROTOCOLS", "Protocol"),
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
