"""One run: what it knows of itself, what may change it, how it is carried out and recorded, and what is left of it."""

from sinklens.runs.intervention import Intervention, RunContext
from sinklens.runs.result import Answer, Generation

__all__ = ["Answer", "Generation", "Intervention", "RunContext"]
