"""The samplers: LLaDA's, Dream's, of block diffusion, left to right. Each is a loop over one function per decision."""

from sinklens.sampling.registry import SAMPLERS, Sampler, make_settings, register, sampler_of, settings_for
from sinklens.sampling.settings import (
    AutoregressiveSettings,
    DreamSettings,
    LladaSettings,
    RunSettings,
    SamplerSettings,
    Settings,
)
from sinklens.sampling.settings_blocks import Bd3lmSettings, FastDllmV2Settings, SdarSettings
from sinklens.sampling.settings_shifted import OpenDcoderSettings, Rnd1Settings

__all__ = [
    "SAMPLERS",
    "AutoregressiveSettings",
    "Bd3lmSettings",
    "DreamSettings",
    "FastDllmV2Settings",
    "LladaSettings",
    "OpenDcoderSettings",
    "Rnd1Settings",
    "RunSettings",
    "Sampler",
    "SamplerSettings",
    "SdarSettings",
    "Settings",
    "make_settings",
    "register",
    "sampler_of",
    "settings_for",
]
