"""Chips: the changes that a user makes on the page, each of which is one intervention.

`CHIPS` is the only place that knows what a chip does. A chip becomes an `Expression`, the class of an intervention and
its arguments; a run executes `Expression.build`, and "Copy as Python" prints `Expression.source`, so the two cannot
differ.

Caveat: a chip is read without knowing the model, so here a layer may be any number. `check_start` in execution.py
refuses one that does not exist.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from sinklens.errors import SettingError
from sinklens.live.refusal import Refused, require
from sinklens.runs import Intervention
from sinklens.utils.arguments import Words, read_as

FieldType = Literal["layer", "head", "pos", "step", "token", "int", "choice", "steps", "heads"]
MOST_CHIPS = 64
LARGEST = 10_000_000  # of any integer in a chip; larger ones are never an index or a token
INDEX = Annotated[int, Ge(0), Le(LARGEST), Words(f"an integer from 0 to {LARGEST:,}")]
WORDS = {
    "steps": "[first, last] with first ≤ last, or null for all",
    "heads": "a list of heads, such as [0, 3]",
}


@dataclass(frozen=True)
class Expression:
    """The construction of an intervention.

    Attributes:
        name: a class of `sinklens.interventions`.
        arguments: its keyword arguments; numbers, strings, lists and dicts of them.
    """

    name: str
    arguments: Mapping[str, Any]

    def build(self) -> Intervention:
        """The intervention."""
        from sinklens import interventions

        return getattr(interventions, self.name)(**self.arguments)

    def source(self) -> str:
        """The same as Python source."""
        return f"{self.name}({', '.join(f'{name}={value!a}' for name, value in self.arguments.items())})"


@dataclass(frozen=True)
class Field:
    """A field of a chip.

    Attributes:
        name, type: its name, and the type of its value; "steps" is [first, last], both included.
        help: what it means.
        default: the value of a chip that leaves it out; None means "all" and is allowed only if `optional`.
        optional: whether None is allowed.
        choices: allowed values of a "choice".
    """

    name: str
    type: FieldType
    help: str
    default: Any = None
    optional: bool = False
    choices: tuple[str, ...] = ()

    def read(self, chip: Mapping[str, Any], kind: str) -> Any:
        """The value in `chip`.

        Raises:
            Refused: it is missing or has another type.
        """
        value = chip.get(self.name, self.default)
        what = f"{kind}.{self.name}"
        if value is None:
            require(self.optional, f"the chip {kind} needs {self.name}: {self.help}.")
            return None
        if self.type in WORDS:
            require(self._fits(value), f"{what} must be {WORDS[self.type]}; got {value!r:.40}.")
            return value
        types: dict[str, Any] = {"choice": Literal[self.choices]}
        try:
            return read_as(types.get(self.type, INDEX), what, value)
        except SettingError as error:
            raise Refused(str(error)) from error

    def _fits(self, value: Any) -> bool:
        """Whether `value` is of a type in `WORDS`."""
        numbers = isinstance(value, list) and 0 < len(value) <= MOST_CHIPS and all(map(is_index, value))
        return numbers and (self.type == "heads" or (len(value) == 2 and value[0] <= value[1]))


def is_index(value: object) -> bool:
    """Whether `value` is an integer that may be an index or a token."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


@dataclass(frozen=True)
class ChipKind:
    """A kind of chip.

    Attributes:
        label: its name on the page.
        help: what it does.
        fields: its fields.
        express: the intervention for values of the fields.
    """

    label: str
    help: str
    fields: tuple[Field, ...]
    express: Callable[[Mapping[str, Any]], Expression] = field(repr=False)


STEPS = Field("steps", "steps", "the first and last step at which it acts; all by default", optional=True)
LAYER, HEAD = Field("layer", "layer", "the layer"), Field("head", "head", "the head")
SOME_LAYER = Field("layer", "layer", "the layer; all by default", optional=True)
SOME_HEAD = Field("head", "head", "the head; all by default", optional=True)
SOME_HEADS = Field("heads", "heads", "the heads, such as 0, 3; all by default", optional=True)
BY = Field("by", "choice", "what replaces the output", default="zero", choices=("zero", "mean"))
POSITION = Field("pos", "pos", "the position, counted from 0 at the start of the prompt")
STEP = Field("step", "step", "the step at whose start it acts")
TOP_K = Field("top_k", "int", "the number of strongest keys per head", default=1)
FROM = Field("from_step", "step", "the step that is kept; it acts in all later steps")


def _places(chip: Mapping[str, Any]) -> dict[str, Any]:
    """``layers=``, ``heads=`` and ``steps=`` of a chip, without those that it does not restrict."""
    single = {"layers": chip.get("layer"), "heads": chip.get("head")}
    found: dict[str, Any] = {name: [value] for name, value in single.items() if value is not None}
    if chip.get("heads") is not None:
        found["heads"] = chip["heads"]
    if chip.get("steps") is not None:
        first, last = chip["steps"]
        found["steps"] = range(first, last + 1)
    return found


