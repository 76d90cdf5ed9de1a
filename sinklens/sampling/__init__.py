"""The samplers: LLaDA's, Dream's and left-to-right decoding. Each is a loop over one function per decision."""

from sinklens.sampling.settings import (
    BY_SAMPLER,
    AnySettings,
    AutoregressiveSettings,
    DreamSettings,
    LladaSettings,
    Settings,
    make_settings,
    settings_for,
)

__all__ = [
    "BY_SAMPLER",
    "AnySettings",
    "AutoregressiveSettings",
    "DreamSettings",
    "LladaSettings",
    "Settings",
    "make_settings",
    "settings_for",
]
