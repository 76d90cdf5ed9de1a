"""Connects the points of a tree to the modules of its transformers model.

transformers' forward code does the computation. A *tap* is a PyTorch hook on one of its modules that passes the value
through a point while the point is watched; it is installed while the point is armed (points.py). Two places need more.
A block with an armed point runs a rewritten forward, because ``hook_resid_mid`` must reach both the residual sum and
the norm. A norm is recomputed from its input while its scale or normalized stream is watched; the result differs by
rounding, and is used only if a hook changed a value or gradients are recorded.

Pitfall: other libraries set a `forward` on the instance of a layer, which hides the forward of the class. accelerate
wraps the forward that it finds and keeps it in ``_old_forward``; nnsight's controller keeps the forward of the class.
The rewritten forward is therefore defined on a subclass and replaces the original in both. A layer with any other
`forward` on its instance keeps running that one and does not reach these points; the self-check refuses such a model.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sinklens.hooks import modulation
from sinklens.hooks.architectures import Architecture, Experts
from sinklens.hooks.attention import attention
from sinklens.hooks.experts import ExpertTaps
from sinklens.hooks.interleaving import replace_body
from sinklens.hooks.modulation import BLOCK
from sinklens.hooks.offload import form_of, value_of, weight_of
from sinklens.hooks.points import Point, Tap, at, read_at

if TYPE_CHECKING:
    from sinklens.hooks.groups import AttentionPoints, Block, EncoderPoints, NormPoints, Points


def connect(
    undo: ExitStack,
    base: nn.Module,
    architecture: Architecture,
    embed: Point,
    ln_final: "NormPoints",
    blocks: Iterable["Block"],
) -> None:
    """Install all taps on `base`, a stack of layers; called once, when its tree of points is built.

    Args:
        undo: removes the taps when it is closed.
    """
    tap_output(undo, base.get_submodule(architecture.embed), embed)
    _tap_norm(undo, base.get_submodule(architecture.norm), ln_final, architecture)
    layers: Any = base.get_submodule(architecture.layers)
    for layer, block in zip(layers, blocks, strict=True):
        _connect_layer(layer, block, architecture, undo)


def connect_encoder(
    undo: ExitStack, hf: nn.Module, architecture: Architecture, points: "EncoderPoints", sampler: "Points"
) -> None:
    """Install the taps of an encoder, and that of the self-conditioning signal that enters the canvas."""
    base = hf.get_submodule(architecture.encoder)
    connect(undo, base, architecture, points.hook_embed, points.ln_final, points.blocks)  # type: ignore[arg-type]
    mixer = hf.get_submodule(f"{architecture.base}.{architecture.self_conditioning}")
    point = sampler.hook_self_conditioning
    Tap(undo, [point], lambda: mixer.register_forward_pre_hook(lambda _, given: (given[0], at(point, given[1]))).remove)


def connect_time(undo: ExitStack, base: nn.Module, architecture: Architecture, tree: Any) -> None:
    """Install the taps of the noise level and of the last modulation of a network that is conditioned on it."""
    embedding = base.get_submodule(architecture.time)
    _tap_input(undo, embedding, tree.hook_time)
    tap_output(undo, embedding, tree.hook_cond)
    points, made = (tree.hook_final_shift, tree.hook_final_scale), base.get_submodule(architecture.modulation)
    Tap(undo, points, lambda: made.register_forward_hook(lambda _, __, output: modulation.shown(points, output)).remove)
    tap_output(undo, base.get_submodule(architecture.modulate), tree.ln_final.hook_modulated)


def _connect_layer(layer: nn.Module, block: "Block", architecture: Architecture, undo: ExitStack) -> None:
    attn: Any = layer.get_submodule(architecture.attn)
    for name in ("ln1", "ln1_post", "ln2", "ln2_post"):
        if path := getattr(architecture, name):
            _tap_norm(undo, layer.get_submodule(path), getattr(block, name), architecture)
    for name in "qk" if architecture.values else "qkv":
        _tap_heads(
            undo, attn.get_submodule(getattr(architecture, name)), getattr(block.attn, f"hook_{name}"), attn.head_dim
        )
    if architecture.values:
        tap_output(undo, attn.get_submodule(architecture.values), block.attn.hook_v)
    for name in "qk" if block.parts.qk_norm else "":
        tap_output(
            undo, attn.get_submodule(getattr(architecture, f"{name}_norm")), getattr(block.attn, f"hook_{name}_normed")
        )
    undo.callback(_placed(attn, attention.TAPPED, True))
    Tap(undo, [*block.attn.inside, block.attn.hook_fresh], lambda: _placed(attn, attention.POINTS, block.attn))
    tap_heads_output = modulation.tap_mixed if architecture.modulation else _tap_result
    tap_heads_output(undo, attn.get_submodule(architecture.o), block.attn)
    _connect_mlp(layer, block, architecture, undo)
    _replace_forward(layer, block, architecture, undo)


def _connect_mlp(layer: nn.Module, block: "Block", architecture: Architecture, undo: ExitStack) -> None:
    mlp, experts = layer.get_submodule(architecture.mlp), architecture.experts
    if block.parts.experts:
        assert experts is not None
        ExpertTaps(layer if experts.branch else mlp, block.mlp, experts, undo)
        if experts.shared and block.parts.shared:
            tap_output(undo, mlp.get_submodule(experts.shared), block.mlp.hook_shared_out)
    if block.parts.dense:
        if architecture.gate:
            tap_output(undo, mlp.get_submodule(architecture.up), block.mlp.hook_pre_linear)
        tap_output(undo, mlp.get_submodule(architecture.gate or architecture.up), block.mlp.hook_pre)
        _tap_input(undo, mlp.get_submodule(architecture.down), block.mlp.hook_post)


def _replace_forward(layer: nn.Module, block: "Block", architecture: Architecture, undo: ExitStack) -> None:
    """Make `layer` run the forward with points, also inside accelerate's and nnsight's wrappers."""
    cls: Any = type(layer)
    with_points = modulation.block_forward if architecture.modulation else _block_forward

    def forward(self: nn.Module, *given: Any, **kwargs: Any) -> Any:
        return (with_points if BLOCK in self.__dict__ else cls.forward)(self, *given, **kwargs)

    arguments = list(signature(cls.forward).parameters)[2:]  # after the layer itself and the stream
    Tap(undo, _of_forward(block, architecture), lambda: _placed(layer, BLOCK, (block, architecture, arguments)))
    layer.__class__ = type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
    undo.callback(setattr, layer, "__class__", cls)
    undo.callback(replace_body(layer, cls.forward, forward))
    wrapped = layer.__dict__.get("_old_forward")
    if getattr(wrapped, "__func__", None) is cls.forward:
        layer.__dict__["_old_forward"] = MethodType(forward, layer)
        undo.callback(layer.__dict__.__setitem__, "_old_forward", wrapped)


def _placed(module: nn.Module, key: str, value: Any) -> Callable[[], Any]:
    """Put `value` where forward code of `module` looks for it; returns what takes it away."""
    module.__dict__[key] = value
    return lambda: module.__dict__.pop(key)


def _of_forward(block: "Block", architecture: Architecture) -> list[Point]:
    """The points that a block's rewritten forward calls; with modulation it also serves those of its parts."""
    if architecture.modulation:
        return [point for point in block.modules() if isinstance(point, Point)]
    branch = architecture.experts is not None and architecture.experts.branch is not None
    own = [point for point in block.children() if isinstance(point, Point)]
    return [*own, block.mlp.hook_shared_out] if branch else own


