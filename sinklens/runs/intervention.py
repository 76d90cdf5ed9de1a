"""What an intervention is: a list of hook functions, made for one run.

An `Intervention` is a description (what to change, and at which steps, layers, heads, positions) that can be used in
many runs. `on` makes the (point, function) pairs for one of them, with whatever state that run needs, so nothing is
carried from run to run. ``hooks=`` of `sinklens.trace` and `sinklens.generate` takes interventions among plain pairs;
for TransformerLens's `run_with_hooks` and `hooks` write ``fwd_hooks=intervention.hooks_for(model)``.

Two kinds of numbers need a word. *Positions* are those that a prompt has when it runs alone: padding is not counted,
so position 0 is a row's first token in every batch. *Steps* of an autoregressive run own positions: the prompt is
step 0's, and each later token that of the step which reads it first. An intervention at some steps acts on the queries
that these steps own, also in a pass without a key/value cache that computes all of them again; so the run is the same
as with one.

One way this fails: hooks at one point run in the order they were listed. An intervention that looks at what others do
to a point belongs behind them.
"""

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point

if TYPE_CHECKING:
    from sinklens.hooks.tree import HookTree
    from sinklens.model import Model

HookFunction = Callable[..., Any]
Pairs = list[tuple[str, HookFunction]]


