"""What a run records about its sinks, and where.

Pitfall: patterns of many steps and layers stay in memory, [batch, head, query, key] each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from sinklens.errors import SettingError, nearest, require
from sinklens.sinks.quantities import BY_NAME, Quantity, Scores
from sinklens.sinks.steps import CANVASES, OF_RUN, refuse_existing
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Words, check_arguments, plainly_shown

StepLayer = tuple[int, int]


@plainly_shown
@dataclass(frozen=True)
class Record:
    """What a run records: ``sinklens.trace(..., record_sinks=Record(["values"], out="run.zarr"))``.

    Attributes:
        quantities: recorded in addition to the scores: "values" (norms), "stream" (residual peaks), "outputs" (stable
            rank of head outputs), or custom `Quantity` objects.
        patterns: (step, layer) pairs whose full attention patterns are kept in ``run.patterns``; negative numbers count
            from the end. Under a cache policy, rows of queries that the step did not compute are NaN.
        out: a Zarr store (a folder, ``*.zarr``) that the run appends to step by step, so that memory does not grow with
            the number of steps; a killed run leaves the steps it completed. None keeps the track in memory.
        queries: a boolean array [batch, step, pos]; the scores of a step sum over these queries only. None for all. For
            the queries of a run under a cache policy, pass ``run.sinks["fresh"].any("layer")``. The track then holds
            these queries as ``computed``, and units divide by their number. Hooks that read ``hook_sink_scores`` get
            these sums, too. For bidirectional models, without a cache policy.
        reduce: a function that gets the steps, a few at a time, as a `SinkTrack`; the run then keeps neither a track
            nor `chosen`, and its memory does not grow with the number of steps. Not with `out`.

    Raises:
        SettingError: an unknown quantity, two quantities of one name or variable, patterns that are not (step,
            layer) pairs, queries that are not a boolean array, or an `out` that is not a new ``*.zarr`` folder.
    """

    quantities: Sequence[str | Quantity] = ()
    patterns: Annotated[Sequence[StepLayer], Words("a list of (step, layer) pairs, [(3, 1), …]")] = ()
    out: str | Path | None = None
    queries: Any = None
    reduce: "Callable[[SinkTrack], None] | None" = None

    def __post_init__(self) -> None:
        check_arguments(self)
        for quantity in self.quantities:
            if not isinstance(quantity, Quantity) and quantity not in BY_NAME:
                raise SettingError(
                    f"unknown quantity {quantity!r}; known: {', '.join(BY_NAME)}.{nearest(str(quantity), BY_NAME)}"
                )
        chosen = self.chosen()
        for what, names in (
            ("have the name", [part.name for part in chosen]),
            (
                "fill the variable",
                [*CANVASES, *OF_RUN, *(name for part in chosen for name in part.variables)],
            ),
        ):
            if duplicates := sorted({name for name in names if names.count(name) > 1}):
                raise SettingError(f"two quantities of the track {what} {duplicates[0]!r}; rename one of them.")
        shape, kind = np.shape(self.queries), getattr(self.queries, "dtype", None)
        require(
            self.queries is None or (len(shape) == 3 and kind in (np.dtype(bool), torch.bool)),
            f"queries must be a boolean array [batch, step, pos]; got {list(shape)} of {kind}.",
        )
        require(
            self.reduce is None or (self.out is None and callable(self.reduce)),
            f"reduce must be a function, without out=; got {self.reduce!r} and out={self.out!r}.",
        )
        require(
            self.out is None or Path(self.out).suffix == ".zarr",
            f"a run appends to a Zarr store; {str(self.out)!r} does not end in .zarr. For a single file, call "
            f"run.sinks.save('sinks.nc') after the run.",
        )
        if self.out is not None:
            refuse_existing(self.out)

    def chosen(self) -> list[Quantity]:
        """The scores, then the requested quantities, without duplicates."""
        requested = [part if isinstance(part, Quantity) else BY_NAME[part]() for part in self.quantities]
        return list({(part.name, type(part)): part for part in [Scores(), *requested]}.values())