def _block_forward(self: nn.Module, hidden_states: Tensor, *given: Any, **kwargs: Any) -> Tensor:
    """Forward of a pre-norm block, with its residual points."""
    block, architecture, arguments = self.__dict__[BLOCK]
    kwargs |= dict(zip(arguments, given, strict=False))
    ln1, attn = self.get_submodule(architecture.ln1), self.get_submodule(architecture.attn)
    ln2, mlp = self.get_submodule(architecture.ln2), self.get_submodule(architecture.mlp)
    resid_pre = at(block.hook_resid_pre, hidden_states)
    attn_out, _ = attn(hidden_states=ln1(resid_pre), **kwargs)
    if architecture.ln1_post:
        attn_out = self.get_submodule(architecture.ln1_post)(attn_out)
    resid_mid = at(block.hook_resid_mid, resid_pre + at(block.hook_attn_out, attn_out))
    mlp_out = mlp(ln2(resid_mid))
    if architecture.experts is not None and architecture.experts.branch is not None:
        mlp_out = _with_experts(self, block, architecture.experts, resid_mid, mlp_out)
    if architecture.ln2_post:
        mlp_out = self.get_submodule(architecture.ln2_post)(mlp_out)
    resid_post = resid_mid + at(block.hook_mlp_out, mlp_out)
    if architecture.scalar:
        resid_post = resid_post * value_of(self, architecture.scalar)
    return at(block.hook_resid_post, resid_post)


