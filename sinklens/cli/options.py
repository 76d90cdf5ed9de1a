"""Options that several commands share, made from the declarations of what they set (declared.py).

`LoadRequest` declares the arguments of loading a model, `RunRequest` those of a run, and each sampler its settings. An
option has the argument's name, type, default and meaning. Only the arguments that a text can give are options.

``--block-length`` is both: of a block-causal checkpoint, whose attention depends on it, the length with which it is
loaded; of another one a setting of the sampler.

Pitfall: a command gets its options only when it is the one that was called.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sinklens.cli import declared
from sinklens.errors import SinklensError

if TYPE_CHECKING:
    from sinklens.families import Family

OF_LOADING, OF_RUN = declared.NAMES[declared.LOADING], declared.NAMES[declared.RUN]


def add_run(command: Any, *names: str) -> None:
    """Add options for arguments of a run; all by default."""
    add_declared(command, declared.RUN, *names)


def run_given(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_run` read, as keyword arguments of `sinklens.generate`."""
    return {name: getattr(options, name) for name in OF_RUN if hasattr(options, name)}


def add_loading(command: Any, *names: str) -> None:
    """Add options for arguments of `sinklens.load`; all by default. Call `add_settings` before it."""
    for name in names or OF_LOADING:
        with suppress(argparse.ArgumentError):  # --block-length may be there already, as a setting
            add_declared(command, declared.LOADING, name)


def loading(options: argparse.Namespace, model: str | None = None) -> dict[str, Any]:
    """What `add_loading` read, as keyword arguments of `sinklens.load`; for `model`, only those that apply to it."""
    from sinklens.model.loading import fitting

    given = {name: getattr(options, name) for name in OF_LOADING if hasattr(options, name)}
    if hasattr(options, "set_block_length"):
        given["block_length"] = options.set_block_length
    given = {name: value for name, value in given.items() if value is not None}
    return given if model is None else fitting(model, given)


def add_declared(command: Any, declaration: str, *names: str) -> None:
    """Add options for the arguments `names` of a declaration, one of declared.py; all by default."""
    for name in names or declared.NAMES[declaration]:
        flag, form = declared.option(declaration, name)
        command.add_argument(flag, **form)


def add_settings(command: argparse.ArgumentParser) -> None:
    """Add an option for every setting of a sampler."""
    group = command.add_argument_group(
        "sampler settings (which apply depends on the model; defaults of the checkpoint replace those listed here)"
    )
    names = declared.samplers()
    group.add_argument(
        "--sampler",
        dest="set_sampler",
        choices=names,
        metavar="NAME",
        help=f"another sampler than the model's: {', '.join(names)} (default: the model's)",
    )
    group.add_argument(
        "--mode",
        dest="set_mode",
        choices=declared.modes(),
        metavar="NAME",
        help=f"how a model that changes its attention decodes: {', '.join(declared.modes())} (default: the model's)",
    )
    for flag, form in declared.setting_options():
        group.add_argument(flag, **form)


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
    from sinklens.families.registry import family_of
    from sinklens.model.files import find_checkpoint, read_config

    given = loading(options)
    raw = read_config(find_checkpoint(model, given.get("revision")))
    return family_of(raw, model, given.get("family"), given.get("block_length"))


def refuse_caches(names: Sequence[str], options: argparse.Namespace) -> None:
    """Reject unknown policies, and models that cannot run under one, before anything is loaded."""
    from sinklens.sampling import as_policy

    if not [name for name in names if as_policy(name) is not None]:
        return
    for model in options.models:
        attention = family_for(model, options).attention
        if attention != "bidirectional":
            raise SinklensError(
                f"--cache is for bidirectional models; the attention of {model} is {attention}. Remove one of them."
            )
