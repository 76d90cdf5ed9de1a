"""Choosing the places that a patch replaces, and writing new values there.

The steps, heads and positions of a patch limit it in one of two ways. Where the values of the other run belong to the
same columns, a mask says which of them are taken. Where ``source_positions=`` pairs positions, or the other run has
another length, values are moved from position to position.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks import names
from sinklens.hooks.forward_pass import QuerySpan
from sinklens.hooks.points import Point
from sinklens.interventions.patch_source import Part, of_queries
from sinklens.interventions.places import CANVAS, AtPositions, Places, along, at_heads
from sinklens.runs.intervention import RunContext, place_mask, whole_numbers

if TYPE_CHECKING:
    from sinklens.model import Model


class PatchTarget:
    """The places of a run that a patch replaces.

    Args:
        what: the patch.
        paired: the columns of the other run that replace ``what.positions``; None for the same.
        points: the points to patch.
        steps: the steps to patch.
        model: the model.
        run: the run.

    Attributes:
        places: where it acts.

    Raises:
        SettingError: a head or position does not exist, or `what` has no meaning at one of the points.
    """

    def __init__(
        self,
        what: AtPositions,
        paired: Sequence[int] | None,
        points: Sequence[str],
        steps: frozenset[int],
        model: "Model",
        run: RunContext,
    ) -> None:
        if what.where is not None and paired is not None:
            raise SettingError(
                "source_positions= pairs with positions=; where= takes the values of the same positions."
            )
        self._limited = what.positions is not None or what.where is not None
        self._columns = None if run.single or what.positions is None else _columns(what.positions, run.real)
        self._what, self._paired, self._steps, self._run = what, paired, steps, run
        by_query = any(of_queries(name) for name in points)
        self.places = Places(what, model, run, points, of="queries" if by_query else None)
        for name in points:
            if self._limited and model.tree.architecture.encoder and name.startswith("denoise.") and name != CANVAS:
                raise SettingError(
                    f"{name} has the positions of the current canvas only, so positions= and where=, which count from "
                    f"the prompt, do not apply; leave them out, or patch a point of the layers."
                )

    def parts(self, value: Tensor, hook: Point) -> Iterator[Part]:
        """The parts of the value of a point in which something is replaced."""
        name = str(hook.name)
        axis = names.position_axis(name) % value.ndim
        first, spans = _spans(name, value.shape[axis], self._run, hook.step or 0)
        for span in spans:
            if span.step not in self._steps:
                continue
            mask = self.places.of_span(hook, span, first, value.device) if self._limited else None
            if mask is not None or not self._limited:
                yield Part(name, axis, span.step, span.start, range(first + span.start, first + span.stop), mask)

    def write(self, value: Tensor, part: Part, new: Tensor) -> Tensor:
        """The value of a point with `new` at the chosen places of `part`.

        Raises:
            SettingError: shapes that do not fit.
        """
        new = self._chosen(part, part.of(value), new)
        if len(part.columns) == value.shape[part.axis]:
            return new
        value = value.clone()
        part.of(value).copy_(new)
        return value

    def _chosen(self, part: Part, here: Tensor, new: Tensor) -> Tensor:
        """`here` with the chosen positions and heads of `new`."""
        name, axis, heads = part.name, part.axis, self._what.heads
        if name.endswith("hook_attn_mask") and here.shape[2] != new.shape[2]:  # one row applies to all queries
            queries = max(here.shape[2], new.shape[2])
            here, new = here.expand(-1, -1, queries, -1), new.expand(-1, -1, queries, -1)
        if self._what.positions is not None and (self._paired is not None or new.shape[axis] != here.shape[axis]):
            new = self._moved(part, here, new, self._what.positions)
        if new.shape != here.shape:
            raise SettingError(
                f"{name} has shape {list(new.shape)} in the source and {list(here.shape)} here; for prompts of "
                f"different lengths pass positions= and source_positions=."
            )
        if part.mask is not None:
            new = torch.where(along(part.mask, name, here), new, here)
        return new if heads is None else torch.where(at_heads(heads, name, here), new, here)

    def _moved(self, part: Part, here: Tensor, new: Tensor, positions: Sequence[int]) -> Tensor:
        """`here` with values of `new` at `positions`; those outside of `part` belong to other steps."""
        if self._columns is None:
            columns = _columns(positions, here.new_ones(len(here), here.shape[part.axis]).bool())
        else:
            columns = self._columns.to(here.device) - part.columns.start
        changed, source = here.movedim(part.axis, 1).clone(), new.movedim(part.axis, 1)
        if changed.shape[2:] != source.shape[2:]:
            raise SettingError(
                f"{part.name}: values of shape {list(source.shape[2:])} cannot replace {list(changed.shape[2:])}; "
                f"patterns and scores can be patched only between runs of one length."
            )
        length = source.shape[1]
        numbers = whole_numbers("position", positions if self._paired is None else self._paired)
        for number, target in zip(numbers, columns.T, strict=True):
            if length > 1 and not -length <= number < length:
                raise SettingError(
                    f"position {number} does not exist at {part.name} in the source, which has {length}; choose "
                    f"-{length} to {length - 1}."
                )
            rows = ((target >= 0) & (target < changed.shape[1])).nonzero()[:, 0]
            changed[rows, target[rows]] = source[rows, number % length]
        return changed.movedim(1, part.axis)


def _spans(name: str, size: int, run: RunContext, step: int) -> tuple[int, list[QuerySpan]]:
    """Canvas column at which a value of `size` positions begins, and its positions by step."""
    complete = [QuerySpan(step, 0, size)]
    if run.single:
        return 0, complete
    if not run.causal:  # with cached blocks, a pass has only the later queries, and logits
        part = of_queries(name) or name == "denoise.hook_logits"
        return run.forward_pass.first(size) if part else 0, complete
    if of_queries(name):
        return run.forward_pass.first(size), run.forward_pass.spans(size)
    decoding = name.startswith("denoise.") and name != CANVAS  # a single position, the one being decoded
    return run.prompt_length + step if decoding else 0, complete


def _columns(positions: Sequence[int], real: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch place"]:
    """Column of each position in each row.

    Raises:
        SettingError: a row lacks one of the positions.
    """
    numbers = whole_numbers("position", positions)
    found = torch.zeros(len(real), len(numbers), dtype=torch.long, device=real.device)
    for place, position in enumerate(numbers):
        mask = place_mask([position], real)
        if not bool(mask.any(dim=1).all()):
            raise SettingError(
                f"position {position} does not exist in every row; patch rows of different lengths separately."
            )
        found[:, place] = mask.long().argmax(dim=1)
    return found
