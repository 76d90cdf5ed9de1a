"""Options that several commands share, made from the declarations of what they set.

`LoadRequest` declares the arguments of loading a model, `RunRequest` those of a run, and each sampler its settings. An
option has the argument's name, type, default and meaning, so a new argument needs no change here. Only the arguments
that a text can give are options (`OF_LOADING`, `OF_RUN`).

``--block-length`` is both: of a block-causal checkpoint, whose attention depends on it, the length with which it is
loaded; of another one a setting of the sampler.

Pitfall: the declarations import torch. A command gets its options only when it is the one that was called.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sinklens.errors import SinklensError
from sinklens.utils.arguments import REQUIRED, Argument, arguments

if TYPE_CHECKING:
    from sinklens.checkpoints import Family

OF_LOADING = ("dtype", "device", "device_map", "revision", "family", "block_length")
OF_RUN = ("seed", "chat_template", "cache")
FLAGS = {"chat_template": "--chat"}  # others are called as the argument
WORDS = {  # where the command line needs other words than Python
    "chat_template": "apply the tokenizer's chat template (default: no)",
    "cache": "reuse keys and values under this policy, such as prefix, dual or keep-sinks:4; an unknown name lists all "
    "(default: every step is exact)",
}


def flag(name: str) -> str:
    """The option of an argument."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def add_run(command: Any, *names: str) -> None:
    """Add options for arguments of a run; all by default."""
    from sinklens.runs.request import RunRequest

    add_declared(command, RunRequest, *(names or OF_RUN))


