"""The options that follow from the declarations of the samplers' settings.

An option has the setting's name, type and meaning, and the defaults of all samplers that have it. Whether a value fits
is checked by the sampler of the model. The help leaves out what only one or two samplers have.

Pitfall: the samplers import torch, so only commands that take settings import this module.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from cyclopts import Group, Parameter

from sinklens.cli.options import whole
from sinklens.families.registry import SAMPLERS, register_installed
from sinklens.families.samplers import setting_help
from sinklens.utils.arguments import REQUIRED, Argument

WORDS = {"None": "off", "True": "yes", "False": "no"}


def _options() -> dict[str, Any]:
    """The option of every setting that a text can give."""
    register_installed()
    owned: dict[str, list[Argument]] = {}
    for sampler in SAMPLERS.values():
        for name, one in sampler.settings().items():
            if one.type in (bool, int, float, str) or one.choices:
                owned.setdefault(name, []).append(one)
    return {
        "sampler": Annotated[Literal[*SAMPLERS], Parameter(help="another sampler than the model's (default: its own)")],
        "mode": Annotated[
            str,
            Parameter(help="how a model that changes its attention decodes, such as diffusion (default: the model's)"),
        ],
        **{name: _option(name, several) for name, several in owned.items()},
    }


def _option(name: str, owned: Sequence[Argument]) -> Any:
    """The option of a setting that several samplers may own."""
    choices = dict.fromkeys(choice for one in owned for choice in one.choices)
    kind: Any = Literal[*choices] if choices else owned[0].type
    defaults = dict.fromkeys(str(one.default) for one in owned if one.default is not REQUIRED)
    text = setting_help(name)
    text += "" if "default" in text else f" (default: {', '.join(WORDS.get(one, one) for one in defaults)})"
    text += "; of a block-causal checkpoint the length of its blocks" * (name == "block_length")
    negative = f"--no-{name.replace('_', '-')}" if kind is bool else ()
    return Annotated[
        kind,
        Parameter(help=text, negative=negative, converter=whole if kind is int else None, show=len(owned) > 2),
    ]


if TYPE_CHECKING:
    Settings = dict[str, Any]
else:
    GROUP = Group(
        "Sampler settings",
        help="Which of these apply depends on the model. The checkpoint's defaults replace those listed here. Not "
        "listed: settings of only one or two samplers; sinklens.families.settings_for(sinklens.load(MODEL), {}) shows "
        "all.",
    )
    Settings = Annotated[TypedDict("Settings", _options(), total=False), Parameter(name="*", group=GROUP)]
