"""Interventions: changes of a run, as lists of hook functions with a name.

Each is used in ``hooks=`` of `sinklens.trace` and `sinklens.generate`, alone or with others and with plain
``(name, fn)`` pairs, and restricted by ``steps=``, ``layers=``, ``heads=`` and ``positions=``.
"""

from sinklens.interventions.base import Intervention, Surroundings
from sinklens.interventions.canvas import ForceTokens, Remask, SinkToken
from sinklens.interventions.heads import AblateHeads, AblateSinkAttention, HeadOutputs
from sinklens.interventions.masking import KeepKeys, MaskSinks, WindowAttention
from sinklens.interventions.patching import Activations, FreezePattern, PatchHooks, StepCaches

__all__ = [
    "AblateHeads",
    "AblateSinkAttention",
    "Activations",
    "ForceTokens",
    "FreezePattern",
    "HeadOutputs",
    "Intervention",
    "KeepKeys",
    "MaskSinks",
    "PatchHooks",
    "Remask",
    "SinkToken",
    "StepCaches",
    "Surroundings",
    "WindowAttention",
]
