"""Steer the residual stream along a direction.

A *direction* is a vector in the stream, such as the difference between the mean streams of two sets of prompts
(`sinklens.experiments.difference_of_means`). With d the direction, d̂ = d / |d| and h the stream at a position:

    add           h + c · d
    project_out   h − c · (h · d̂) d̂       c = 1 removes the component
    set           h + (c − h · d̂) d̂       the component becomes c

Pitfall: a large coefficient moves the stream to where no text ever puts it. Compare with a random direction of the same
norm.
"""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, layer_of

StreamPoint = Literal["hook_resid_pre", "hook_resid_mid", "hook_resid_post"]
SteerMode = Literal["add", "project_out", "set"]


@dataclass(frozen=True)
class Directions:
    """One direction of the residual stream per layer.

    Attributes:
        values: the direction at each layer of the model; not normalized.
        point: the point of the stream that they belong to.
        counts: how many positions each of the two means covers.
    """

    values: Float[Tensor, "layer d_model"]
    point: StreamPoint
    counts: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Steer(AtPositions):
    """Move the residual stream along a direction at chosen positions and steps.

        Steer(direction, 4.0, layers=[2], where="masked", steps=range(8))

    Attributes:
        direction: one vector for all layers, one per layer of the model, or `Directions`.
        coefficient: c in the formulas of the module; for "add" in units of the direction, for "set" of the stream.
        mode: "add", "project_out" or "set".
        point: the point of the stream; by default that of `Directions`, or else the stream that the layer reads.
        layers: layers at which the stream is changed.
        positions, where: positions that are changed, e.g. "prompt", "masked" or "committed".
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads",)

    direction: "Float[Tensor, '*layer d_model'] | Directions"
    coefficient: float | int = 1.0
    _: KW_ONLY
    mode: SteerMode = "add"
    point: StreamPoint | None = None

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        given = self.direction.values if isinstance(self.direction, Directions) else self.direction
        sizes = [model.cfg.n_layers, model.cfg.d_model]
        require(
            list(given.shape) in (sizes, sizes[1:]),
            f"direction must be a tensor of shape {sizes[1:]} or {sizes}; got {list(given.shape)}.",
        )
        layers, directions = self.chosen_layers(model), given.detach().float().expand(*sizes)
        norms = directions.norm(dim=-1, keepdim=True)
        require(
            self.mode == "add" or not bool((norms[layers] == 0).any()),
            f"mode={self.mode!r} needs a direction that is not zero.",
        )

        def steered(stream: Float[Tensor, "batch pos d_model"], hook: Point) -> Tensor:
            h, c = stream.float(), float(self.coefficient)
            along = directions[layer_of(hook)].to(h)
            if self.mode == "add":
                return h + c * along
            unit = along / along.norm()
            component = (h @ unit)[..., None]
            return h - c * component * unit if self.mode == "project_out" else h + (c - component) * unit

        usual = self.direction.point if isinstance(self.direction, Directions) else "hook_resid_pre"
        return self.edits(model, run, self.point or usual, steered)
