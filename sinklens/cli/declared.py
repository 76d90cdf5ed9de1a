"""The options that follow from declarations, kept as plain values so that a parser is built without importing torch.

`derive` reads the declarations: of the arguments of loading a model, of a run and of a likelihood, and of the settings
of every sampler. ``declared.json`` holds what it returns; ``python -m sinklens.cli.declared`` writes the file, and a
test compares the two. A declaration is imported when an option of it has a value to read.

Pitfall: where an installed package registers samplers, its settings are not in the file; there the options are derived
for every command, which takes seconds.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sinklens.utils.arguments import REQUIRED, Argument, arguments

FILE = Path(__file__).with_suffix(".json")
GROUP = "sinklens.families"  # entry points of packages that register samplers
LOADING = "sinklens.model.model:load"
RUN = "sinklens.runs:generate"
DRAWS = "sinklens.experiments.nll.draws:DrawRule"
LIKELIHOOD = "sinklens.experiments.nll.estimate:LikelihoodRequest"
NAMES = {  # what declares arguments -> those that a text can give
    LOADING: ("dtype", "device", "device_map", "revision", "family", "block_length", "mask_token_id", "quantization"),
    RUN: ("seed", "chat_template", "cache"),
    DRAWS: ("mc_num", "batch", "masking"),
    LIKELIHOOD: ("cfg_scale", "rows"),
}
FLAGS = {"chat_template": "--chat"}  # others are called as the argument
WORDS = {  # where the command line needs other words than Python
    "chat_template": "apply the tokenizer's chat template (default: no)",
    "cache": "reuse keys and values under this policy, such as prefix, dual or keep-sinks:4; an unknown name lists all "
    "(default: every step is exact)",
}


def option(declared: str, name: str) -> tuple[str, dict[str, Any]]:
    """The option of an argument, and how argparse adds it; its value is checked when the command line is read."""
    form = dict(_all()[declared][name])
    if "action" not in form:
        form["type"] = _reader(declared, name)
    return FLAGS.get(name, _flag(name)), form


def samplers() -> list[str]:
    """Names of the samplers."""
    return list(_all()["samplers"])


def modes() -> list[str]:
    """What ``mode=`` of a run may be, for models that change their attention."""
    return list(_all()["modes"])


def setting_options() -> list[tuple[str, dict[str, Any]]]:
    """The option of every setting of a sampler, and how argparse adds it."""
    found = []
    for name, stored in _all()["settings"].items():
        kind, form = stored["kind"], {key: value for key, value in stored.items() if key != "kind"}
        if kind == "bool":
            form["action"] = argparse.BooleanOptionalAction
        elif "choices" not in form:
            form["type"] = {"int": int, "float": float, "str": str}[kind]
        found.append((_flag(name), form))
    return found


def derive() -> dict[str, Any]:
    """All options, as the declarations have them."""
    from sinklens.families.registry import FAMILIES, SAMPLERS, register_installed

    register_installed()
    modes = sorted({mode for family in FAMILIES.values() for mode in family.modes})
    found: dict[str, Any] = {
        declared: {name: _form(_arguments(declared)[name]) for name in names} for declared, names in NAMES.items()
    }
    return found | {"samplers": list(SAMPLERS), "modes": modes, "settings": _settings()}


@cache
def _all() -> dict[str, Any]:
    found: dict[str, Any] = derive() if entry_points(group=GROUP) else json.loads(FILE.read_text())
    return found


def _arguments(declared: str) -> dict[str, Argument]:
    module, _, name = declared.partition(":")
    return arguments(getattr(import_module(module), name))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _form(argument: Argument) -> dict[str, Any]:
    """How argparse adds the option of an argument, without its type."""
    text = WORDS.get(argument.name) or _first_sentence(argument.meaning)
    if "default" not in text:
        text += f" (default: {argument.default})"
    form: dict[str, Any] = {"action": "store_true"}
    if argument.type is not bool:
        metavar = {int: "N", str: "NAME"}.get(argument.type, "VALUE")
        form = {"default": argument.default, "metavar": metavar}
    return form | {"dest": argument.name, "help": text.replace("%", "%%")}


def _reader(declared: str, name: str) -> Callable[[str], Any]:
    """Reads an option's text as a value of its argument."""

    def read(text: str) -> Any:
        argument = _arguments(declared)[name]
        try:
            whole = argument.type is int and re.fullmatch(r"[0-9]+", text)
            return argument.read(int(text) if whole else text)
        except ValueError as error:  # also more digits than Python reads
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _first_sentence(meaning: str) -> str:
    return re.split(r"(?<!e\.g)\. ", f"{meaning} ")[0].replace("`", "")


def _settings() -> dict[str, dict[str, Any]]:
    """How argparse adds the settings that a text can give; whether a value fits is checked by the sampler."""
    from sinklens.families import SAMPLERS
    from sinklens.families.samplers import setting_help

    owned: dict[str, list[Argument]] = {}
    for sampler in SAMPLERS.values():
        for name, one in sampler.settings().items():
            if one.type in (int, float, bool, str) or one.choices:
                owned.setdefault(name, []).append(one)
    found = {}
    for name, several in owned.items():
        text = setting_help(name) if "default" in setting_help(name) else f"{setting_help(name)}{_defaults(several)}"
        text += "; of a block-causal checkpoint the length of its blocks" * (name == "block_length")
        form: dict[str, Any] = {"dest": f"set_{name}", "default": None, "help": text.replace("%", "%%")}
        kind = several[0].type
        if several[0].choices:
            form |= {"kind": "str", "choices": list(dict.fromkeys(choice for one in several for choice in one.choices))}
        else:
            form |= {"kind": kind.__name__} | ({} if kind is bool else {"metavar": kind.__name__.upper()})
        found[name] = form
    return found


def _defaults(owned: Sequence[Argument]) -> str:
    """The samplers' defaults in brackets."""
    words = {None: "off", True: "yes", False: "no"}
    values = [one.default for one in owned if one.default is not REQUIRED]
    texts = [words[value] if value is None or isinstance(value, bool) else str(value) for value in values]
    return f" (default: {', '.join(dict.fromkeys(texts))})"


if __name__ == "__main__":
    FILE.write_text(json.dumps(derive(), indent=1, ensure_ascii=False) + "\n")
