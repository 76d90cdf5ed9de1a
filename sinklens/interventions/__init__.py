"""Interventions: named sets of hook functions that change a run.

Pass them in ``hooks=`` of `sinklens.trace` and `sinklens.generate`, alone or with others and with plain ``(name, fn)``
pairs. Restrict them with ``steps=``, ``layers=``, ``heads=`` and ``positions=``.
"""

from sinklens.interventions.canvas import ForceTokens, Remask, SinkToken, Suffix
from sinklens.interventions.heads import AblateHeads, AblateSinkAttention, HeadOutputs
from sinklens.interventions.keys import HideKeys, HoldSinks
from sinklens.interventions.logits import MaskedLogits
from sinklens.interventions.masking import KeepKeys, MaskSinks, OnSinks, WindowAttention
from sinklens.interventions.noise import FixedNoise
from sinklens.interventions.patching import Activations, FreezePattern, PatchHooks
from sinklens.interventions.values import AblateSinkValues
from sinklens.runs.caches import StepCaches
from sinklens.runs.intervention import Intervention, RunContext

__all__ = [
    "AblateHeads",
    "AblateSinkAttention",
    "AblateSinkValues",
    "Activations",
    "FixedNoise",
    "ForceTokens",
    "FreezePattern",
    "HeadOutputs",
    "HideKeys",
    "HoldSinks",
    "Intervention",
    "KeepKeys",
    "MaskSinks",
    "MaskedLogits",
    "OnSinks",
    "PatchHooks",
    "Remask",
    "RunContext",
    "SinkToken",
    "StepCaches",
    "Suffix",
    "WindowAttention",
]
