"""The samplers: masked, block and canvas diffusion, and left to right. Each is a loop of one function per decision."""

from sinklens.sampling.diffusion_gemma_settings import DiffusionGemmaSettings
from sinklens.sampling.registry import SAMPLERS, Sampler, make_settings, register, sampler_of, settings_for
from sinklens.sampling.settings import (
    AutoregressiveSettings,
    DreamSettings,
    LladaSettings,
    RunSettings,
    SamplerSettings,
    Settings,
)
from sinklens.sampling.settings_blocks import Bd3lmCardSettings, Bd3lmSettings, FastDllmV2Settings, SdarSettings
from sinklens.sampling.settings_llada2 import Llada2Settings, Llada21Settings
from sinklens.sampling.settings_shifted import DreamBlockSettings, OpenDcoderSettings, Rnd1Settings

__all__ = [
    "SAMPLERS",
    "AutoregressiveSettings",
    "Bd3lmCardSettings",
    "Bd3lmSettings",
    "DiffusionGemmaSettings",
    "DreamBlockSettings",
    "DreamSettings",
    "FastDllmV2Settings",
    "Llada2Settings",
    "Llada21Settings",
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
