"""Sampler settings as command-line flags, one per setting, with the names and meanings of `sinklens.sampling`."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin

from sinklens.errors import SinklensError
from sinklens.integers import as_seed


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    It rejects abbreviated options, since ``--prompt`` and ``--prompts`` are different options, and adds `late` options
    once the command is chosen.

    Attributes:
        late: functions that add options and load slow libraries.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.late: list[Callable[[argparse.ArgumentParser], None]] = []

    def parse_known_args(self, *given: Any, **more: Any) -> Any:
        """See `argparse`."""
        while self.late:
            self.late.pop()(self)
        return super().parse_known_args(*given, **more)


def add_settings(command: CommandParser) -> None:
    """Add a flag for every sampler setting when the command is chosen."""
    command.late.append(_add_settings)


def _add_settings(command: argparse.ArgumentParser) -> None:
    from sinklens.sampling.registry import SAMPLERS, register_installed, setting_help
    from sinklens.sampling.settings import Settings

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
    for name, kind in Settings.__annotations__.items():
        text = f"{setting_help(name)}{_default(name)}".replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", help=text, **_flag(kind))


def add_seed(command: Any, help: str) -> None:
    """Add ``--seed``."""
    command.add_argument("--seed", type=_seed, default=0, help=f"{help} (default: %(default)s)")


def add_chat(command: Any) -> None:
    """Add ``--chat``."""
    command.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template (default: no)")


def add_loading(command: Any) -> None:
    """Add the options of `sinklens.load` that `loading` returns."""
    command.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")
    command.add_argument("--device", help="e.g. cpu or cuda:1 (default: a GPU if available, else cpu)")


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_loading` read, as keyword arguments of `sinklens.load`."""
    return {"dtype": options.dtype, "device": options.device}


def add_cache(command: Any, help: str, **more: Any) -> None:
    """Add ``--cache``, for the name of a policy."""
    names = "such as prefix, dual or keep-sinks:4; an unknown name lists all"
    command.add_argument("--cache", metavar="POLICY", help=f"{help} ({names}; default: every step is exact)", **more)


def refuse_caches(names: Sequence[str], models: Sequence[str]) -> None:
    """Reject unknown policies, and models that cannot run under one, before anything is loaded."""
    from sinklens.caching import as_policy
    from sinklens.checkpoints import family_of
    from sinklens.checkpoints.files import find_checkpoint, read_config

    if not [name for name in names if as_policy(name) is not None]:
        return
    for model in models:
        attention = family_of(read_config(find_checkpoint(model, None)), model).attention
        if attention != "bidirectional":
            raise SinklensError(
                f"--cache is for bidirectional models; the attention of {model} is {attention}. Remove one of them."
            )


def settings_given(options: argparse.Namespace) -> dict[str, Any]:
    """The sampler settings given on the command line, and the sampler."""
    return {name[4:]: value for name, value in vars(options).items() if name.startswith("set_") and value is not None}


def _default(name: str) -> str:
    """The samplers' defaults in brackets; empty where the meaning explains the default."""
    from sinklens.sampling.registry import SAMPLERS, setting_help

    if "default" in setting_help(name):
        return ""
    values = [one[name].default for one in (sampler.settings() for sampler in SAMPLERS.values()) if name in one]
    words = {None: "off", True: "yes", False: "no"}
    texts = [words[value] if value is None or isinstance(value, bool) else str(value) for value in values]
    return f" (default: {', '.join(dict.fromkeys(texts))})"


def _flag(kind: Any) -> dict[str, Any]:
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if get_origin(kind) is not None:  # Literal
        return {"choices": get_args(kind), "default": None}
    return {"type": kind, "default": None, "metavar": kind.__name__.upper()}


def _seed(text: str) -> int:
    try:
        return as_seed(int(text) if text.isdecimal() else text)
    except ValueError as error:  # also more digits than Python reads
        raise argparse.ArgumentTypeError(str(error)) from error