CHIPS: dict[str, ChipKind] = {
    "ablate_head": ChipKind(
        "Ablate a head",
        "Replace the head's output by zero, or by its mean over the positions of the step.",
        (LAYER, HEAD, BY, STEPS),
        lambda chip: Expression("AblateHeads", _places(chip) | {"by": chip["by"]}),
    ),
    "ablate_heads": ChipKind(
        "Ablate heads of a layer",
        "Replace the outputs of several heads of a layer with zero or their means; of all heads, if none is named.",
        (LAYER, SOME_HEADS, BY, STEPS),
        lambda chip: Expression("AblateHeads", _places(chip) | {"by": chip["by"]}),
    ),
    "ablate_mlp": ChipKind(
        "Ablate an MLP",
        "Replace what the layer's MLP adds to the residual stream with zero.",
        (LAYER, STEPS),
        lambda chip: Expression("AblateMLPs", _places(chip)),
    ),
    "mask_head_sinks": ChipKind(
        "Mask a head's strongest keys",
        "At each step, hide from the head the keys that were its strongest at the step before.",
        (LAYER, HEAD, TOP_K, STEPS),
        lambda chip: Expression("MaskSinks", _places(chip) | {"top_k": chip["top_k"]}),
    ),
    "mask_sinks": ChipKind(
        "Mask the strongest keys of all heads",
        "At each step, hide from every head the keys that were its strongest at the step before.",
        (TOP_K, STEPS),
        lambda chip: Expression("MaskSinks", _places(chip) | {"top_k": chip["top_k"]}),
    ),
    "hide_key": ChipKind(
        "Hide a key",
        "Hide one position from every query; its own output is still computed.",
        (POSITION, SOME_LAYER, SOME_HEAD, STEPS),
        lambda chip: Expression("HideKeys", _places(chip) | {"positions": [chip["pos"]]}),
    ),
    "force_token": ChipKind(
        "Force a token",
        "Put a token on the canvas when each of the steps begins. A token that has been read once stays decided.",
        (POSITION, Field("token", "token", "the token"), STEPS),
        lambda chip: Expression("ForceTokens", {"tokens": {chip["pos"]: chip["token"]}} | _places(chip)),
    ),
    "remask": ChipKind(
        "Mask again",
        "Mask a position of the answer again when a step begins.",
        (POSITION, STEP),
        lambda chip: Expression("Remask", {"positions": [chip["pos"]], "steps": [chip["step"]]}),
    ),
    "freeze_pattern": ChipKind(
        "Freeze a pattern",
        "Repeat the attention pattern of one step in all later ones.",
        (LAYER, SOME_HEAD, FROM),
        lambda chip: Expression("FreezePattern", {"at": chip["from_step"]} | _places(chip)),
    ),
    "hold_sink": ChipKind(
        "Hold a sink",
        "Keep the attention to the strongest key of one step in all later ones; the other keys share the rest.",
        (SOME_LAYER, SOME_HEAD, FROM),
        lambda chip: Expression("HoldSinks", {"at": chip["from_step"]} | _places(chip)),
    ),
}


def read_chips(given: Any) -> tuple[dict[str, Any], ...]:
    """The chips of a request, with every field.

    Raises:
        Refused: they are not chips, or too many.
    """
    require(isinstance(given, list), f"chips must be a list; got {type(given).__name__}.")
    require(len(given) <= MOST_CHIPS, f"a run has at most {MOST_CHIPS} chips; got {len(given)}.", 413)
    return tuple(map(_read_chip, given))


def _read_chip(given: Any) -> dict[str, Any]:
    require(isinstance(given, dict), f"a chip must be an object; got {type(given).__name__}.")
    kind = given.get("kind")
    require(isinstance(kind, str) and kind in CHIPS, f"no chip is of the kind {kind!r:.40}; known: {', '.join(CHIPS)}.")
    names = [entry.name for entry in CHIPS[kind].fields]
    unknown = sorted(set(given) - {"id", "on", "kind", *names})
    require(not unknown, f"the chip {kind} has no field {str(unknown[:1])[1:-1]:.40}; its fields: {', '.join(names)}.")
    named, on = given.get("id", ""), given.get("on", True)
    require(isinstance(named, str) and len(named) <= 40, "a chip's id must be a string of up to 40 characters.")
    require(isinstance(on, bool), f"a chip's on must be true or false; got {on!r:.40}.")
    try:
        values = {entry.name: entry.read(given, kind) for entry in CHIPS[kind].fields}
    except Refused as refusal:
        raise Refused(str(refusal), 422, named) from refusal
    return {"id": named, "on": on, "kind": kind} | values


def expressions(chips: Sequence[Mapping[str, Any]]) -> list[Expression]:
    """The interventions of the chips that are switched on, in order."""
    return [CHIPS[chip["kind"]].express(chip) for chip in chips if chip["on"]]