def run_given(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_run` read, as keyword arguments of `sinklens.generate`."""
    return {name: getattr(options, name) for name in OF_RUN if hasattr(options, name)}


def add_loading(command: Any, *names: str) -> None:
    """Add options for arguments of `sinklens.load`; all by default. Call `add_settings` before it."""
    from sinklens.checkpoints.loading import LoadRequest

    for name in names or OF_LOADING:
        with suppress(argparse.ArgumentError):  # --block-length may be there already, as a setting
            _add(command, arguments(LoadRequest)[name])


def loading(options: argparse.Namespace, model: str | None = None) -> dict[str, Any]:
    """What `add_loading` read, as keyword arguments of `sinklens.load`; for `model`, only those that apply to it."""
    from sinklens.checkpoints.loading import fitting

    given = {name: getattr(options, name) for name in OF_LOADING if hasattr(options, name)}
    if hasattr(options, "set_block_length"):
        given["block_length"] = options.set_block_length
    given = {name: value for name, value in given.items() if value is not None}
    return given if model is None else fitting(model, given)


def add_declared(command: Any, declared: Any, *names: str) -> None:
    """Add options for the arguments `names` that `declared` declares."""
    for name in names:
        _add(command, arguments(declared)[name])


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add an option for every setting of a sampler."""
    from sinklens.checkpoints.families import FAMILIES
    from sinklens.sampling.registry import SAMPLERS, register_installed, setting_help

    register_installed()
    group = command.add_argument_group(
        "sampler settings (which apply depends on the model; defaults of the checkpoint replace those listed here)"
    )
    group.add_argument(
        "--sampler",
        dest="set_sampler",
        choices=list(SAMPLERS),
        metavar="NAME",
        help=f"another sampler than the model's: {', '.join(SAMPLERS)} (default: the model's)",
    )
    modes = sorted({mode for family in FAMILIES for mode in family.modes})
    group.add_argument(
        "--mode",
        dest="set_mode",
        choices=modes,
        metavar="NAME",
        help=f"how a model that changes its attention decodes: {', '.join(modes)} (default: the model's)",
    )
    for name, owned in _settings().items():
        text = f"{setting_help(name)}{_defaults(name, owned)}".replace("%", "%%")
        text += "; of a block-causal checkpoint the length of its blocks" * (name == "block_length")
        group.add_argument(flag(name), dest=f"set_{name}", default=None, help=text, **_form(owned))


def settings_given(options: argparse.Namespace) -> dict[str, Any]:
    """The sampler settings given on the command line, and the sampler or mode."""
    return {name[4:]: value for name, value in vars(options).items() if name.startswith("set_") and value is not None}


def add_out(command: Any, help: str) -> None:
    """Add ``--out`` with the default of every command, ``sinklens-COMMAND``."""
    from pathlib import Path

    default = Path(command.prog.replace(" ", "-"))
    command.add_argument("--out", type=Path, default=default, help=f"{help} (default: %(default)s)")


def add_limit(command: Any, help: str) -> None:
    """Add ``--limit``."""
    command.add_argument("--limit", type=int, metavar="N", help=help)


def add_former(command: Any, former: str, now: str, dest: str) -> None:
    """Accept the former name of an option for a number, which is not listed, with a note; `dest` is where it goes."""
    command.add_argument(
        former, dest=dest, type=int, action=_Former, now=now, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


class _Former(argparse.Action):
    """Stores the value of an option that has another name now."""

    def __init__(self, *, now: str, **options: Any) -> None:
        super().__init__(**options)
        self._now = now

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"sinklens: {option_string} is now {self._now}.", file=sys.stderr)
        setattr(namespace, self.dest, values)


def family_for(model: str, options: argparse.Namespace) -> "Family":
    """The family with which `model` is loaded."""
    from sinklens.checkpoints.files import find_checkpoint, read_config
    from sinklens.checkpoints.regimes import choose_family

    given = loading(options)
    raw = read_config(find_checkpoint(model, given.get("revision")))
    return choose_family(raw, model, given.get("family"), given.get("block_length"))


def refuse_caches(names: Sequence[str], options: argparse.Namespace) -> None:
    """Reject unknown policies, and models that cannot run under one, before anything is loaded."""
    from sinklens.caching import as_policy

    if not [name for name in names if as_policy(name) is not None]:
        return
    for model in options.models:
        attention = family_for(model, options).attention
        if attention != "bidirectional":
            raise SinklensError(
                f"--cache is for bidirectional models; the attention of {model} is {attention}. Remove one of them."
            )


def _add(command: Any, argument: Argument) -> None:
    """Add the option of an argument, whose value is checked by its type when the command line is read."""
    text = WORDS.get(argument.name) or _first_sentence(argument.meaning)
    if "default" not in text:
        text += f" (default: {argument.default})"
    form: dict[str, Any] = {"action": "store_true"}
    if argument.type is not bool:
        form = {"type": _reader(argument), "default": argument.default, "metavar": _metavar(argument.type)}
    command.add_argument(flag(argument.name), dest=argument.name, help=text.replace("%", "%%"), **form)


def _reader(argument: Argument) -> Callable[[str], Any]:
    """Reads an option's text as a value of its argument."""

    def read(text: str) -> Any:
        try:
            whole = argument.type is int and re.fullmatch(r"[0-9]+", text)
            return argument.read(int(text) if whole else text)
        except ValueError as error:  # also more digits than Python reads
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _first_sentence(meaning: str) -> str:
    return re.split(r"(?<!e\.g)\. ", f"{meaning} ")[0].replace("`", "")


def _metavar(kind: Any) -> str:
    return {int: "N", str: "NAME"}.get(kind, "VALUE")


def _settings() -> Mapping[str, list[Argument]]:
    """The settings that a text can give, with the declaration of each sampler that has it."""
    from sinklens.sampling.registry import SAMPLERS

    found: dict[str, list[Argument]] = {}
    for sampler in SAMPLERS.values():
        declared = sampler.settings()
        for name in sampler.setting_names():
            if declared[name].type in (int, float, bool, str) or declared[name].choices:
                found.setdefault(name, []).append(declared[name])
    return found


def _defaults(name: str, owned: Sequence[Argument]) -> str:
    """The samplers' defaults in brackets; empty where the meaning explains the default."""
    from sinklens.sampling.registry import setting_help

    if "default" in setting_help(name):
        return ""
    words = {None: "off", True: "yes", False: "no"}
    values = [one.default for one in owned if one.default is not REQUIRED]
    texts = [words[value] if value is None or isinstance(value, bool) else str(value) for value in values]
    return f" (default: {', '.join(dict.fromkeys(texts))})"


def _form(owned: Sequence[Argument]) -> dict[str, Any]:
    """How argparse reads a setting; whether a value fits depends on the sampler and is checked there."""
    kind = owned[0].type
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if owned[0].choices:
        return {"choices": list(dict.fromkeys(choice for one in owned for choice in one.choices))}
    return {"type": kind, "metavar": kind.__name__.upper()}
