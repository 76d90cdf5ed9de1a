"""The tree of hook points over one transformers model.

`HookTree` is a TransformerLens `HookedRootModule`: `run_with_cache`, `run_with_hooks`, `hooks` and `hook_dict` are
TransformerLens's own. Its children are the points, named as in names.py; ``hf`` is the transformers model, which
computes. The points are not on the path of the computation until taps.py connects them, and then only while watched.

``denoise`` holds the points of the sampler. The tree carries them so that every quantity of a run has one namespace;
a single forward pass does not reach them.

One way this fails: two trees over one transformers model would both tap it. Build one tree per model.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule
from transformer_lens.utilities import Slice
from transformers import PreTrainedModel

from sinklens.errors import HookNameError, SinklensError
from sinklens.hooks import names
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.points import Point, Watch
from sinklens.hooks.taps import connect


@dataclass(frozen=True)
class Sizes:
    """The lengths of the axes, under the names TransformerLens's helpers look for in a model's ``cfg``."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    model_name: str
    device: torch.device
    dtype: torch.dtype
    normalization_type: str = "RMS"
    attn_only: bool = False
    final_rms: bool = True


class Points(nn.Module):
    """A named group of points: one row of the table each."""

    def __init__(self, specs: Iterable[names.PointSpec], watch: Watch) -> None:
        super().__init__()
        for spec in specs:
            setattr(self, spec.name, Point(watch))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Point: ...

    def any_watched(self) -> bool:
        """Whether anybody watches one of the points now."""
        return any(point.watched for point in self._modules.values())  # type: ignore[union-attr]


class NormPoints(Points):
    """The points of one norm; calling the group applies the norm, as TransformerLens's helpers do."""

    def __init__(self, watch: Watch, norm: nn.Module) -> None:
        super().__init__(names.NORM, watch)
        self.__dict__["_norm"] = norm  # as for the output weights below: the layer owns it

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The whole norm of `x`, its learned weight included."""
        return self.__dict__["_norm"](x)


class AttentionPoints(Points):
    """The points of one attention layer, and its output weights as TransformerLens shapes them."""

    hook_q: Point
    hook_k: Point
    hook_v: Point
    hook_rot_q: Point
    hook_rot_k: Point
    hook_attn_mask: Point
    hook_attn_scores: Point
    hook_pattern: Point
    hook_sink_scores: Point
    hook_z: Point
    hook_result: Point

    def __init__(self, watch: Watch, output: nn.Linear, n_heads: int) -> None:
        super().__init__(names.ATTENTION, watch)
        self.__dict__["_output"] = (output, n_heads)  # the layer owns its weights; the points only look at them
        outside = ("hook_q", "hook_k", "hook_v", "hook_result")  # tapped at the projections
        self.__dict__["_inside"] = [getattr(self, spec.name) for spec in names.ATTENTION if spec.name not in outside]

    def any_watched(self) -> bool:
        """Whether a point inside the attention function is watched."""
        return any(point.watched for point in self.__dict__["_inside"])

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output weights per head."""
        output, n_heads = self.__dict__["_output"]
        return output.weight.T.reshape(n_heads, -1, output.weight.shape[0])


class Block(nn.Module):
    """The points of one layer, in the order the forward pass reaches them."""

    def __init__(self, watch: Watch, layer: nn.Module, architecture: Architecture, n_heads: int) -> None:
        super().__init__()
        output: Any = layer.get_submodule(f"{architecture.attn}.{architecture.o}")
        self.hook_resid_pre = Point(watch)
        self.ln1 = NormPoints(watch, layer.get_submodule(architecture.ln1))
        self.attn = AttentionPoints(watch, output, n_heads)
        self.hook_attn_out = Point(watch)
        self.hook_resid_mid = Point(watch)
        self.ln2 = NormPoints(watch, layer.get_submodule(architecture.ln2))
        self.mlp = Points(names.MLP, watch)
        self.hook_mlp_out = Point(watch)
        self.hook_resid_post = Point(watch)


