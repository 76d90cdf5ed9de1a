"""Groups of hook points: one each for a norm, an attention layer, an MLP and a block.

A group is a module whose children are points, named as in names.py. It also exposes the weights of its layer under
TransformerLens's names; the layer owns them.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn

from sinklens.hooks import names
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.offload import class_forward, value_of, weight_of
from sinklens.hooks.points import Point, Watch
from sinklens.hooks.weights import AttentionWeights, ExpertWeights, MlpWeights

PROJECTIONS = ("gate", "up", "down")


class Points(nn.Module):
    """A group of points, one for each row of the table."""

    def __init__(self, specs: Iterable[names.PointSpec], watch: Watch, kind: type[Point] = Point) -> None:
        super().__init__()
        for spec in specs:
            setattr(self, spec.name, kind(watch))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Point: ...

    def any_watched(self) -> bool:
        """Whether any of the points is watched now."""
        return any(point.watched for point in self._modules.values())  # type: ignore[union-attr]


class NormPoints(Points):
    """The points of one norm; calling the group applies the norm, as TransformerLens's helpers do."""

    def __init__(self, watch: Watch, norm: nn.Module, parts: names.Parts = names.PLAIN) -> None:
        super().__init__(names.norm_specs(parts), watch)
        self.__dict__["_norm"] = norm  # not a submodule: the layer owns the norm

    @property
    def w(self) -> Float[Tensor, " d_model"]:
        """Learned weight of the norm."""
        return weight_of(self.__dict__["_norm"])

    @property
    def b(self) -> Float[Tensor, " d_model"] | None:
        """Learned bias of the norm; None if it has none."""
        norm = self.__dict__["_norm"]
        return value_of(norm, "bias") if hasattr(norm, "bias") else None

    def any_watched(self) -> bool:
        """Whether a point inside the norm is watched."""
        return self.hook_scale.watched or self.hook_normalized.watched

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The norm of `x`, including its learned weight; hooks on its points are not called."""
        return class_forward(self.__dict__["_norm"], x)


class AttentionPoints(AttentionWeights, Points):
    """The points of one attention layer, and its weights in TransformerLens's shapes."""

    def __init__(
        self,
        watch: Watch,
        projections: dict[str, nn.Module],
        norms: dict[str, tuple[nn.Module, float]],
        d_head: int,
        parts: names.Parts,
    ) -> None:
        inputs = {spec.name.removesuffix("_input"): spec for spec in names.SPLIT_INPUTS}
        rows = names.attention_specs(parts)
        ordered = [row for spec in rows for row in (inputs.get(spec.name), spec) if row is not None]
        super().__init__([names.ATTN_IN, *ordered], watch)
        self.__dict__["_projections"] = (projections, d_head)  # not submodules: the layer owns them
        self.__dict__["_norms"] = norms
        outside = {"hook_q", "hook_k", "hook_v", "hook_result", names.ATTN_IN.name}  # tapped at the projections
        outside.add("hook_fresh")  # known before attention begins
        outside |= {spec.name for spec in names.QK_NORM.values()}
        inside = [spec for spec in ordered if spec.name not in outside and spec not in names.SPLIT_INPUTS]
        self.__dict__["_inside"] = [getattr(self, spec.name) for spec in inside]

    def any_watched(self) -> bool:
        """Whether a point inside the attention function is watched."""
        return any(point.watched for point in self.__dict__["_inside"])


class MlpPoints(MlpWeights, Points):
    """The points of one dense MLP, with those of any experts beside it, and its weights in TransformerLens's shapes."""

    def __init__(self, watch: Watch, projections: dict[str, nn.Module], parts: names.Parts) -> None:
        super().__init__(names.mlp_specs(parts), watch)
        self.__dict__["_projections"] = projections


class ExpertPoints(ExpertWeights, Points):
    """The points of one mixture of experts."""

    def __init__(self, watch: Watch, parts: names.Parts, layer: int, norm: nn.Module) -> None:
        super().__init__(names.mlp_specs(parts), watch)
        self.__dict__["_place"] = layer, norm  # not a submodule: the layer owns it


