"""Runs: context, interventions, execution, recording and results."""

from sinklens.runs.intervention import Intervention, RunContext
from sinklens.runs.result import Answer, Generation

__all__ = ["Answer", "Generation", "Intervention", "RunContext"]
