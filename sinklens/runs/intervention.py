"""Interventions: reusable descriptions that create the hook functions of one run.

An `Intervention` describes a change (what, and at which steps, layers, heads, positions) and can be used in many runs.
`hooks_for` creates the (point, function) pairs for one run, with any state that run needs, so no state carries over
between runs. ``hooks=`` of `sinklens.trace` and `sinklens.generate` accepts interventions and plain pairs in one list;
for TransformerLens's `run_with_hooks` and `hooks`, write ``fwd_hooks=intervention.hooks_for(model)``.

Conventions. *Positions* do not count padding, so position 0 is a row's first token in every batch. *Steps* of an
autoregressive run own positions: step 0 owns the prompt, and each later token belongs to the step that first reads it.
An intervention at some steps acts on the queries that those steps own, even in a pass without a key/value cache that
recomputes all queries; runs with and without a cache are therefore equal.

Pitfall: hooks at one point run in the order in which they are listed. List an intervention that reads what others do to
a point after them.
"""

import hashlib
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.attention.layer_sums import LayerSums
from sinklens.hooks.forward_pass import ForwardPass, undecided_in
from sinklens.hooks.names import ENCODER
from sinklens.hooks.points import Point
from sinklens.hooks.tree import HookTree
from sinklens.model import Model
from sinklens.runs.choices import Choice
from sinklens.runs.control_keys import ControlLog
from sinklens.utils.arguments import check_arguments
from sinklens.utils.integers import as_integer

HookFunction = Callable[..., Any]
Pairs = list[tuple[str, HookFunction]]


@dataclass(frozen=True)
class RunContext:
    """What an intervention knows about the run that it changes.

    Attributes:
        tree: the model's tree of hook points.
        real: False on left padding; without positions in a single pass, whose padding ``hook.forward_pass.real`` gives.
        prompt_length: number of positions before the answer, including padding.
        steps: number of planned steps.
        mask_id: the mask token; -1 in an autoregressive run.
        seed: seed of the run.
        row_keys: one number per row that depends only on its prompt, to seed random choices.
        vocabulary: returns the text of token ids.
        special: ids of special tokens, as in `Model.special_tokens`.
        controls: counts the keys of controls.
        settings: those of the sampler, as JSON.
        choices: one for each rule, in which it keeps its places; None if the run does not record them.
        single: whether it is a single pass, which is a run of one step without a number.
        left_to_right: whether the run decodes from left to right.
        sums: the sink scores of the last step; whoever needs them adds to its `layers`. None in a single pass.
        rows: the rows of this context in the batch of `sums`.
    """

    tree: "HookTree"
    real: Bool[Tensor, "batch pos"]
    prompt_length: int
    steps: int
    mask_id: int
    seed: int
    row_keys: tuple[int, ...]
    vocabulary: Callable[[Sequence[int]], dict[int, str]]
    special: dict[str, list[int]]
    controls: ControlLog = field(default_factory=ControlLog)
    settings: str = "{}"
    choices: list[Choice] | None = None
    single: bool = False
    left_to_right: bool = False
    sums: LayerSums | None = None
    rows: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def of_single_pass(cls, model: "Model") -> "RunContext":
        """The context of one pass outside a run."""
        mask = -1 if model.mask_token_id is None else model.mask_token_id
        unknown = torch.ones(1, 0, dtype=torch.bool, device=model.cfg.device)
        return cls(model.tree, unknown, 0, 1, mask, 0, (), lambda tokens: {}, model.special_tokens, single=True)

    @property
    def causal(self) -> bool:
        """Whether queries attend only to their own and earlier keys."""
        return self.tree.causal or self.left_to_right

    @property
    def forward_pass(self) -> ForwardPass:
        """The pass that runs, or ran last; hook functions also have it as ``hook.forward_pass``."""
        return self.tree.watch.forward_pass


