"""Options that several commands share: how a model is loaded, and how it runs.

A command receives each group as a dict of the options that were given, which are arguments of `sinklens.load` or
`sinklens.generate`. Their names and types are those of the arguments, and a test compares them; they are written here,
since reading the declarations would import torch for every ``--help``.

``--block-length`` is both. A block-causal checkpoint, whose attention depends on it, is loaded with it; for any other,
it is a setting of the sampler (`fitted`).

Pitfall: cyclopts rounds "1.5" to an integer; every integer here is an `Integer`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

from cyclopts import Parameter

from sinklens.errors import require
from sinklens.utils.arguments import Seed, read_as


def whole(kind: Any, tokens: Sequence[Any]) -> Any:
    """The integers of a command line."""
    for token in tokens:
        require(token.value.removeprefix("-").isdecimal(), f"must be an integer; got {token.value!r}", ValueError)
    numbers = tuple(int(token.value) for token in tokens)
    return numbers[0] if kind is int else numbers


def seed_of(kind: Any, tokens: Sequence[Any]) -> int:
    """A seed in its range."""
    text = tokens[0].value
    return int(read_as(Seed, "seed", int(text) if text.isdecimal() else text))


Integer = Annotated[int, Parameter(converter=whole)]
Integers = Annotated[tuple[int, ...], Parameter(converter=whole, show_default=False)]
Names = Annotated[tuple[str, ...], Parameter(show_default=False)]
Call = Annotated[list[str], Parameter(parse=False)]
"""The words of the command line, for the command that resumes it."""

LOADING = Parameter(name="*", group="Loading")
RUN = Parameter(name="*", group="Run")


@LOADING
class Device(TypedDict, total=False):
    """Where a model is, and in which type."""

    dtype: Annotated[str, Parameter(help="auto, float32, float16 or bfloat16 (default: auto, the stored one)")]
    device: Annotated[str, Parameter(help="e.g. cpu or cuda:1 (default: a GPU if one is available)")]


@LOADING
class OfFamily(TypedDict, total=False):
    """What the checkpoint is."""

    family: Annotated[
        str,
        Parameter(help="the checkpoint's family, as listed by `sinklens models` (default: the one config.json names)"),
    ]


@LOADING
class LoadingOfRun(Device, OfFamily, total=False):
    """How a model is loaded, beside the settings of a sampler."""

    revision: Annotated[str, Parameter(help="branch, tag or commit on the hub (default: the main branch)")]
    device_map: Annotated[str, Parameter(help="e.g. auto, to spread a model over several GPUs (default: one device)")]
    mask_token_id: Annotated[Integer, Parameter(help="the mask token (default: the checkpoint's)")]
    quantization: Annotated[
        str,
        Parameter(
            help="quantize full-precision weights while they are read: bnb-int8 or bnb-nf4 (default: "
            "they stay as they are)"
        ),
    ]
    adapter: Annotated[
        str, Parameter(help="folder or hub name of a LoRA adapter to merge (default: the one beside the weights)")
    ]


@LOADING
class BlockLength(TypedDict, total=False):
    """What the attention of a block-causal checkpoint depends on."""

    block_length: Annotated[
        Integer, Parameter(help="positions per block of a block-causal model (default: as config.json says)")
    ]


@LOADING
class Loading(LoadingOfRun, BlockLength, total=False):
    """How a model is loaded."""


@LOADING
class Described(OfFamily, BlockLength, total=False):
    """Which checkpoint is described."""

    revision: Annotated[str, Parameter(help="branch, tag or commit on the hub (default: the main branch)")]


@RUN
class Asked(TypedDict, total=False):
    """How a prompt is run."""

    seed: Annotated[int, Parameter(help="the same seed gives the same result (default: 0)", converter=seed_of)]
    chat_template: Annotated[bool, Parameter(name="--chat", help="apply the tokenizer's chat template (default: no)")]


@RUN
class Run(Asked, total=False):
    """A run."""

    cache: Annotated[
        str,
        Parameter(
            help="reuse keys and values under this policy, such as prefix, dual or keep-sinks:4; an unknown name lists "
            "all (default: every step is exact)"
        ),
    ]


def fitted(model: str, loading: Mapping[str, Any] | None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `sinklens.load` for a model: those given that apply to it."""
    from sinklens.model.loading import fitting

    given = dict(loading or {})
    if settings and "block_length" in settings:
        given["block_length"] = settings["block_length"]
    return fitting(model, given)
