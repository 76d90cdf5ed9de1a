"""Evaluation: tasks under interventions, a record of every sample, and tables of the results.

    evaluate("tiny-llada", "tiny-gsm", masking([0, 1, 5, 10], controls=["random"]), "results")
    frame("results")

`OnRay` needs the extra ``ray`` at run time. The model for lm-evaluation-harness lives in harness.py and is not
re-exported here, because importing it needs the extra ``lm-eval``.
"""

from typing import TYPE_CHECKING

from sinklens.utils.lazy import lazily

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import UNMASKED, Condition, masking, under_caches
    from sinklens.evaluation.distributed import OnRay
    from sinklens.evaluation.ledger import LedgerRun
    from sinklens.evaluation.protocols import HARNESS_PROTOCOLS, PROTOCOLS, EvalProtocol
    from sinklens.evaluation.runner import evaluate
    from sinklens.evaluation.sandbox import run_program
    from sinklens.evaluation.scoring import score
    from sinklens.evaluation.tables import frame
    from sinklens.utils.estimates import paired, proportion

__all__ = [
    "HARNESS_PROTOCOLS",
    "PROTOCOLS",
    "UNMASKED",
    "Condition",
    "EvalProtocol",
    "LedgerRun",
    "OnRay",
    "evaluate",
    "frame",
    "masking",
    "paired",
    "proportion",
    "run_program",
    "score",
    "under_caches",
]

_MODULES = {
    "evaluation.conditions": ("UNMASKED", "Condition", "masking", "under_caches"),
    "evaluation.distributed": ("OnRay",),
    "evaluation.ledger": ("LedgerRun",),
    "evaluation.protocols": ("HARNESS_PROTOCOLS", "PROTOCOLS", "EvalProtocol"),
    "evaluation.runner": ("evaluate",),
    "evaluation.sandbox": ("run_program",),
    "evaluation.scoring": ("score",),
    "evaluation.tables": ("frame",),
    "utils.estimates": ("paired", "proportion"),
}


__getattr__ = lazily(__name__, {name: f"sinklens.{module}" for module, names in _MODULES.items() for name in names})