class HookSource(ABC):
    """What ``hooks=`` takes besides (point, function) pairs: an `Intervention`, or a `Reader` that changes nothing."""

    on_canvas: ClassVar[bool] = False
    """Whether it is exact where a pass covers only the canvas of a step, and its keys are the text in reach."""

    needs_run: ClassVar[str] = ""
    """Why it does not work in a single pass, for the error; empty if it does."""

    within_step: ClassVar[bool] = False
    """Whether what it does at a step depends on that step alone, so that the steps before need not run."""

    changes_model: ClassVar[bool] = False
    """Whether it changes the model itself while a run lasts, for all rows, and not only values at points."""

    refused: ClassVar[tuple[str, ...]] = ()
    """The restrictions that it does not take."""

    indexed: ClassVar[tuple[str, ...]] = ()
    """Its further attributes that hold indices, which must not be empty."""

    steps: Sequence[int] | None
    layers: Sequence[int] | None
    heads: Sequence[int] | None
    positions: Sequence[int] | None

    @contextmanager
    def applied(self, model: "Model") -> Iterator[None]:
        """Change the model while a block lasts; afterwards it is as before. See `changes_model`."""
        yield

    @property
    def rule(self) -> Any:
        """The rule of its places, an `interventions.Rule`; None for everywhere."""
        return None

    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """The (point, function) pairs for one run, or for one pass.

        Args:
            model: the model to run.
            run: the context passed by `sinklens.trace` and `generate`; None for a single pass.

        Raises:
            SettingError: a step, layer, head or position does not exist, or a single pass is not enough.
        """
        require(run is not None or not self.needs_run, self.needs_run)
        return self.pairs(model, RunContext.of_single_pass(model) if run is None else run)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """What `hooks_for` returns; a subclass defines it. A single pass is a run of one step.

        Raises:
            SettingError: see `hooks_for`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define pairs(self, model, run).")

    def extend(
        self, model: "Model", ids: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch longer"], Bool[Tensor, "batch longer"], Int[Tensor, "batch appended"]]:
        """Prompt ids and which are real, optionally with added positions, and ids to append after the answer."""
        return ids, real, ids[:, :0]

    def acting_steps(self, steps: int) -> list[int]:
        """The steps of a run of `steps` planned steps at which it may change something."""
        return within("step", self.steps, steps)

    def __post_init__(self) -> None:
        """Check the restrictions, and every attribute by its declared type.

        Raises:
            SettingError: a restriction is refused, or empty and would silently change nothing; or an attribute has
                the wrong type or is out of range.
        """
        if "__dataclass_fields__" in vars(type(self)):  # a class with its own __init__ may keep its arguments elsewhere
            check_arguments(self)
        for name in self.refused:
            require(getattr(self, name) is None, f"{type(self).__name__} does not support {name}=; leave it out.")
        for name in ("steps", "layers", "heads", "positions", *self.indexed):
            chosen = getattr(self, name)
            require(
                not isinstance(chosen, Sized) or len(chosen),
                f"{name} is empty, so {type(self).__name__} would change nothing. Name at least one, pass None for "
                f"all, or leave the intervention out.",
            )

    def chosen_layers(self, model: "Model") -> list[int]:
        """The layers as indices from 0."""
        return within("layer", self.layers, model.cfg.n_layers)

    def chosen_heads(self, model: "Model") -> list[int]:
        """The heads as indices from 0."""
        return within("head", self.heads, model.cfg.n_heads)

    def step_test(self, run: RunContext | None) -> Callable[[int | None], bool]:
        """A test for whether a step is selected; outside a run there are no steps, and its argument is None.

        Raises:
            SettingError: `steps` is set in a single pass.
        """
        if self.steps is None:
            return lambda step: True
        if run is None or run.single:
            raise SettingError(
                "steps= applies to a run with several steps; omit it in a single pass, or use sinklens.generate."
            )
        chosen = frozenset(within("step", self.steps, run.steps))
        return lambda step: step in chosen


@dataclass(frozen=True, kw_only=True)
class Intervention(HookSource):
    """A change of a model's computation, restricted to some places; a single index stands for a list of one.

    Attributes:
        steps: step indices; negative ones count from the end of the planned steps. None means all.
        layers, heads: indices; negative ones count from the end. None means all.
        positions: position indices, not counting padding; negative ones count from the end of the canvas, or of the ids
            in a single pass. None means all.
    """

    steps: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None


@dataclass(kw_only=True, eq=False)
class Reader(HookSource):
    """Reads a run and changes nothing; what it read of the last run is in its attributes.

    List it last to see the edits of the others. A reader may take the restrictions of an `Intervention`; otherwise it
    refuses them.
    """

    steps: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None


@contextmanager
def all_applied(entries: Sequence[Any], model: "Model") -> Iterator[None]:
    """`HookSource.applied` of all entries of ``hooks=``."""
    with ExitStack() as stack:
        for entry in entries:
            if isinstance(entry, HookSource):
                stack.enter_context(entry.applied(model))
        yield


def refuse_off_canvas(entry: Any, model: "Model") -> None:
    """Refuse an intervention that needs complete passes, for a model whose passes cover one canvas.

    Raises:
        SettingError: `entry.on_canvas` is False (`Intervention.on_canvas`).
    """
    require(
        not model.tree.architecture.encoder or not isinstance(entry, HookSource) or entry.on_canvas,
        f"{type(entry).__name__} is not available for {model.family} models, whose passes cover one canvas; use "
        f"hook functions, or interventions with on_canvas = True such as MaskSinks.",
    )


def within(kind: str, chosen: Sequence[Any] | None, size: int) -> list[int]:
    """`chosen` as unique indices from 0 to `size` − 1 in ascending order; all of them for None.

    Raises:
        SettingError: an index does not exist, or `chosen` is not a list of integers.
    """
    if chosen is None:
        return list(range(size))
    numbers = whole_numbers(kind, chosen)
    for number in numbers:
        require(
            -size <= number < size,
            f"{kind} {number} does not exist; there are {size}, 0 to {size - 1} (or -{size} to -1)."
            + " A single pass and a likelihood have step 0 alone; leave steps= out." * ((kind, size) == ("step", 1)),
        )
    return sorted({number % size for number in numbers})


def whole_numbers(kind: str, chosen: Sequence[Any]) -> list[int]:
    """`chosen` as Python integers, in order; accepts lists, arrays and tensors of integers.

    Raises:
        SettingError: `chosen` is a single number, a generator or a mapping, or contains something other than integers.
    """
    listed = isinstance(chosen, Iterable) and getattr(chosen, "ndim", 1) == 1
    numbers = [as_integer(one) for one in chosen] if listed and not isinstance(chosen, Iterator | Mapping) else [None]
    if None in numbers:
        raise SettingError(f"{kind}s must be a list of integers, such as [0, 2] or range(3); got {chosen!r}.")
    return [number for number in numbers if number is not None]


def place_mask(positions: Sequence[int] | None, real: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """True at `positions` of each row, not counting padding; True everywhere for None.

    Raises:
        SettingError: even the longest row lacks one of the positions.
    """
    if positions is None:
        return torch.ones_like(real)
    length, starts = real.shape[1], real.long().argmax(dim=1)
    within("position", positions, length - int(starts.min()))
    numbers = torch.tensor(whole_numbers("position", positions), dtype=torch.long, device=real.device)
    columns = torch.where(numbers >= 0, starts[:, None] + numbers, length + numbers)
    has = (columns >= starts[:, None]) & (columns < length)
    mask = torch.zeros_like(real)
    mask[has.nonzero()[:, 0], columns[has]] = True
    return mask


def row_key(prompt: Sequence[int]) -> int:
    """A number that depends only on the ids of a row's prompt."""
    return int.from_bytes(hashlib.sha256(repr(list(prompt)).encode()).digest()[:8], "little")