class Block(nn.Module):
    """The points of one layer, in the order the forward pass reaches them.

    Attributes:
        parts: the parts of the layer, which decide which points it has.
    """

    hook_out_is_single_residual_stream = True  # TransformerLens's logit lens reads this attribute

    def __init__(self, watch: Watch, layer: nn.Module, architecture: Architecture, number: int) -> None:
        super().__init__()
        self.parts = parts_of(layer, architecture)
        attn: Any = layer.get_submodule(architecture.attn)
        self.hook_resid_pre = Point(watch)
        if self.parts.modulated:
            self.adaln = Points(names.MODULATION, watch)
        self.ln1 = NormPoints(watch, layer.get_submodule(architecture.ln1), self.parts)
        projections = {letter: projection(attn, architecture, letter) for letter in ("q", "k", "v", "o")}
        paths = {"q": architecture.q_norm, "k": architecture.k_norm} if self.parts.qk_norm else {}
        modules = {letter: attn.get_submodule(path) for letter, path in paths.items()}
        norms = {letter: (norm, float(getattr(norm, architecture.eps))) for letter, norm in modules.items()}
        self.attn = AttentionPoints(watch, projections, norms, attn.head_dim, self.parts)
        if architecture.ln1_post:
            self.ln1_post = NormPoints(watch, layer.get_submodule(architecture.ln1_post))
        if self.parts.modulated:
            self.hook_attn_ungated = Point(watch)
        self.hook_attn_out = Point(watch)
        self.hook_resid_mid = Point(watch)
        self.hook_mlp_in = Point(watch)
        self.ln2 = NormPoints(watch, layer.get_submodule(architecture.ln2), self.parts)
        self.mlp = self._mlp(watch, layer, architecture, number)
        if architecture.ln2_post:
            self.ln2_post = NormPoints(watch, layer.get_submodule(architecture.ln2_post))
        if self.parts.modulated:
            self.hook_mlp_ungated = Point(watch)
        self.hook_mlp_out = Point(watch)
        self.hook_resid_post = Point(watch)

    def _mlp(self, watch: Watch, layer: nn.Module, architecture: Architecture, number: int) -> Points:
        if self.parts.experts and not self.parts.dense:
            return ExpertPoints(watch, self.parts, number, layer.get_submodule(architecture.ln2))
        mlp, paths = layer.get_submodule(architecture.mlp), {part: getattr(architecture, part) for part in PROJECTIONS}
        projections = {part: mlp.get_submodule(path) for part, path in paths.items() if path}
        return MlpPoints(watch, projections, self.parts)


def parts_of(layer: nn.Module, architecture: Architecture) -> names.Parts:
    """The parts that a layer has, of those that its architecture can have."""
    experts = architecture.experts
    beside = experts is not None and experts.branch is not None
    mixed = experts is not None and _has(layer, experts.experts if beside else f"{architecture.mlp}.{experts.experts}")
    shared = experts.shared if mixed and experts is not None else None
    return names.Parts(
        qk_norm=bool(architecture.q_norm) and _has(layer, f"{architecture.attn}.{architecture.q_norm}"),
        qk_norm_last=architecture.qk_norm_last,
        dense=beside or not mixed,
        experts=mixed,
        shared=beside or (bool(shared) and _has(layer, f"{architecture.mlp}.{shared}")),
        post_norms=bool(architecture.ln1_post),
        gated=bool(architecture.gate),
        modulated=bool(architecture.modulation),
        positions=bool(architecture.positions),
    )


def projection(attn: nn.Module, architecture: Architecture, letter: str) -> nn.Module:
    """A projection of an attention layer; that of the keys where values are made from it."""
    path = getattr(architecture, letter)
    if letter == "v" and architecture.values and not _has(attn, path):
        path = architecture.k
    return attn.get_submodule(path)


def _has(layer: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in layer.named_modules())


class EncoderPoints(nn.Module):
    """The points of an encoder: those of the tree outside the sampler.

    Attributes:
        hook_embed, blocks, ln_final: the points.
    """

    def __init__(self, watch: Watch, base: nn.Module, architecture: Architecture) -> None:
        super().__init__()
        self.hook_embed = Point(watch)
        layers: Any = base.get_submodule(architecture.layers)
        self.blocks = nn.ModuleList(Block(watch, layer, architecture, number) for number, layer in enumerate(layers))
        self.ln_final = NormPoints(watch, base.get_submodule(architecture.norm))
