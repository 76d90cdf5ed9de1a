"""Several interventions in one batch, each on its own rows.

Pitfall: a hook function that returns a value of another shape would shift the rows of the others; it is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks import names
from sinklens.hooks.hook_functions import label, refuse_other
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs.intervention import HookFunction, HookSource, Pairs, RunContext, refuse_off_canvas
from sinklens.runs.result import Generation


class Stacked(HookSource):
    """Divides the rows of a batch among interventions: the first acts on the first ``rows / count``, and so on.

    Args:
        listed: for each part of the batch, its interventions and (name, function) pairs.
    """

    on_canvas: ClassVar[bool] = True  # as far as what is listed is

    def __init__(self, listed: Sequence[Sequence[Any]]) -> None:
        self.listed = listed

    def pairs(self, model: Model, run: RunContext) -> Pairs:
        """See `HookSource.pairs`.

        Raises:
            SettingError: in a single pass, or if the rows do not divide evenly.
        """
        listed = self.listed
        require(
            not run.single and not len(run.real) % len(listed),
            f"{len(listed)} stacked interventions need a run with a multiple of {len(listed)} rows; got "
            f"{'a single pass' if run.single else len(run.real)}.",
        )
        count = len(run.real) // len(listed)
        known, layers = model.hook_names(), model.cfg.n_layers
        by_point: dict[str, list[list[HookFunction]]] = {}
        for number, hooks in enumerate(listed):
            rows = slice(number * count, (number + 1) * count)
            context = replace(
                run,
                real=run.real[rows],
                row_keys=run.row_keys[rows],
                controls=run.controls.of_rows(rows),
                choices=None,
                rows=rows,
            )
            for entry in hooks:
                refuse_off_canvas(entry, model)
                require(
                    not isinstance(entry, HookSource) or not entry.changes_model,
                    f"{type(entry).__name__} changes the model for all rows of a batch, and here each intervention has "
                    f"its own rows; make separate runs, as sinklens.experiments.effect does.",
                )
                pairs = entry.hooks_for(model, context) if isinstance(entry, HookSource) else [entry]
                for name, function in pairs:
                    for point in names.select(name, known, layers):
                        by_point.setdefault(point, [[] for _ in listed])[number].append(function)
        return [(point, _on_rows(functions, count)) for point, functions in by_point.items()]


@dataclass(frozen=True)
class Repeated:
    """Copies of a run to replay, one after the other along the batch.

    Attributes:
        canvas, undecided: as in `Generation`.
    """

    canvas: Int[Tensor, "batch step pos"]
    undecided: Bool[Tensor, "batch step pos"]

    @classmethod
    def of(cls, run: Generation, copies: int) -> "Repeated":
        """`copies` of a run."""
        return cls(run.canvas.repeat(copies, 1, 1), run.undecided.repeat(copies, 1, 1))


def _on_rows(functions: Sequence[Sequence[HookFunction]], count: int) -> HookFunction:
    """One hook function that calls each list of functions on its rows."""

    def call(value: Tensor, hook: Point) -> Tensor | None:
        parts, changed, every = [], False, hook.forward_pass
        try:
            for number, listed in enumerate(functions):
                rows = slice(number * count, (number + 1) * count)
                part, hook.watch.forward_pass = value[rows], every.of_rows(rows)
                for function in listed:
                    if (returned := function(part, hook=hook)) is not None:
                        refuse_other(
                            returned,
                            part,
                            f"what {label(function)} returned at {hook.name} (step {hook.step})",
                            hook.name,
                        )
                        part, changed = returned, True
                parts.append(part)
        finally:
            hook.watch.forward_pass = every
        if not changed:
            return None
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        return torch.cat([part.expand(-1, *longest) for part in parts])

    return call