def layer_of(point: Point) -> int:
    """The layer of a point inside a block, also one of an encoder."""
    return int(str(point.name).removeprefix(ENCODER).split(".")[1])


class Snapshot(NamedTuple):
    """The canvas of one step.

    Attributes:
        ids: token ids.
        undecided: the undecided positions.
        computed: of a finished step under a cache policy, the positions that it computed; else None.
    """

    ids: Int[Tensor, "batch pos"]
    undecided: Bool[Tensor, "batch pos"]
    computed: Bool[Tensor, "batch pos"] | None = None

    def first(self, positions: int) -> "Snapshot":
        """The first `positions` of it."""
        return Snapshot(*(None if part is None else part[:, :positions] for part in self))  # type: ignore[arg-type]


class Canvas:
    """Keeps the canvas of the current step for other hooks.

    Attributes:
        now: the canvas of the current step, or of the last one after the run; None before the first.
        before: the canvas of the step before that; None at the first.
    """

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self.now: Snapshot | None = None
        self.before: Snapshot | None = None

    def hook(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """The hook function of ``denoise.hook_canvas``."""
        if self.now is not None:  # the next step is planned after this point
            self.before = self.now._replace(computed=self._run.forward_pass.computed)
        begun, mask, size = self._run.forward_pass, self._run.mask_id, value.shape[1]
        undecided = value == mask
        if begun.undecided is not None and begun.canvas is not None:
            undecided = undecided_in(value, begun.canvas[:, :size], begun.undecided[:, :size], mask)
        self.now = Snapshot(value.clone(), undecided)
