"""The families of checkpoints: how each kind is recognized, translated and sampled.

Code that ships with a checkpoint never runs.
"""

from sinklens.families.base import Family
from sinklens.families.registry import FAMILIES, SAMPLERS, family_named, identify, register
from sinklens.families.samplers import settings_for
from sinklens.families.translation import translate

__all__ = ["FAMILIES", "SAMPLERS", "Family", "family_named", "identify", "register", "settings_for", "translate"]
