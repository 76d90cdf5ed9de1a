"""Interventions: changes of a run, as lists of hook functions with a name; and comparing runs with and without.

Each is used in ``hooks=`` of `sinklens.trace` and `sinklens.generate`, alone or with others and with plain
``(name, fn)`` pairs, and restricted by ``steps=``, ``layers=``, ``heads=`` and ``positions=``.
"""

from typing import TYPE_CHECKING, Any

from sinklens.interventions.attribution import agreement, attribution_patching, of_step, patching_effects
from sinklens.interventions.base import Intervention, Surroundings
from sinklens.interventions.canvas import ForceTokens, Remask, SinkToken
from sinklens.interventions.comparing import Effect, MaskedLogits, attention_to, compare, effect
from sinklens.interventions.heads import AblateHeads, AblateSinkAttention, HeadOutputs
from sinklens.interventions.lens import LogitLens, logit_lens
from sinklens.interventions.masking import KeepKeys, MaskSinks, WindowAttention
from sinklens.interventions.patching import Activations, FreezePattern, PatchHooks, StepCaches

if TYPE_CHECKING:
    from sinklens.interventions.sweeping import sweep

__all__ = [
    "AblateHeads",
    "AblateSinkAttention",
    "Activations",
    "Effect",
    "ForceTokens",
    "FreezePattern",
    "HeadOutputs",
    "Intervention",
    "KeepKeys",
    "LogitLens",
    "MaskSinks",
    "MaskedLogits",
    "PatchHooks",
    "Remask",
    "SinkToken",
    "StepCaches",
    "Surroundings",
    "WindowAttention",
    "agreement",
    "attention_to",
    "attribution_patching",
    "compare",
    "effect",
    "logit_lens",
    "of_step",
    "patching_effects",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name == "sweep":  # it runs models, and what runs models knows interventions
        from sinklens.interventions.sweeping import sweep

        return sweep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
