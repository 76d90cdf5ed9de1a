"""The samplers: masked, block and canvas diffusion, and left to right. Each is a loop of one function per decision."""

from sinklens.sampling.autoregressive import AutoregressiveSettings
from sinklens.sampling.bd3lm import Bd3lmSettings
from sinklens.sampling.bd3lm_card import Bd3lmCardSettings
from sinklens.sampling.bd3lm_owt import Bd3lmOwtSettings
from sinklens.sampling.diffusion_gemma import DiffusionGemmaSettings
from sinklens.sampling.dream import DreamSettings
from sinklens.sampling.dream_blocks import DreamBlockSettings
from sinklens.sampling.duo import DuoSettings
from sinklens.sampling.fast_dllm_v2 import FastDllmV2Settings
from sinklens.sampling.gidd import GiddCorrectionSettings, GiddSettings
from sinklens.sampling.llada import LladaSettings
from sinklens.sampling.llada2 import Llada2Settings
from sinklens.sampling.llada21 import Llada21Settings
from sinklens.sampling.mdlm import MdlmSettings
from sinklens.sampling.mdlm_windows import MdlmWindowSettings
from sinklens.sampling.open_dcoder import OpenDcoderSettings
from sinklens.sampling.registry import SAMPLERS, make_settings, register, settings_for
from sinklens.sampling.remdm import RemdmSettings
from sinklens.sampling.rnd1 import Rnd1Settings
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.sdar import SdarSettings
from sinklens.sampling.sedd import SeddSettings
from sinklens.sampling.settings import RunSettings, Settings

__all__ = [
    "SAMPLERS",
    "AutoregressiveSettings",
    "Bd3lmCardSettings",
    "Bd3lmOwtSettings",
    "Bd3lmSettings",
    "DiffusionGemmaSettings",
    "DreamBlockSettings",
    "DreamSettings",
    "DuoSettings",
    "FastDllmV2Settings",
    "GiddCorrectionSettings",
    "GiddSettings",
    "Llada2Settings",
    "Llada21Settings",
    "LladaSettings",
    "MdlmSettings",
    "MdlmWindowSettings",
    "OpenDcoderSettings",
    "RemdmSettings",
    "Rnd1Settings",
    "RunSettings",
    "Sampler",
    "SdarSettings",
    "SeddSettings",
    "Settings",
    "make_settings",
    "register",
    "settings_for",
]
