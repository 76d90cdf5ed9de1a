"""Evaluation: tasks under interventions, a record of every sample, and tables of the results.

    evaluate("tiny-llada", "tiny-gsm", masking([0, 1, 5, 10], controls=["random"]), "results")
    frame(read_lines("results"))

`OnRay` needs the extra ``ray`` at run time. The model for lm-evaluation-harness lives in harness.py and is not
re-exported here, because importing it needs the extra ``lm-eval``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.evaluation.claim_lines import Claim, claims, format_claims
    from sinklens.evaluation.conditions import UNMASKED, Condition, masking, under_caches
    from sinklens.evaluation.departures import Baseline, baselines
    from sinklens.evaluation.distributed import OnRay
    from sinklens.evaluation.ledger import LedgerRun, Writer
    from sinklens.evaluation.lines import Line, frame
    from sinklens.evaluation.planning import Plan, plan
    from sinklens.evaluation.protocols import PROTOCOLS, EvalProtocol
    from sinklens.evaluation.published import HARNESS_PROTOCOLS, HarnessProtocol, Published
    from sinklens.evaluation.runner import Estimate, estimate, evaluate
    from sinklens.evaluation.sandbox import Limits, available_isolation, run_program
    from sinklens.evaluation.scoring import score
    from sinklens.evaluation.statistics import Accuracy, Paired, holm, mcnemar, paired, score_interval, score_p
    from sinklens.evaluation.tables import read_lines
    from sinklens.evaluation.watermarks import DetectionErrors, GreenScores, detection_errors, green_scores

__all__ = [
    "HARNESS_PROTOCOLS",
    "PROTOCOLS",
    "UNMASKED",
    "Accuracy",
    "Baseline",
    "Claim",
    "Condition",
    "DetectionErrors",
    "Estimate",
    "EvalProtocol",
    "GreenScores",
    "HarnessProtocol",
    "LedgerRun",
    "Limits",
    "Line",
    "OnRay",
    "Paired",
    "Plan",
    "Published",
    "Writer",
    "available_isolation",
    "baselines",
    "claims",
    "detection_errors",
    "estimate",
    "evaluate",
    "format_claims",
    "frame",
    "green_scores",
    "holm",
    "masking",
    "mcnemar",
    "paired",
    "plan",
    "read_lines",
    "run_program",
    "score",
    "score_interval",
    "score_p",
    "under_caches",
]

_MODULES = {
    "claim_lines": ("Claim", "claims", "format_claims"),
    "conditions": ("UNMASKED", "Condition", "masking", "under_caches"),
    "departures": ("Baseline", "baselines"),
    "distributed": ("OnRay",),
    "runner": ("Estimate", "estimate", "evaluate"),
    "ledger": ("LedgerRun", "Writer"),
    "lines": ("Line", "frame"),
    "planning": ("Plan", "plan"),
    "protocols": ("PROTOCOLS", "EvalProtocol"),
    "published": ("HARNESS_PROTOCOLS", "HarnessProtocol", "Published"),
    "sandbox": ("Limits", "available_isolation", "run_program"),
    "scoring": ("score",),
    "statistics": ("Accuracy", "Paired", "holm", "mcnemar", "paired", "score_interval", "score_p"),
    "tables": ("read_lines",),
    "watermarks": ("DetectionErrors", "GreenScores", "detection_errors", "green_scores"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"sinklens.evaluation.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
