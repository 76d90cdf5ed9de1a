"""The samplers by name, and the settings of a run.

A family names its sampler (`Family.sampler`), and ``sampler=`` of a run chooses another one that fits the attention the
family was trained with. `register` adds a sampler in this process; an installed package adds its own through an entry
point in the group ``sinklens.samplers``, which names a function without arguments that calls `register`.

Importing this module imports no sampler: `Sampler.steps` may be a reference ``"module:function"``, which is imported
when a run begins.

Pitfall: matching attention is necessary, not sufficient. A checkpoint trained with one schedule may answer badly under
another.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from sinklens.errors import SettingError, nearest
from sinklens.sampling.diffusion_gemma_settings import DiffusionGemmaSettings
from sinklens.sampling.settings import (
    AutoregressiveSettings,
    DreamSettings,
    LladaSettings,
    SamplerSettings,
    require_integer,
)
from sinklens.sampling.settings_blocks import Bd3lmCardSettings, Bd3lmSettings, FastDllmV2Settings, SdarSettings
from sinklens.sampling.settings_llada2 import Llada2Settings, Llada21Settings
from sinklens.sampling.settings_shifted import DreamBlockSettings, OpenDcoderSettings, Rnd1Settings

GROUP = "sinklens.samplers"
Steps = Callable[[Any, Any], Iterator[None]]


@dataclass(frozen=True)
class Sampler:
    """What makes a sampler: its name, its settings and the function that runs its steps.

    Attributes:
        name: its name, for `Family.sampler` and ``sampler=``.
        settings: frozen dataclass of its settings, with ``gen_length`` and ``steps``; no other sampler may use it.
        steps: a generator function of `sampling.state.State` and the settings, which yields once before each step; or a
            reference ``"module:function"``.
        attention: attention of the families that it fits: "bidirectional", "causal", "block-causal" or
            "encoder-decoder".
    """

    name: str
    settings: type[SamplerSettings]
    steps: Steps | str
    attention: tuple[str, ...] = ("bidirectional",)

    def begin(self, state: Any, settings: SamplerSettings) -> Iterator[None]:
        """Start the sampler on `state`."""
        if isinstance(self.steps, str):
            module, _, function = self.steps.partition(":")
            return getattr(import_module(module), function)(state, settings)
        return self.steps(state, settings)

    def setting_names(self) -> list[str]:
        """Names of its settings, without fields that a run fills in."""
        return [entry.name for entry in fields(self.settings) if entry.metadata.get("setting", True)]


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Sampler("llada", LladaSettings, "sinklens.sampling.llada:denoise"),
        Sampler("dream", DreamSettings, "sinklens.sampling.dream:denoise"),
        Sampler("dream-blocks", DreamBlockSettings, "sinklens.sampling.dream_blocks:denoise"),
        Sampler("autoregressive", AutoregressiveSettings, "sinklens.sampling.autoregressive:denoise", ("causal",)),
        Sampler("rnd1", Rnd1Settings, "sinklens.sampling.rnd1:denoise"),
        Sampler("open-dcoder", OpenDcoderSettings, "sinklens.sampling.open_dcoder:denoise"),
        Sampler("sdar", SdarSettings, "sinklens.sampling.sdar:denoise", ("block-causal",)),
        Sampler("llada2", Llada2Settings, "sinklens.sampling.llada2:denoise", ("block-causal",)),
        Sampler("llada2.1", Llada21Settings, "sinklens.sampling.llada21:denoise", ("block-causal",)),
        Sampler("bd3lm", Bd3lmSettings, "sinklens.sampling.bd3lm:denoise", ("block-causal",)),
        Sampler("bd3lm-card", Bd3lmCardSettings, "sinklens.sampling.bd3lm_card:denoise", ("block-causal",)),
        Sampler("fast-dllm-v2", FastDllmV2Settings, "sinklens.sampling.fast_dllm_v2:denoise", ("block-causal",)),
        Sampler(
            "diffusion-gemma",
            DiffusionGemmaSettings,
            "sinklens.sampling.diffusion_gemma:denoise",
            ("encoder-decoder",),
        ),
    )
}


def register(sampler: Sampler) -> None:
    """Add a sampler in this process; registering the same record again has no effect.

    Raises:
        SettingError: another sampler has the name or the settings class, or the class is not one of settings.
    """
    known = SAMPLERS.get(sampler.name)
    if known is not None and known != sampler:
        raise SettingError(f"a sampler called {sampler.name!r} already exists; choose another name.")
    if not issubclass(sampler.settings, SamplerSettings) or "gen_length" not in sampler.setting_names():
        raise SettingError(
            f"{sampler.settings.__name__} must be a dataclass derived from SamplerSettings with a field gen_length."
        )
    owner = next((one for one in SAMPLERS.values() if one.settings is sampler.settings and one != sampler), None)
    if owner is not None:
        raise SettingError(
            f"{sampler.settings.__name__} belongs to the sampler {owner.name!r}; define another settings class."
        )
    SAMPLERS[sampler.name] = sampler


def register_installed() -> None:
    """Register the samplers of installed packages, from the entry-point group ``sinklens.samplers``.

    Raises:
        SettingError: an entry point could not be imported, or its sampler conflicts with another.
    """
    for entry in entry_points(group=GROUP):
        try:
            registers = entry.load()
        except (ImportError, AttributeError) as error:
            raise SettingError(
                f"the entry point {entry.name} = {entry.value} of the group {GROUP} could not be imported ({error}); "
                f"fix or uninstall the package that defines it."
            ) from error
        registers()


def find_sampler(name: str) -> Sampler:
    """The sampler called `name`.

    Raises:
        SettingError: no sampler has this name.
    """
    if not isinstance(name, str):
        raise SettingError(f"sampler must be a name, one of {', '.join(SAMPLERS)}; got {name!r}.")
    if name not in SAMPLERS:
        register_installed()
    if name not in SAMPLERS:
        raise SettingError(f"no sampler is called {name!r}; known: {', '.join(SAMPLERS)}.{nearest(name, SAMPLERS)}")
    return SAMPLERS[name]


def sampler_of(settings: SamplerSettings) -> Sampler:
    """The sampler that `settings` belong to.

    Raises:
        SettingError: no sampler has settings of this class.
    """
    found = next((sampler for sampler in SAMPLERS.values() if sampler.settings is type(settings)), None)
    if found is None:
        raise SettingError(f"no sampler has settings of the class {type(settings).__name__}; see sampling.register.")
    return found


def never_passed(point: str, sampler: str) -> str:
    """The message for a point that a sampler does not pass."""
    return (
        f"the {sampler} sampler does not pass {point}, so there is no value to read or change. Use another point "
        f"or, in a sampler of your own, pass the value through it: at(state.tree.{point}, value)."
    )


def setting_help(name: str) -> str:
    """Help text for a setting: the samplers that have it, and the description in the first one's docstring."""
    owners = [sampler for sampler in SAMPLERS.values() if name in sampler.setting_names()]
    entries = re.split(r"\n {8}(?! )", owners[0].settings.__doc__ or "")
    texts = [entry.partition(":") for entry in entries if name in entry.partition(":")[0].split(", ")]
    listed = ", ".join(sampler.name for sampler in owners)
    return f"[{listed}] {' '.join(texts[0][2].split())}" if texts else f"[{listed}]"


