"""What an intervention is: a list of hook functions, made for one run.

An `Intervention` is a description (what to change, and at which steps, layers, heads, positions) that can be used in
many runs. `on` makes the (point, function) pairs for one of them, with whatever state that run needs, so nothing is
carried from run to run. ``hooks=`` of `sinklens.trace` and `sinklens.generate` takes interventions among plain pairs;
for TransformerLens's `run_with_hooks` and `hooks` write ``fwd_hooks=intervention.on(model)``.

One way this fails: hooks at one point run in the order they were listed. An intervention that looks at what others do
to a point belongs behind them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point

if TYPE_CHECKING:
    from sinklens.hooks.tree import HookTree
    from sinklens.model import Model

HookFunction = Callable[..., Any]
Pairs = list[tuple[str, HookFunction]]


@dataclass(frozen=True)
class Surroundings:
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


@dataclass(frozen=True, kw_only=True)
class Intervention(ABC):
    """A change of a model's computation, restricted to some places.

    Attributes:
        steps: numbers of steps; negative ones count from the end of those planned. None means all.
        layers, heads: numbers; negative ones count from the end. None means all.
        positions: numbers of positions; negative ones count from the end of the canvas. None means all.
    """

    steps: Sequence[int] | None = None
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    positions: Sequence[int] | None = None

    @abstractmethod
    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """The hooks of one run, or of one pass.

        Args:
            model: the model that runs.
            run: what `sinklens.trace` and `generate` tell; None for a single pass.

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

    def step_test(self, run: Surroundings | None) -> Callable[[int | None], bool]:
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
        SettingError: one does not exist.
    """
    if chosen is None:
        return list(range(size))
    if isinstance(chosen, int):
        raise SettingError(f"{kind}s is a list of numbers; write {kind}s=[{chosen}].")
    for number in chosen:
        if not -size <= number < size:
            raise SettingError(f"{kind} {number} does not exist; there are {size}, 0 to {size - 1} (or -{size} to -1).")
    return sorted({number % size for number in chosen})


def position_mask(positions: Sequence[int] | None, length: int, device: torch.device) -> Bool[Tensor, " pos"]:
    """True at `positions` of `length`; everywhere for None."""
    mask = torch.zeros(length, dtype=torch.bool, device=device)
    mask[within("position", positions, length)] = True
    return mask


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