def _with_experts(layer: nn.Module, block: "Block", experts: Experts, stream: Tensor, dense: Tensor) -> Tensor:
    """The normalized output of a dense MLP plus that of the experts beside it, which read the same stream."""
    branch = experts.branch
    assert branch is not None
    tokens = stream.flatten(0, 1)
    _, weights, indices = layer.get_submodule(experts.router)(tokens)
    mixed = layer.get_submodule(experts.experts)(layer.get_submodule(branch.norm)(tokens), indices, weights)
    mixed = layer.get_submodule(branch.experts_post)(mixed.view_as(stream))
    return at(block.mlp.hook_shared_out, layer.get_submodule(branch.dense_post)(dense)) + mixed


def tap_output(undo: ExitStack, module: nn.Module, point: Point) -> None:
    """Pass the output of a module through `point` while it is watched."""
    Tap(undo, [point], lambda: module.register_forward_hook(lambda _, __, output: at(point, output)).remove)


def _tap_input(undo: ExitStack, module: nn.Module, point: Point) -> None:
    Tap(undo, [point], lambda: module.register_forward_pre_hook(lambda _, given: (at(point, given[0]),)).remove)


def _tap_heads(undo: ExitStack, module: nn.Module, point: Point, d_head: int) -> None:
    """Tap a projection; the point sees its output split into heads, and those of a `WindowCache` with them."""
    letter = (point.name or "")[-1]

    def tap(_module: nn.Module, _inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        cache = point.watch.cache if letter in "kv" else None
        if cache is None and not point.watched:
            return None
        heads = output.view(*output.shape[:-1], -1, d_head)
        if cache is None:
            return point(heads).reshape(output.shape)
        return cache.project(letter, point.layer(), heads, point).reshape(output.shape)

    Tap(undo, [point], lambda: module.register_forward_hook(tap).remove)


def _tap_norm(undo: ExitStack, norm: Any, points: "NormPoints", architecture: Architecture) -> None:
    """Tap a norm: weight · x / sqrt(mean(x²) + eps) + bias, of x minus its mean if the architecture centers it."""

    def tap(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not points.any_watched():
            return None
        x = inputs[0].float()
        if architecture.centered:
            x = x - x.mean(-1, keepdim=True)
        scale, scale_read = read_at(
            points.hook_scale, (x.pow(2).mean(-1, keepdim=True) + getattr(norm, architecture.eps)).sqrt()
        )
        normalized, normalized_read = read_at(points.hook_normalized, (x / scale).to(output.dtype))
        if scale_read and normalized_read:
            return None
        scaled = weight_of(norm) * normalized
        return scaled if points.b is None else scaled + points.b

    Tap(undo, points.inside, lambda: norm.register_forward_hook(tap).remove)


def _tap_result(undo: ExitStack, output_projection: nn.Module, points: "AttentionPoints") -> None:
    """Tap the output projection; the point sees the output of each head, as added to the stream.

    A quantized projection may round its inputs too, so the heads' outputs need not add up to its own: it keeps its own,
    and an edit adds what it changes.
    """

    def tap(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        if not points.hook_result.watched:
            return None
        result = points.head_results(inputs[0])
        before = None if form_of(module) is None else result.sum(dim=-2)
        shown, only_read = read_at(points.hook_result, result)
        if only_read:
            return None
        summed = shown.sum(dim=-2)
        if before is not None:
            return output + (summed - before)
        bias = value_of(module, "bias")
        return summed if bias is None else summed + bias

    Tap(undo, [points.hook_result], lambda: output_projection.register_forward_hook(tap, prepend=True).remove)
