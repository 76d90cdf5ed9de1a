"""The settings of a run: which sampler decodes a model, and what its settings are.

A family names its sampler (`Family.sampler`), and ``sampler=`` of a run chooses another one that fits the attention the
family was trained with.

A `model` here is a `sinklens.Model`, which is on a higher floor.

Pitfall: matching attention is necessary, not sufficient. A checkpoint trained with one schedule may answer badly under
another.
"""

from collections.abc import Mapping
from typing import Any

from sinklens.errors import SettingError, nearest, require
from sinklens.families.registry import SAMPLERS, find_sampler
from sinklens.sampling.sampler import Sampler


def never_passed(point: str, sampler: str) -> str:
    """The message for a point that a sampler does not pass."""
    return (
        f"the {sampler} sampler does not pass {point}, so there is no value to read or change. Use another point "
        f"or, in a sampler of your own, pass the value through it: at(state.tree.{point}, value)."
    )


def setting_help(name: str) -> str:
    """Help text for a setting: the samplers that have it, and its meaning in the first one."""
    owners = [sampler for sampler in SAMPLERS.values() if name in sampler.settings()]
    return f"[{', '.join(owner.name for owner in owners)}] {owners[0].settings()[name].meaning}"


def make_settings(sampler: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Sampler:
    """Validate the given settings and fill in the defaults of the checkpoint, then of the sampler.

    Args:
        sampler: name of the sampler.
        given: the user's settings; None means the default. 0 does not mean None: ``gen_length=0`` is an error.
        defaults: the checkpoint's settings. Passing ``gen_length`` resets ``steps`` and ``block_length`` to the
            sampler's defaults, since the checkpoint's values only fit its own ``gen_length``.

    Raises:
        SettingError: a setting is unknown, belongs to another sampler, or is out of range.
    """
    return find_sampler(sampler)(**changed(defaults, read_settings(sampler, given)))


def changed(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with some settings replaced; their ``steps`` and ``block_length`` fit their own ``gen_length``."""
    unfit = ("steps", "block_length") if "gen_length" in given else ()
    return {name: value for name, value in defaults.items() if name not in unfit} | dict(given)


def read_settings(sampler: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among `given` that are not None, each checked alone.

    Raises:
        SettingError: a setting is unknown, belongs to another sampler, or is out of range.
    """
    found = find_sampler(sampler)
    known = found.settings()
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in chosen:
        if name not in known:
            raise SettingError(_unknown(name, found))
    return {name: known[name].read(value) for name, value in chosen.items()}


ELSEWHERE = {
    "fwd_hooks": "hooks=", "max_new_tokens": "gen_length=", "do_sample": "temperature=",
    "names_filter": "hooks=, or names_filter= to model.run_with_cache(run.canvas[:, step])",
}  # fmt: skip
"""What TransformerLens and transformers call an argument of a run -> what takes its place here."""


def _unknown(name: str, sampler: type[Sampler]) -> str:
    known = sampler.settings()
    owners = [other.name for other in SAMPLERS.values() if name in other.settings()]
    if name in ELSEWHERE:
        return f"{name} is not a setting of the {sampler.name} sampler: pass {ELSEWHERE[name]}."
    hint = (
        f"it belongs to the {', '.join(owners[:-1])}{' and ' * (len(owners) > 1)}{owners[-1]} "
        f"sampler{'s' * (len(owners) > 1)}."
        if owners
        else f"no sampler has it.{nearest(name, known)}"
    )
    return f"{name} is not a setting of the {sampler.name} sampler: {hint} Its settings: {', '.join(known)}."


def sampler_name(family: Any, given: Mapping[str, Any]) -> str:
    """The name of the sampler that ``given["sampler"]`` or ``given["mode"]`` chooses; the family's if neither does.

    Raises:
        SettingError: the family has no such mode, or both are given.
    """
    mode, sampler = given.get("mode"), given.get("sampler")
    if mode is None:
        return sampler or family.sampler
    require(
        sampler is None,
        f"mode={mode!r} and sampler={sampler!r} both choose how to decode; pass one of them.",
    )
    allowed = f"one of {', '.join(map(repr, family.modes))}.{nearest(str(mode), family.modes)}"
    alone = f"left out for {family.name} models, which decode in one way."
    require(mode in family.modes, f"mode={mode!r} must be {allowed if family.modes else alone}")
    return family.modes[mode]


def misfit(sampler: type[Sampler], model: Any) -> str:
    """Why `sampler` does not decode a model, as the end of a sentence; "" if it does."""
    family, config, timed = model.family_record, model.tree.hf.config, bool(model.tree.architecture.time)
    if family.attention not in sampler.attention:
        return (
            f"fits {' or '.join(sampler.attention)} attention, but {family.name} models were trained with "
            f"{family.attention} attention"
        )
    if not family.causal and sampler.masked is not family.masked:
        needs, has = ("a", "no") if sampler.masked else ("no", "a")
        return f"is for models with {needs} mask token, but {family.name} models have {has} mask token"
    if sampler.sets_time and not timed:
        return f"sets a noise level, and {model.name} does not read one"
    if not timed:
        return ""
    if model.tree.timed and not sampler.sets_time:
        return f"does not set the noise level that {model.name} reads"
    if sampler.sets_time and (sampler.level == "time") is (config.p_uniform is None):
        return f"sets {sampler.level}, and {model.name} reads {'sigma' if config.p_uniform is None else 'time'}"
    return ""


def fitting(model: Any) -> list[str]:
    """The names of the samplers that decode a model."""
    return [sampler.name for sampler in SAMPLERS.values() if not misfit(sampler, model)]


def settings_for(model: Any, given: Mapping[str, Any]) -> Sampler:
    """The settings of a run of `model`: those `given`, then the checkpoint's, then the sampler's defaults.

    ``given["sampler"]`` chooses another sampler than the family's, and so does ``given["mode"]`` for a model that
    changes its attention; the checkpoint's settings are then not used, except for those that both samplers have.

    Raises:
        SettingError: the sampler does not decode this model; or see `make_settings`.
    """
    family = model.family_record
    name = sampler_name(family, given)
    sampler = find_sampler(name)
    if why := misfit(sampler, model):
        raise SettingError(f"the {name} sampler {why}; choose one of {', '.join(fitting(model))}.")
    own, known = name == family.sampler, sampler.settings()
    defaults = {key: value for key, value in model.checkpoint.defaults.items() if own or key in known}
    chosen = {key: value for key, value in given.items() if key not in ("sampler", "mode")}
    if family.modes:  # its blocks begin where the prompt ends, so their length is not that of a gen_length
        chosen = {key: value for key, value in defaults.items() if key == "block_length"} | chosen
    if family.block_causal and "block_length" in known:
        given_length, length = chosen.get("block_length"), model.checkpoint.blocks.length
        require(
            given_length in (None, length),
            f"block_length is {given_length!r}, but this {family.name} model was loaded with blocks of {length}, "
            f"which its attention uses too. Load it again with sinklens.load(..., block_length=...).",
        )
        chosen["block_length"] = length
    return make_settings(name, chosen, defaults)