class QuerySpan(NamedTuple):
    """Queries of a pass that belong to one step.

    Attributes:
        step: whose they are.
        start, stop: their numbers in the pass.
    """

    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class RunContext:
    """What an intervention is told of the run that it changes.

    Attributes:
        tree: the model.
        real: False on left padding.
        prompt_length: positions before the answer, padding included.
        steps: steps planned.
        mask_id: the mask token; -1 in an autoregressive run.
        seed: of the run.
        row_keys: a number for each row that depends on its prompt alone, to seed random choices.
        vocabulary: text of token ids.
        special: ids of special tokens, as `Model.special_tokens`.
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

    @property
    def causal(self) -> bool:
        """Whether queries see earlier keys only."""
        return bool(self.tree.hf.config.is_causal)

    def first(self, step: int, queries: int) -> int:
        """Column of the canvas of the first of `queries` in a pass: not 0 where earlier ones are cached."""
        return self.prompt_length + step - queries if self.causal else 0

    def query_spans(self, step: int, queries: int) -> list[QuerySpan]:
        """The queries of a pass by the step that they belong to; in a diffusion run that is `step` for all."""
        if not self.causal:
            return [QuerySpan(step, 0, queries)]
        first = self.first(step, queries)
        prompt = min(queries, max(0, self.prompt_length - first))
        later = [QuerySpan(first + row - self.prompt_length + 1, row, row + 1) for row in range(prompt, queries)]
        return [QuerySpan(0, 0, prompt), *later] if prompt else later


@dataclass(frozen=True, kw_only=True)
class Intervention(ABC):
    """A change of a model's computation, restricted to some places.

    Attributes:
        steps: numbers of steps; negative ones count from the end of those planned. None means all.
        layers, heads: numbers; negative ones count from the end. None means all.
        positions: numbers of positions, padding not counted; negative ones count from the end of the canvas, or in a
            single pass of the ids. None means all.
    """

    steps: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None

    @abstractmethod
    def hooks_for(self, model: "Model", run: RunContext | None = None) -> Pairs:
        """The hooks of one run, or of one pass.

        Args:
            model: the model that runs.
            run: what `sinklens.trace` and `generate` tell; None for a single pass, whose rows have no padding.

        Raises:
            SettingError: a step, layer, head or position that does not exist, or something that a single pass lacks.
        """

    def extend(
        self, model: "Model", ids: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch longer"], Bool[Tensor, "batch longer"], Int[Tensor, "batch behind"]]:
        """Prompt ids and which are real, perhaps with more positions; and ids that stand behind the answer."""
        return ids, real, ids[:, :0]

    def chosen_layers(self, model: "Model") -> list[int]:
        """The layers as numbers from 0."""
        return within("layer", self.layers, model.cfg.n_layers)

    def chosen_heads(self, model: "Model") -> list[int]:
        """The heads as numbers from 0."""
        return within("head", self.heads, model.cfg.n_heads)

    def step_test(self, run: RunContext | None) -> Callable[[int | None], bool]:
        """Whether a step is among those chosen; outside a run there are no steps, and only None is asked.

        Raises:
            SettingError: steps are given, and there is no run.
        """
        if self.steps is None:
            return lambda step: True
        if run is None:
            raise SettingError(
                "steps= belongs to a run of several steps; in a single pass leave it out, or use sinklens.generate."
            )
        chosen = frozenset(within("step", self.steps, run.steps))
        return lambda step: step in chosen


def within(kind: str, chosen: Sequence[int] | None, size: int) -> list[int]:
    """`chosen` as numbers from 0 to `size` − 1, each once, ascending; all of them for None.

    Raises:
        SettingError: one does not exist, or `chosen` is no list of whole numbers.
    """
    if chosen is None:
        return list(range(size))
    numbers = whole_numbers(kind, chosen)
    for number in numbers:
        if not -size <= number < size:
            raise SettingError(f"{kind} {number} does not exist; there are {size}, 0 to {size - 1} (or -{size} to -1).")
    return sorted({number % size for number in numbers})


def whole_numbers(kind: str, chosen: Sequence[int]) -> list[int]:
    """`chosen` as Python's integers, in their order; an array or a tensor of integers is as good as a list.

    Raises:
        SettingError: one number, a generator, or something that is no whole number.
    """
    if isinstance(chosen, int):
        raise SettingError(f"{kind}s is a list of numbers; write {kind}s=[{chosen}].")
    if isinstance(chosen, Iterator):
        raise SettingError(
            f"{kind}s is a list of numbers, which is read more than once; {type(chosen).__name__} can be read once "
            f"only. Write {kind}s=list(...)."
        )
    try:
        listed = list(chosen)
        numbers = [operator.index(number) for number in listed]
    except TypeError as error:
        raise SettingError(f"{kind}s is a list of whole numbers; got {chosen!r}.") from error
    if any(_is_truth(number) for number in listed):
        raise SettingError(f"{kind}s is a list of whole numbers; got truth values, {chosen!r}. Write their numbers.")
    return numbers


def _is_truth(number: object) -> bool:
    return isinstance(number, bool) or (isinstance(number, Tensor) and number.dtype is torch.bool)


def place_mask(positions: Sequence[int] | None, real: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """True at `positions` of each row, padding not counted; everywhere for None.

    Raises:
        SettingError: not even the longest row has one.
    """
    if positions is None:
        return torch.ones_like(real)
    length, starts = real.shape[1], real.long().argmax(dim=1)
    within("position", positions, length - int(starts.min()))
    mask = torch.zeros_like(real)
    for position in whole_numbers("position", positions):
        columns = starts + position if position >= 0 else torch.full_like(starts, length + position)
        has = (columns >= starts) & (columns < length)
        mask[has.nonzero()[:, 0], columns[has]] = True
    return mask


def refuse(what: Intervention, *restrictions: str) -> None:
    """Refuse restrictions that mean nothing to `what`, instead of passing over them.

    Raises:
        SettingError: one was given.
    """
    for name in restrictions:
        if getattr(what, name) is not None:
            raise SettingError(f"{type(what).__name__} knows no {name}=; leave it out.")


def refuse_empty(what: Intervention, *more: str) -> None:
    """Refuse empty restrictions: nothing would be changed, without a word.

    Args:
        more: further attributes that hold numbers.

    Raises:
        SettingError: one is empty.
    """
    for name in ("steps", "layers", "heads", "positions", *more):
        chosen = getattr(what, name)
        if isinstance(chosen, Sized) and len(chosen) == 0:
            raise SettingError(
                f"{name} is empty, so {type(what).__name__} would change nothing. Name at least one, give None for "
                f"all, or leave the intervention out."
            )


class Queries:
    """Which queries of a pass an intervention touches: those at its `positions` that belong to one of its `steps`."""

    def __init__(self, what: Intervention, run: RunContext | None) -> None:
        self._run, self._in_step, self._positions = run, what.step_test(run), what.positions
        self._places = None if run is None else place_mask(what.positions, run.real)

    def of(self, step: int | None, queries: int, device: torch.device) -> Bool[Tensor, "rows query"] | None:
        """True at the queries touched, for each row or one for all; None if this step touches none."""
        if self._run is None or self._places is None:
            return place_mask(self._positions, torch.ones(1, queries, dtype=torch.bool, device=device))
        own = torch.zeros(queries, dtype=torch.bool, device=device)
        for part in self._run.query_spans(step or 0, queries):
            own[part.start : part.stop] = self._in_step(part.step)
        first = self._run.first(step or 0, queries)
        return self._places[:, first : first + queries].to(device) & own if bool(own.any()) else None


class Distances:
    """Key position minus query position in a pass; counts the queries, which an additive mask of one row does not tell.

    Its hooks belong before those that ask.
    """

    def __init__(self) -> None:
        self._queries = 0

    def pairs(self, layers: Sequence[int]) -> Pairs:
        """The hooks that count."""
        return [(f"blocks.{layer}.attn.hook_rot_q", self._count) for layer in layers]

    def _count(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._queries = value.shape[1]

    def of(self, mask: Tensor) -> Int[Tensor, "query key"]:
        """The distances that belong to the additive mask `mask`; queries are the last positions."""
        keys = torch.arange(mask.shape[-1], device=mask.device)
        return keys[None, :] - keys[len(keys) - self._queries :, None]


def row_key(prompt: Sequence[int]) -> int:
    """A number that depends on the ids of a row's prompt alone."""
    return int.from_bytes(hashlib.sha256(repr(list(prompt)).encode()).digest()[:8], "little")


def layer_of(point: Point) -> int:
    """The layer of a point below a block."""
    return int(str(point.name).split(".")[1])


class Canvas:
    """Keeps the token ids that a step works on, for hooks that ask what stands where.

    Attributes:
        ids: of the step being run, or of the last one.
        before: of the step before that; None at the first.
    """

    def __init__(self) -> None:
        self.ids: Int[Tensor, "batch pos"] | None = None
        self.before: Int[Tensor, "batch pos"] | None = None

    def hook(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        """The hook function of ``denoise.hook_canvas``."""
        self.before, self.ids = self.ids, value.clone()
