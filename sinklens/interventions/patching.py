"""Keep values of one run and patch them into another.

`Activations` keeps the values of points at chosen steps, as one TransformerLens `ActivationCache` per step.
`PatchHooks` puts them into another run: clean into corrupted or vice versa, by step, layer, head and position. It reads
them from a `PatchSource` and writes them to a `PatchTarget`, which chooses the places.

Limitation: prompts of different lengths have different positions. Patching between them needs ``positions=`` and
``source_positions=`` that state which position corresponds to which; a guess would put values at unrelated positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.patch_source import PatchSource
from sinklens.interventions.patch_target import PatchTarget
from sinklens.interventions.places import AtPositions
from sinklens.runs.caches import StepCaches, chosen_points
from sinklens.runs.intervention import (
    Pairs,
    Reader,
    RunContext,
    whole_numbers,
)

if TYPE_CHECKING:
    from transformer_lens import ActivationCache

    from sinklens.model import Model


@dataclass(kw_only=True, eq=False)
class Activations(Reader):
    """Keeps values of a run and changes none: ``kept = Activations(names=[...]); generate(..., hooks=[kept])``.

    List it last to see the edits of other hooks. After the run ``kept.caches[step]`` is an `ActivationCache`; a second
    run replaces it. In a single pass everything is kept as step 0.

    Attributes:
        names: points, in any accepted spelling, or a predicate on names; `layers` restricts those inside a block.
        caches: the values kept from the last run.
    """

    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads", "positions")

    names: Sequence[str] | Any
    caches: Mapping[int, "ActivationCache"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        in_step = self.step_test(run)
        kept = StepCaches(model.tree)
        self.caches = kept  # a new one: the old one may be the source of a patch in this run

        def keep(value: Tensor, hook: Point) -> None:
            if in_step(hook.step):
                kept.keep(value, hook)

        return [(name, keep) for name in chosen_points(self.names, model, self.layers)]


@dataclass(frozen=True, kw_only=True)
class PatchHooks(AtPositions):
    """Patch the values of another run into this one.

    In an autoregressive run the values of a step are those of the queries that belong to it, with or without a
    key/value cache; keys and masks are those of the pass. With cached blocks (``use_cache`` of a block sampler), the
    pass of a batch begins at the earliest current block of its rows; to make changes independent of the batch, restrict
    them with `positions` or `where`, such as "masked".

    Attributes:
        source: step -> point -> value: ``activations.caches``, ``t.cache(...)``, or any such mapping. One row, or as
            many as this run has. If values cover all columns and a pass computes only some, the pass takes those.
        names: points to patch; by default all that `source` holds, except the read-only ones (`READ_ONLY`).
        shift: the value at step t comes from step t + shift of the source.
        steps: steps of this run; by default those for which `source` holds values (step t + shift). Without a shift,
            this run must have all of them.
        heads: heads to patch at points with a head axis (key/value heads where the point has those).
        positions: positions to patch (queries, for scores and patterns; keys, for the additive mask); every row must
            have them.
        where: positions to patch that may differ by row, step, layer and head; see `AtPositions`. A key/value head has
            those of any of its heads; a point without a head axis, those of any head of its layer.
        source_positions: columns of the source's values to take, one for each of `positions`. By default the same
            columns, or if the source has another length, those with the numbers in `positions`.

    Raises:
        SettingError: a step or point that `source` does not hold; a step of `source` that the run does not have;
            lengths that differ without `positions`.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True

    source: Mapping[int, Any]
    names: Sequence[str] | Any | None = None
    shift: int = 0
    source_positions: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count = 0 if self.positions is None else len(whole_numbers("position", self.positions))
        if self.source_positions is not None and len(self.source_positions) != count:
            raise SettingError(
                f"source_positions and positions must have the same length; got {len(self.source_positions)} and "
                f"{count}."
            )
        PatchSource(self.source, self.shift)  # checks them

    def acting_steps(self, steps: int) -> list[int]:
        """See `Intervention.acting_steps`."""
        return PatchSource(self.source, self.shift).steps if self.steps is None else super().acting_steps(steps)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        source = PatchSource(self.source, self.shift)
        steps = source.steps_of(run, self.steps)
        points = chosen_points(source.points if self.names is None else self.names, model, self.layers)
        source.require(points, steps)
        target = PatchTarget(self, self.source_positions, points, steps, model, run)

        def patch(value: Tensor, hook: Point) -> Tensor | None:
            changed = None
            for part in target.parts(value, hook):
                new = source.read(part, part.of(value), hook, run)
                changed = value = target.write(value, part, new)
            return changed

        return target.around([(name, patch) for name in points])
