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
from sinklens.hooks.weights import AttentionWeights, MlpWeights


class Points(nn.Module):
    """A group of points, one for each row of the table.

    Attributes:
        inside: those whose values are made together, inside a norm or inside the attention function.
    """

    inside: list[Point]

    def __init__(self, specs: Iterable[names.PointSpec], watch: Watch, kind: type[Point] = Point) -> None:
        super().__init__()
        for spec in specs:
            setattr(self, spec.name, kind(watch))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Point: ...

    def any_watched(self) -> bool:
        """Whether a point `inside` is watched now."""
        return any(point.watched for point in self.inside)


class NormPoints(Points):
    """The points of one norm; calling the group applies the norm, as TransformerLens's helpers do."""

    def __init__(self, watch: Watch, norm: nn.Module, parts: names.Parts = names.PLAIN) -> None:
        super().__init__(names.norm_specs(parts), watch)
        self.inside = [self.hook_scale, self.hook_normalized]
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

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The norm of `x`, including its learned weight; hooks on its points are not called."""
        return class_forward(self.__dict__["_norm"], x)


class AttentionPoints(AttentionWeights, Points):
    """The points of one attention layer, and its weights in TransformerLens's shapes.

    Attributes:
        recorded: the points of the column sums that a run records and of the mask.
    """

    recorded: tuple[Point, Point]

    def __init__(self, watch: Watch, layer: nn.Module, architecture: Architecture, parts: names.Parts) -> None:
        inputs = {spec.name.removesuffix("_input"): spec for spec in names.SPLIT_INPUTS}
        rows = names.attention_specs(parts)
        ordered = [row for spec in rows for row in (inputs.get(spec.name), spec) if row is not None]
        super().__init__([names.ATTN_IN, *ordered], watch)
        attn: Any = layer.get_submodule(architecture.attn)
        projections = {letter: projection(attn, architecture, letter) for letter in "qkvo"}
        self.__dict__["_projections"] = projections, attn.head_dim  # not submodules: the layer owns them
        paths = {"q": architecture.q_norm, "k": architecture.k_norm} if parts.qk_norm else {}
        norms = {letter: attn.get_submodule(path) for letter, path in paths.items()}
        self.__dict__["_norms"] = {
            letter: (norm, float(getattr(norm, architecture.eps))) for letter, norm in norms.items()
        }
        projected = {"hook_q", "hook_k", "hook_v", "hook_result"}  # tapped at the projections, not in the function
        outside = {spec.name for spec in (*names.QK_NORM.values(), *names.SPLIT_INPUTS)} | projected
        inside = [spec.name for spec in rows if spec.name not in outside | {"hook_fresh"}]  # it is known before
        self.inside = [getattr(self, name) for name in inside]
        watch.masks.append(self.hook_attn_mask)
        # each attention call needs these two, and nn.Module looks its own up slowly
        self.__dict__["recorded"] = self.hook_sink_scores, self.hook_attn_mask


class MlpPoints(MlpWeights, Points):
    """The points of one MLP and of any experts in it or beside it, and its weights in TransformerLens's shapes."""

    def __init__(self, watch: Watch, layer: nn.Module, architecture: Architecture, parts: names.Parts) -> None:
        super().__init__(names.mlp_specs(parts), watch)
        mlp = layer.get_submodule(architecture.mlp)
        paths = {part: getattr(architecture, part) for part in ("gate", "up", "down") if parts.dense}
        self.__dict__["_projections"] = {part: mlp.get_submodule(path) for part, path in paths.items() if path}
        self.__dict__["_norm"] = layer.get_submodule(architecture.ln2)  # not submodules: the layer owns them


class Block(nn.Module):
    """The points of one layer, in the order the forward pass reaches them.

    Attributes:
        parts: the parts of the layer, which decide which points it has.
    """

    hook_out_is_single_residual_stream = True  # TransformerLens's logit lens reads this attribute

    def __init__(self, watch: Watch, layer: nn.Module, architecture: Architecture) -> None:
        super().__init__()
        self.parts = parts = parts_of(layer, architecture)
        groups: dict[str, Points] = {
            "adaln": Points(names.MODULATION, watch),
            "attn": AttentionPoints(watch, layer, architecture, parts),
            "mlp": MlpPoints(watch, layer, architecture, parts),
        }
        for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
            if path := getattr(architecture, name):
                of_norm = names.PLAIN if name.endswith("_post") else parts
                groups[name] = NormPoints(watch, layer.get_submodule(path), of_norm)
        for name in dict.fromkeys(path.partition(".")[0] for path, _ in names.block_specs(parts)):
            if name == "ln2":
                self.hook_mlp_in = Point(watch)
            setattr(self, name, groups[name] if name in groups else Point(watch))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


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
    of_keys = letter == "v" and architecture.values and not _has(attn, architecture.v)
    return attn.get_submodule(architecture.k if of_keys else getattr(architecture, letter))


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
        self.blocks = nn.ModuleList(Block(watch, layer, architecture) for layer in layers)
        self.ln_final = NormPoints(watch, base.get_submodule(architecture.norm))
