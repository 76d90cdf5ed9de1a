"""Interventions: named sets of hook functions that change a run.

Pass them in ``hooks=`` of `sinklens.trace` and `sinklens.generate`, alone or with others and with plain ``(name, fn)``
pairs. Restrict them with ``steps=``, ``layers=``, ``heads=`` and ``positions=``, or with ``where=`` to positions that
follow the run.
"""

from sinklens.interventions.ablation import Ablate, AblateHeads, AblateMLPs, SkipLayers
from sinklens.interventions.canvas import ForceTokens, Remask, Renoise, SinkToken, Suffix
from sinklens.interventions.circuits import KeepEdges
from sinklens.interventions.donors import Resample
from sinklens.interventions.logits import MaskedLogits
from sinklens.interventions.masking import HideKeys, KeepKeys, MaskKeys, MaskSinks
from sinklens.interventions.patching import PatchHooks
from sinklens.interventions.paths import PathPatch
from sinklens.interventions.patterns import FreezePattern, Hold, HoldSinks
from sinklens.interventions.places import AtPositions
from sinklens.interventions.pruning import PruneWeights
from sinklens.interventions.rules import AtNoise, OfKind, Rule, Where
from sinklens.interventions.streams import Steer
from sinklens.interventions.values import AblateValues
from sinklens.interventions.weights import EditWeights
from sinklens.runs.caches import Activations
from sinklens.runs.intervention import Intervention, Reader

__all__ = [
    "Ablate",
    "AblateHeads",
    "AblateMLPs",
    "AblateValues",
    "Activations",
    "AtNoise",
    "AtPositions",
    "EditWeights",
    "ForceTokens",
    "FreezePattern",
    "HideKeys",
    "Hold",
    "HoldSinks",
    "Intervention",
    "KeepEdges",
    "KeepKeys",
    "MaskKeys",
    "MaskSinks",
    "MaskedLogits",
    "OfKind",
    "PatchHooks",
    "PathPatch",
    "PruneWeights",
    "Reader",
    "Remask",
    "Renoise",
    "Resample",
    "Rule",
    "SinkToken",
    "SkipLayers",
    "Steer",
    "Suffix",
    "Where",
]