class HookTree(HookedRootModule):
    """All hook points of a model, and its forward pass.

    Attributes:
        hf: the transformers model.
        watch: the step counter and the trace blocks, which the points share.
        cfg: axis lengths under TransformerLens's names.
        blocks, hook_embed, ln_final, denoise: the points.
    """

    def __init__(self, hf: PreTrainedModel, architecture: Architecture) -> None:
        super().__init__()
        self.watch = Watch()
        self.architecture = architecture
        self.cfg = _sizes(hf)
        self.denoise = Points(names.DENOISE, self.watch)
        self.hook_embed = Point(self.watch)
        layers = hf.get_submodule(f"{architecture.base}.{architecture.layers}")
        self.blocks = nn.ModuleList(Block(self.watch, layer, architecture, self.cfg.n_heads) for layer in layers)
        self.ln_final = NormPoints(self.watch, hf.get_submodule(f"{architecture.base}.{architecture.norm}"))
        self.hf = hf
        self.setup()
        connect(self)

    def point_names(self) -> list[str]:
        """All points, in the order a step reaches them."""
        found = [name for name in self.hook_dict if name != "denoise.hook_canvas" and not name.startswith("denoise.")]
        return ["denoise.hook_canvas", *found, *(f"denoise.{spec.name}" for spec in names.DENOISE[1:])]

    def resolve(self, name: str) -> str:
        """The name of the point that any accepted spelling means; see `names.resolve`."""
        return names.resolve(name, self.point_names(), self.cfg.n_layers)

    def hidden(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch key"] | Bool[Tensor, "batch key"] | None = None,
        past_key_values: Any = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The final-norm output of one pass; `past_key_values` is a transformers cache and is extended in place.

        Positions are counted from the first real token, so left padding does not move a prompt.
        """
        position_ids = None
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            if bool(attention_mask.all()) and past_key_values is None:
                attention_mask = None
        base = self.hf.get_submodule(self.architecture.base)
        output = base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=past_key_values is not None,
        )
        return output.last_hidden_state

    @torch.no_grad()
    def look(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Bool[Tensor, "batch pos"] | None,
        names: Iterable[str],
    ) -> dict[str, Tensor]:
        """The values of the points called `names` in a pass of its own, which no hook or trace block sees or changes.

        For hooks that need another pass in the middle of one. Points of the sampler are not reached.

        Raises:
            HookNameError: no such point, or one of the sampler.
            SinklensError: a look is going on already.
        """
        wanted = [self.resolve(name) for name in names]
        for name in wanted:
            if name.startswith("denoise."):
                raise HookNameError(f"{name!r} belongs to the sampler; a single pass does not reach it.")
        if self.watch.looked is not None:
            raise SinklensError("one look is going on already; a pass that is looked at calls no hooks.")
        handover = self.watch.handover
        self.watch.looked = looked = dict.fromkeys(wanted)
        try:  # a block that waits for one of transformers' modules must not be served here
            with nullcontext() if handover is None else handover.suspended():
                self.hidden(input_ids, attention_mask)
            return {name: value for name, value in looked.items() if value is not None}
        finally:
            self.watch.looked = None

    def refuse_compiled(self) -> None:
        """Called before a run and before a single pass; it takes longer than a pass's points do.

        Raises:
            SinklensError: some module was compiled. Compiled code passes by the points: hooks would do nothing, and
                nobody would be told.
        """
        for module in self.hf.modules():
            if module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
                name = next(name for name, other in self.hf.named_modules() if other is module)
                raise SinklensError(
                    f"{name or 'the model'} was compiled (torch.compile), and compiled code passes by the hook "
                    f"points. Load the model again, and leave it uncompiled."
                )

    def head(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of final-norm outputs."""
        return self.hf.get_submodule(self.architecture.head)(hidden)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos vocab"]:
        """Raw logits of one pass over `input_ids`; `attention_mask` is 1 (or True) on real tokens, 0 on padding."""
        self.refuse_compiled()
        return self.head(self.hidden(input_ids, attention_mask))

    def run_with_cache(self, *args: Any, **kwargs: Any) -> tuple[Any, ActivationCache]:
        """TransformerLens's `run_with_cache`; returns the logits and an `ActivationCache`.

        ``names_filter`` takes a name, a list of names or a predicate; every accepted spelling works. ``pos_slice``
        goes by `names.position_axis`: TransformerLens's own rule would cut some of these points along their heads.
        """
        pos_slice = Slice.unwrap(kwargs.pop("pos_slice", None))
        chosen = kwargs.get("names_filter")
        if isinstance(chosen, str):
            kwargs["names_filter"] = [self.resolve(chosen)]
        elif chosen is not None and not callable(chosen):
            kwargs["names_filter"] = [self.resolve(name) for name in chosen]
        output, cache = super().run_with_cache(*args, **kwargs)
        sliced = {name: pos_slice.apply(value, dim=names.position_axis(name)) for name, value in cache.items()}
        return output, ActivationCache(sliced, self)

    def add_hook(self, name: names.HookName, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """TransformerLens's `add_hook`; every accepted spelling of a name works."""
        for point in names.select(name, self.point_names(), self.cfg.n_layers):
            super().add_hook(point, hook, *args, **kwargs)

    def _enable_hook(self, name: names.HookName, hook: Callable[..., Any], dir: Literal["fwd", "bwd"]) -> None:
        for point in names.select(name, self.point_names(), self.cfg.n_layers):
            super()._enable_hook(point, hook, dir)

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding weights."""
        return self.hf.get_submodule(self.architecture.head).weight.T

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding weights."""
        return self.hf.get_submodule(f"{self.architecture.base}.{self.architecture.embed}").weight


def _sizes(hf: PreTrainedModel) -> Sizes:
    config: Any = hf.config
    first = next(hf.parameters(), None)
    if first is None:
        raise SinklensError("the model has no parameters; give a loaded transformers model.")
    return Sizes(
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_model=config.hidden_size,
        d_head=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        model_name=getattr(config, "name_or_path", "") or config.model_type,
        device=first.device,
        dtype=first.dtype,
    )
