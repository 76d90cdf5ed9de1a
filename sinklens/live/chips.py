"""Chips: the changes that one makes on the page, each of which is one intervention.

`CHIPS` is the only place that knows what a chip does. A chip becomes an `Expression`, the class of an intervention and
its arguments; a run executes `Expression.build`, and "Copy as Python" prints `Expression.source`, so the two cannot
differ.

Caveat: a chip is read without knowing the model, so here a layer may be any number. `check_start` in execution.py
refuses one that does not exist.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Le

from sinklens.errors import SettingError
from sinklens.live.refusal import Refused, require
from sinklens.runs import Intervention
from sinklens.utils.arguments import Words, read_as

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.denoising import Denoising

    Begin = Callable[[str | None], Denoising]

FieldType = Literal["layer", "head", "pos", "step", "token", "int", "choice", "steps", "heads", "text"]
MOST_CHIPS = 64
MOST_TEXT = 20_000  # characters of a text in a chip
LARGEST = 10_000_000  # of any integer in a chip; larger ones are never an index or a token
INDEX = Annotated[int, Ge(0), Le(LARGEST), Words(f"an integer from 0 to {LARGEST:,}")]
WORDS = {
    "steps": "[first, last] with first ≤ last, or null for all",
    "heads": "a list of heads, such as [0, 3]",
    "text": f"text of 1 to {MOST_TEXT:,} characters",
}


@dataclass(frozen=True)
class Source:
    """The values of a point in a run of another prompt, by step: computed before the run, in the model thread.

    Attributes:
        prompt, point: the other prompt, and the point.
        position: the position whose value is used; None for all.
    """

    prompt: str
    point: str
    position: int | None = None

    def value(self, model: "Model", given: Mapping[str, Any]) -> Any:
        """The caches; `given` are the other arguments of `sinklens.generate`: seed, chat template, and settings."""
        from sinklens.interventions import Activations
        from sinklens.runs import generate

        kept = Activations(names=[self.point])
        generate(model, self.prompt, hooks=[kept], record_sinks=False, progress=False, **given)
        return kept.caches

    def stand_in(self, model: "Model", begin: "Begin") -> Any:
        """Zeros in the form of the caches, made without running the model.

        Args:
            begin: prepares the run of a prompt with the settings of this run; None is the prompt of this run.

        Raises:
            SinklensError: the run of the other prompt could not begin.
        """
        here, there = begin(None), begin(self.prompt)
        lengths = [len(one.state.canvas[0]) - one.settings.gen_length for one in (here, there)]
        require(
            self.position is not None or lengths[0] == lengths[1],
            f"the other prompt has {lengths[1]} tokens and this one {lengths[0]}; give a prompt of as many tokens, or "
            f"the position to patch.",
            422,
        )
        columns = len(there.state.canvas[0])
        require(
            self.position is None or self.position < columns,
            f"position {self.position} does not exist in the run of the other prompt, which has {columns}.",
            422,
        )
        name = model.tree.resolve(self.point)
        return {step: {name: torch.zeros(1, columns, model.cfg.d_model)} for step in range(there.settings.most_steps)}

    def lines(self, model: str, name: str, given: str) -> list[str]:
        """Python after which ``caches`` of `name` are the value."""
        run = f"sinklens.generate({model}, {self.prompt!a}, hooks=[{name}]{given})"
        return [f"{name} = Activations(names=[{self.point!a}])", run]


@dataclass(frozen=True)
class Expression:
    """The construction of an intervention.

    Attributes:
        name: a class of `sinklens.interventions`.
        arguments: its keyword arguments; numbers, strings, lists and dicts of them.
        computed: what its further argument ``source`` is computed from, before the run.
    """

    name: str
    arguments: Mapping[str, Any]
    computed: Source | None = None

    def build(self, computed: Any = None) -> Intervention:
        """The intervention; `computed` is the value of its `Source`."""
        from sinklens import interventions

        given = {} if self.computed is None else {"source": computed}
        return getattr(interventions, self.name)(**self.arguments, **given)

    def source(self, computed: str = "...") -> str:
        """The same as Python source; `computed` is the expression of the value of its `Source`."""
        given = {} if self.computed is None else {"source": computed}
        written = given | {name: ascii(value) for name, value in self.arguments.items()}
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in written.items())})"


@dataclass(frozen=True)
class Field:
    """A field of a chip.

    Attributes:
        name, type: its name, and what its numbers count. "steps" is [first, last], both included.
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
        if self.type == "text":
            return isinstance(value, str) and 0 < len(value) <= MOST_TEXT
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
BY = Field("by", "choice", "the replacement", default="zero", choices=("zero", "mean"))
POINTS = ("hook_resid_post", "hook_attn_out", "hook_mlp_out")
POSITION = Field("pos", "pos", "the position, counted from 0 at the start of the prompt")
STEP = Field("step", "step", "the step at whose start it acts")
TOP_K = Field("top_k", "int", "the number of strongest keys per head", default=1)
FROM = Field("from_step", "step", "the step that is kept; it acts in all later steps")


def _places(chip: Mapping[str, Any]) -> dict[str, Any]:
    """``layers=``, ``heads=`` and ``steps=`` of a chip, without those that it does not restrict."""
    found: dict[str, Any] = {}
    if chip.get("layer") is not None:
        found["layers"] = [chip["layer"]]
    if chip.get("head") is not None:
        found["heads"] = [chip["head"]]
    if chip.get("heads") is not None:
        found["heads"] = chip["heads"]
    if chip.get("steps") is not None:
        first, last = chip["steps"]
        found["steps"] = range(first, last + 1)
    return found


def _patch(chip: Mapping[str, Any]) -> Expression:
    """The layer is part of the point."""
    source = Source(chip["prompt"], f"blocks.{chip['layer']}.{chip['point']}", chip["pos"])
    positions = {} if chip["pos"] is None else {"positions": [chip["pos"]]}
    return Expression("PatchHooks", _places({"steps": chip["steps"]}) | positions, source)


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
    "patch": ChipKind(
        "Patch from another prompt",
        "Replace values of this run with those of a run of another prompt, at the same step and place. The prompts "
        "need the same number of tokens.",
        (
            Field("prompt", "text", "the other prompt"),
            LAYER,
            Field("point", "choice", "what is patched", default="hook_resid_post", choices=POINTS),
            replace(POSITION, optional=True, help="the position; all by default"),
            STEPS,
        ),
        _patch,
    ),
    "mask_head_sinks": ChipKind(
        "Mask a head's sinks",
        "At each step, hide from the head the keys that were its strongest at the step before.",
        (LAYER, HEAD, TOP_K, STEPS),
        lambda chip: Expression("MaskSinks", _places(chip) | {"top_k": chip["top_k"]}),
    ),
    "mask_sinks": ChipKind(
        "Mask all sinks",
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
    if not isinstance(kind, str) or kind not in CHIPS:
        raise Refused(f"no chip is of the kind {kind!r:.40}; known: {', '.join(CHIPS)}.")
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
