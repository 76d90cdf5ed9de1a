"""Sampler settings as flags of a command: one for each setting, named and explained as in `sinklens.sampling`."""

import argparse
from typing import Any, get_args, get_origin


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add a flag for every sampler setting."""
    from sinklens.sampling.settings import Settings, setting_help

    group = command.add_argument_group("sampler settings (which apply depends on the model)")
    for name, kind in Settings.__annotations__.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", help=setting_help(name), **_flag(kind))


def settings_given(options: argparse.Namespace) -> dict[str, Any]:
    """The sampler settings that were given."""
    return {name[4:]: value for name, value in vars(options).items() if name.startswith("set_") and value is not None}


def _flag(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if get_origin(kind) is not None:  # Literal
        return {"choices": get_args(kind), "default": None}
    return {"type": kind, "default": None, "metavar": kind.__name__.upper()}
