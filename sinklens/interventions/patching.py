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

import torch
from jaxtyping import Float
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
        basis: vectors that span a subspace, which need not be orthonormal: only the part inside it is replaced; see
            `PatchSubspace`. None replaces all of a value.

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
    basis: "Float[Tensor, 'rank d'] | None" = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count = 0 if self.positions is None else len(whole_numbers("position", self.positions))
        if self.source_positions is not None and len(self.source_positions) != count:
            raise SettingError(
                f"source_positions and positions must have the same length; got {len(self.source_positions)} and "
                f"{count}."
            )
        PatchSource(self.source, self.shift)  # checks them
        basis = self.basis
        if basis is None:
            return
        if basis.ndim != 2 or not len(basis) or int(torch.linalg.matrix_rank(basis)) < len(basis):
            raise SettingError(
                f"basis must be linearly independent vectors [rank, d], at least one; got shape {list(basis.shape)}."
            )

    def acting_steps(self, steps: int) -> list[int]:
        return PatchSource(self.source, self.shift).steps if self.steps is None else super().acting_steps(steps)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        source = PatchSource(self.source, self.shift)
        points = chosen_points(source.points if self.names is None else self.names, model, self.layers)
        steps = source.steps_of(run, self.steps, points)
        span = None if self.basis is None else torch.linalg.qr(self.basis.detach().float().T).Q  # [d, rank]
        target = PatchTarget(self, self.source_positions, points, steps, model, run)

        def patch(value: Tensor, hook: Point) -> Tensor | None:
            changed, before = None, value
            for part in target.parts(value, hook):
                new = source.read(part, part.of(value), hook, run)
                changed = value = target.write(value, part, new)
            return changed if span is None or changed is None else _inside(span, before, changed, hook)

        return target.places.around([(name, patch) for name in points])


def PatchSubspace(*, names: Sequence[str] | Any, basis: Float[Tensor, "rank d"], **patch: Any) -> PatchHooks:
    """Patch a subspace: of the value at a point, only the part inside a few directions comes from another run.

    With B the orthonormal basis [rank, d] of the subspace, h the value here and v that of the source,

        h + (v − h) Bᵀ B

    so what is orthogonal to the subspace stays (interchange interventions in a subspace: Geiger et al., 2303.02536).

        kept = Activations(names=[point])
        generate(model, other, hooks=kept)
        generate(model, prompt, hooks=PatchSubspace(source=kept.caches, names=[point], basis=direction[None]))

    Pitfall: a large effect of a subspace does not mean that the model uses it in its own runs. A direction that nothing
    varies along can be joined with one that nothing reads, and the two together carry an effect that neither has
    (Makelov et al., 2311.17030). Compare with a random subspace of the same rank, and with the complete patch.

    Args:
        names: points with a vector at each position, of the size of those of `basis`; heads are flattened.
        basis: vectors that span the subspace; they need not be orthonormal.
        **patch: ``source=`` and all else, as in `PatchHooks`.

    Raises:
        SettingError: no vector, one of another size than the values, or vectors that are linearly dependent.
    """
    return PatchHooks(names=names, basis=basis, **patch)


def _inside(span: Float[Tensor, "d rank"], before: Tensor, changed: Tensor, hook: Point) -> Tensor:
    """`before` with the part of the change that lies in a subspace."""
    here, along = before.flatten(2).float(), span.to(before.device)
    if here.shape[-1] != len(span):
        raise SettingError(
            f"basis has vectors of size {len(span)}, and the values at {hook.name} have size {here.shape[-1]}."
        )
    moved = (changed.flatten(2).float() - here) @ along @ along.T
    return (here + moved).to(before.dtype).view_as(before)
