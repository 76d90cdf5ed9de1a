"""Interventions on the residual stream: steer it along a direction, or clamp some of its dimensions.

A *direction* is a vector in the stream, such as the difference between the mean streams of two sets of prompts
(`sinklens.experiments.difference_of_means`). With d the direction, d̂ = d / |d| and h the stream at a position:

    add           h + c · d
    project_out   h − c · (h · d̂) d̂       c = 1 removes the component
    set           h + (c − h · d̂) d̂       the component becomes c

Pitfall: a large coefficient moves the stream to where no text ever puts it. Compare with a random direction of the same
norm.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.runs.intervention import Pairs, RunContext, layer_of, within

if TYPE_CHECKING:
    from sinklens.model import Model

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.direction, Directions) and self.point not in (None, self.direction.point):
            raise SettingError(f"the directions belong to {self.direction.point}; leave out point={self.point!r}.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        layers, directions = self.chosen_layers(model), self._of_layers(model)
        norms = directions.norm(dim=-1, keepdim=True)
        if self.mode != "add" and bool((norms[layers] == 0).any()):
            raise SettingError(f"mode={self.mode!r} needs a direction that is not zero.")

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

    def _of_layers(self, model: "Model") -> Float[Tensor, "layer d_model"]:
        """The direction at each layer."""
        given = self.direction.values if isinstance(self.direction, Directions) else self.direction
        sizes = [model.cfg.n_layers, model.cfg.d_model]
        if list(given.shape) not in (sizes, sizes[1:]):
            raise SettingError(f"direction must have shape {sizes[1:]} or {sizes}; got {list(given.shape)}.")
        return given.detach().float().expand(*sizes)


@dataclass(frozen=True)
class ClampStream(AtPositions):
    """Set or limit dimensions of the residual stream, such as massive activations (2402.17762) and biases.

        ClampStream(3, dims=[17], at=0.0, where="newline")

    Attributes:
        layer: the layer at which the stream is changed.
        dims: dimensions of the stream.
        at: their value, one for all or one for each.
        mode: "set" them to `at`; or "limit" their magnitude to it.
        point: the point of the stream; by default the stream that the layer reads.
        positions, where: positions that are changed.
    """

    within_step: ClassVar[bool] = True
    on_canvas: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads", "layers")
    indexed: ClassVar[tuple[str, ...]] = ("dims",)

    layer: int
    _: KW_ONLY
    dims: Sequence[int]
    at: "float | int | Sequence[float] | Float[Tensor, ' dim']" = 0.0
    mode: Literal["set", "limit"] = "set"
    point: StreamPoint = "hook_resid_pre"

    def __post_init__(self) -> None:
        super().__post_init__()
        values = torch.as_tensor(self.at)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != len(self.dims)):
            raise SettingError(f"at must be one number, or one for each of {len(self.dims)} dims; got {self.at!r}.")
        if self.mode == "limit" and bool((values < 0).any()):
            raise SettingError(f"a limit must not be negative; got at={self.at!r}.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        dims, at = [within("dim", [dim], model.cfg.d_model)[0] for dim in self.dims], torch.as_tensor(self.at)

        def clamped(stream: Float[Tensor, "batch pos d_model"], hook: Point) -> Tensor:
            new, bound = stream.clone(), at.to(stream)
            before = stream[..., dims]
            new[..., dims] = bound.expand_as(before) if self.mode == "set" else before.clamp(-bound, bound)
            return new

        layer = within("layer", [self.layer], model.cfg.n_layers)[0]
        return self.edits(model, run, [f"blocks.{layer}.{self.point}"], clamped)