def make_settings(sampler: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplerSettings:
    """Validate the given settings and fill in the defaults of the checkpoint, then of the sampler.

    Args:
        sampler: name of the sampler.
        given: the user's settings; None means the default. 0 does not mean None: ``gen_length=0`` is an error.
        defaults: the checkpoint's settings. Passing ``gen_length`` resets ``steps`` and ``block_length`` to the
            sampler's defaults, since the checkpoint's values only fit its own ``gen_length``.

    Raises:
        SettingError: a setting is unknown, belongs to another sampler, or is out of range.
    """
    found = find_sampler(sampler)
    known = found.setting_names()
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name not in known:
            raise SettingError(_unknown(name, found))
    for name in ("gen_length", "steps", "block_length"):
        if name in chosen:
            require_integer(name, chosen[name])
    kept = dict(defaults)
    if "gen_length" in chosen:  # the checkpoint's steps and block_length fit its own gen_length
        kept = {name: value for name, value in kept.items() if name not in ("steps", "block_length")}
    try:
        return found.settings(**{**kept, **chosen})
    except TypeError as error:
        raise SettingError(f"a setting has the wrong type: {error}. Given: {dict(chosen)}.") from error


ELSEWHERE = {"fwd_hooks": "hooks=", "max_new_tokens": "gen_length="}
"""What TransformerLens and transformers call an argument of a run."""


def _unknown(name: str, sampler: Sampler) -> str:
    known = sampler.setting_names()
    owners = [other.name for other in SAMPLERS.values() if name in other.setting_names()]
    if name in ELSEWHERE:
        return f"{name} is not a setting of the {sampler.name} sampler: pass {ELSEWHERE[name]}."
    hint = (
        f"it belongs to the {', '.join(owners[:-1])}{' and ' * (len(owners) > 1)}{owners[-1]} "
        f"sampler{'s' * (len(owners) > 1)}."
        if owners
        else f"no sampler has it.{nearest(name, known)}"
    )
    return f"{name} is not a setting of the {sampler.name} sampler: {hint} Its settings: {', '.join(known)}."


@runtime_checkable
class Sampled(Protocol):
    """A model whose family names a sampler, and whose checkpoint may bring settings of its own."""

    @property
    def family_record(self) -> Any:
        """Everything known of the family."""

    @property
    def checkpoint(self) -> Any:
        """What was loaded."""


def settings_for(model: Sampled, given: Mapping[str, Any]) -> SamplerSettings:
    """The settings of a run of `model`: those `given`, then the checkpoint's, then the sampler's defaults.

    ``given["sampler"]`` chooses another sampler than the family's; the checkpoint's settings are then not used, except
    for those that both samplers have.

    Raises:
        SettingError: the sampler does not fit the family's attention; or see `make_settings`.
    """
    family = model.family_record
    name = given.get("sampler") or family.sampler
    sampler = find_sampler(name)
    if family.attention not in sampler.attention:
        fitting = [one.name for one in SAMPLERS.values() if family.attention in one.attention]
        raise SettingError(
            f"the {name} sampler fits {' or '.join(sampler.attention)} attention, but {family.name} models were "
            f"trained with {family.attention} attention; choose one of {', '.join(fitting)}."
        )
    defaults = model.checkpoint.defaults
    if name != family.sampler:
        defaults = {key: value for key, value in defaults.items() if key in sampler.setting_names()}
    chosen = {key: value for key, value in given.items() if key != "sampler"}
    if family.block_causal and "block_length" in sampler.setting_names():
        chosen["block_length"] = _block_length(chosen.get("block_length"), model.checkpoint.blocks.length, family.name)
    return make_settings(name, chosen, defaults)


def _block_length(given: int | None, length: int, family: str) -> int:
    """The block length of a block-causal model, whose attention depends on it.

    Raises:
        SettingError: another one was given.
    """
    if given not in (None, length):
        raise SettingError(
            f"block_length is {given!r}, but this {family} model was loaded with blocks of {length}, which its "
            f"attention uses too. Load it again with sinklens.load(..., block_length=...)."
        )
    return length
