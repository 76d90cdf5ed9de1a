"""The tree of hook points over one transformers model.

`HookTree` is a TransformerLens `HookedRootModule`: front.py defines its `run_with_cache`, `run_with_hooks` and
`hooks`, model_weights.py its weights. Its children are the points, named as in names.py; ``hf`` is the transformers
model, which does the computation. taps.py connects the points to the computation, which passes through them only while
they are watched.

``denoise`` contains the points of the sampler. They are part of the tree so that all quantities of a run share one
namespace; a single forward pass does not reach them.

Pitfall: two trees over one transformers model would both tap it. Build one tree per model.
"""

import inspect
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklens.errors import HookNameError, PromptError, SettingError, SinklensError, nearest, require, warn_caller
from sinklens.hooks import names, neighbors, partial_pass  # noqa: F401  neighbors checks versions, before the others
from sinklens.hooks.adapter import Adapter, connect_adapter
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.attention.blocks import Blocks, rule_of, ruled_by
from sinklens.hooks.attention.masks import known, of_one_hook
from sinklens.hooks.attention.segments import Segments, changes_attention, single_pass
from sinklens.hooks.canvas_pass import CanvasPass
from sinklens.hooks.captured import Captures
from sinklens.hooks.forward_pass import CAUSAL, ForwardPass, PassKind
from sinklens.hooks.front import HookFront
from sinklens.hooks.groups import Block, EncoderPoints, NormPoints, Points
from sinklens.hooks.inputs import LayerInputs
from sinklens.hooks.losses import Loss, Masks, next_token_loss
from sinklens.hooks.model_weights import ModelWeights
from sinklens.hooks.modulation import Time, times_of
from sinklens.hooks.padded import PaddedIds
from sinklens.hooks.points import Point, SamplerPoint, Watch
from sinklens.hooks.sizes import sizes_of
from sinklens.hooks.spellings import ByPoint
from sinklens.hooks.split_projection import split
from sinklens.hooks.taps import connect, connect_encoder, connect_time, tap_output
from sinklens.hooks.turn import in_turn
from sinklens.hooks.weights import AbsentError


class HookTree(ModelWeights, HookFront):
    """All hook points of a model, and its forward pass.

    Attributes:
        hf: the transformers model.
        captures: its passes as CUDA graphs.
        watch: the pass, the trace blocks and the peek, which the points share.
        turn: taken by whoever runs the model.
        cfg: axis lengths and switches under TransformerLens's names.
        to_single_token: that of the model that owns the tree, which sets it.
        masks: how a masked diffusion model reads a canvas; None for other models.
        adapter: the checkpoint's adapter, which acts in passes that say so; None without one.
        blocks, hook_embed, ln_final, denoise: the points.
        encoder: the points of the encoder, in a tree that has one; see canvas_pass.py.
    """

    def __init__(self, hf: PreTrainedModel, architecture: Architecture, drawn: bool = False) -> None:
        super().__init__()
        self.watch = Watch()
        self.turn = self.watch.turn
        self.captures = Captures()
        self._names: tuple[Any, list[str]] = None, []  # the settings, and the points that are on with them
        self.architecture = architecture
        self.cfg = sizes_of(hf, architecture)
        self._undo = ExitStack()
        base = hf.get_submodule(architecture.base)
        layers: Any = base.get_submodule(architecture.layers)
        for layer in layers if architecture.fused else ():
            split(self._undo, layer.get_submodule(f"{architecture.attn}.{architecture.fused}"))
        self.masks: Masks | None = None
        self.adapter: Adapter | None = None
        self.disconnected = False
        self._sampler_specs = _sampler_specs(hf, architecture, drawn)
        self.denoise = Points(self._sampler_specs, self.watch, SamplerPoint)
        if architecture.encoder:
            self.encoder = EncoderPoints(self.watch, hf.get_submodule(architecture.encoder), architecture)
        self.hook_embed = Point(self.watch)
        if architecture.positions:
            self.hook_pos_embed = Point(self.watch)
        if architecture.time:
            for spec in (*names.TIME, *names.FINAL_MODULATION):
                setattr(self, spec.name, Point(self.watch))
        self.blocks = nn.ModuleList(Block(self.watch, layer, architecture) for layer in layers)
        self.ln_final = NormPoints(
            self.watch, base.get_submodule(architecture.norm), names.Parts(modulated=bool(architecture.modulation))
        )
        self.setup()  # it names every module, and must not rename those of transformers
        self.hf = hf
        self.hook_dict = ByPoint(self.spelled, self.hook_dict)
        connect(self._undo, base, architecture, self.hook_embed, self.ln_final, self.blocks)
        if architecture.positions:
            tap_output(self._undo, base.get_submodule(architecture.positions), self.hook_pos_embed)
        if architecture.time:
            connect_time(self._undo, base, architecture, self)
        if architecture.encoder:
            connect_encoder(self._undo, hf, architecture, self.encoder, self.denoise)
        self._inputs = [
            LayerInputs(layer, block, self, self._undo)
            for layer, block in zip(layers, self.blocks, strict=True)
            if not architecture.values
        ]

    def attach(self, adapter: Adapter) -> None:
        """Connect a checkpoint's adapter; it acts in passes that are `ForwardPass.adapted`."""
        self.adapter = adapter
        connect_adapter(self._undo, self.hf, adapter, self.watch)

    def disconnect(self) -> None:
        """Remove all taps from the transformers model; the tree cannot be used afterwards."""
        self._undo.close()
        self.captures.clear()
        self.disconnected = True

    @property
    def attention_blocks(self) -> Blocks | None:
        """The blocks of a block-causal model; None for other attention."""
        return None if self.changes_attention else rule_of(self.hf.config)

    def point_names(self) -> list[str]:
        """All points that are on, in the order a step reaches them."""
        if self._names[0] is not self.cfg:  # a switch was turned
            on = [name for name in self.hook_dict if not name.startswith("denoise.") and self.is_on(name)]
            canvas, *others = (f"denoise.{spec.name}" for spec in self._sampler_specs)
            self._names = self.cfg, [canvas, *on, *others]
        return list(self._names[1])

    @property
    def timed(self) -> bool:
        """Whether the network reads the noise level that it is given."""
        return bool(self.architecture.time) and bool(self.hf.config.time_conditioning)

    @property
    def changes_attention(self) -> bool:
        """Whether its attention changes from pass to pass, see segments.py."""
        return changes_attention(self.hf.config)

    @property
    def causal(self) -> bool:
        """Whether queries attend only to their own and earlier keys; False for a canvas that an encoder precedes."""
        config = self.hf.config  # getattr of a transformers config takes several microseconds
        return bool(vars(config).get("is_causal", getattr(type(config), "is_causal", False)))

    @property
    def parts(self) -> list[names.Parts]:
        """The parts of each layer, which decide which points it has."""
        return [block.parts for block in self.blocks]

    @property
    def canvas_pass(self) -> CanvasPass:
        """The passes of the encoder and of the canvas.

        Raises:
            AbsentError: the model has no encoder.
        """
        require(
            self.architecture.encoder,
            f"a {self.hf.config.model_type} model has no encoder; its passes cover the canvas.",
            AbsentError,
        )
        return CanvasPass(self.hf, self.architecture, self.watch)

    @property
    def is_watched(self) -> bool:
        """Whether a trace block is open, or a hook, cache or peek is attached to a point of the passes."""
        watch = self.watch
        if watch.sums is not None or (watch.served and watch.handover is not None and watch.handover.running):
            return True
        hooked = watch.hooked if watch.peeked is None else map(self.hook_dict.get, watch.peeked)
        return any(point.watched for point in hooked if not isinstance(point, SamplerPoint))

    @property
    def head_awaited(self) -> bool:
        """Whether a trace block waits for the language-model head, or a cache of nnsight records it."""
        return self.watch.handover is not None and self.watch.handover.wants(f"hf.{self.architecture.head}")

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Accepted for TransformerLens; here ``hook_result`` is always on, and computed only while it is watched."""
        self.cfg = replace(self.cfg, use_attn_result=use_attn_result)

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Accepted for TransformerLens where it changes nothing: keys and values keep their key/value heads.

        Raises:
            SettingError: True, in a model with fewer key/value heads than query heads.
        """
        group = self.cfg.n_heads // self.cfg.n_key_value_heads
        require(
            not ungroup_grouped_query_attention or group <= 1,
            f"hook_k and hook_v keep their {self.cfg.n_key_value_heads} key/value heads; query head h reads "
            f"key/value head h // {group}. value.repeat_interleave({group}, dim=-2) repeats them to the query "
            f"heads, and model.expand_kv_heads does so with weights.",
        )

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Turn ``hook_q_input``, ``hook_k_input`` and ``hook_v_input`` on or off; see inputs.py."""
        self._switch("use_split_qkv_input", use_split_qkv_input, unless="use_attn_in")

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Turn ``hook_attn_in`` on or off; see inputs.py."""
        self._switch("use_attn_in", use_attn_in, unless="use_split_qkv_input")

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Turn ``hook_mlp_in`` on or off; see inputs.py."""
        self._switch("use_hook_mlp_in", use_hook_mlp_in)

    def _switch(self, flag: str, value: bool, unless: str = "") -> None:
        require(
            not value or self._inputs,
            f"{flag} is not available: this model has layers whose keys and values share a projection.",
        )
        require(
            not value or not getattr(self.cfg, unless, False),
            f"{flag} and {unless} are mutually exclusive; call model.set_{unless}(False) first.",
        )
        self.cfg = replace(self.cfg, **{flag: value})

    @in_turn
    def hidden(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch key"] | Bool[Tensor, "batch key"] | None = None,
        past_key_values: Any = None,
        stream: Float[Tensor, "batch pos d_model"] | None = None,
        self_conditioning: Float[Tensor, "batch canvas vocab"] | None = None,
        time: Time = None,
        kind: PassKind | None = None,
        of_step: bool = False,
    ) -> Float[Tensor, "batch _ d_model"]:
        """The final-norm output of one pass; `past_key_values` is a transformers cache and is extended in place.

        Positions are counted from the first real token, so left padding does not shift a prompt. A `stream` replaces
        the embeddings of `input_ids`. In a tree with an encoder, the last positions of `input_ids` are the canvas, and
        the output has these positions only. `kind` says what a single pass is, in a tree that changes its attention.
        `of_step` says that it is the complete pass of a run's step, which may be captured and replayed (captured.py).
        """
        self.watch.settle()
        if self.watch.forward_pass.step is None and self.watch.cache is None:  # only its mask shows a pass's padding
            mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
            self.watch.forward_pass = ForwardPass(real=mask, **(kind or PassKind())._asdict())
        time = self._time_of(time, input_ids)
        if self.architecture.encoder:
            return self.canvas_pass.hidden(input_ids, attention_mask, self_conditioning)
        first = 0 if past_key_values is None else past_key_values.get_seq_length()
        stop, position_ids = first + input_ids.shape[1], None
        keys = range(stop if attention_mask is None else attention_mask.shape[1])
        self.watch.describe(queries=range(first, stop), keys=keys)
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, first:stop]
            if bool(attention_mask.all()) and past_key_values is None:
                attention_mask = None
        if self.architecture.positions and position_ids is None:
            # hook_pos_embed has every row
            position_ids = torch.arange(first, stop, device=input_ids.device).expand(len(input_ids), -1)
        base = self.hf.get_submodule(self.architecture.base)
        given: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
        given |= {"time": time} if self.architecture.time else {}
        if of_step and self.captures.usable(self.watch, input_ids):
            return self.captures.run(self, {"input_ids": input_ids, **given}, base)
        segments, masks = self.watch.forward_pass.segments, self._masks(input_ids) if of_step else {}
        with (
            ruled_by(self.hf.config, None if segments is None else Segments(segments)),
            known(self.watch, masks, input_ids.device) if past_key_values is None else nullcontext(),
        ):
            output = base(
                input_ids=input_ids if stream is None else None,
                inputs_embeds=stream,
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
                **given,
            )
        return output.last_hidden_state

    def _masks(self, ids: Int[Tensor, "batch pos"]) -> dict[Point, Any]:
        """The masks that are known before a pass over `ids`."""
        return of_one_hook(
            self.watch, (len(ids), self.cfg.n_heads, 1, ids.shape[1]), ids.new_zeros((), dtype=self.cfg.dtype)
        )

    def _time_of(self, time: Time, ids: Tensor) -> Float[Tensor, " batch"] | None:
        """The noise level of each row of a pass: `time`, or that of the step; None if the network reads none."""
        described = self.watch.forward_pass
        found = times_of(self, described.time if time is None else time, len(ids), ids.device)
        if described.step is None:
            self.watch.describe(time=found)
        return found

    @in_turn
    @torch.no_grad()
    def peek(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Bool[Tensor, "batch pos"] | None,
        names: Iterable[str],
        time: Float[Tensor, " _"] | None = None,
        kind: PassKind | None = None,
    ) -> dict[str, Tensor]:
        """Run a separate pass, without hooks or trace blocks, and return the values of the points called `names`.

        For hooks that need another pass in the middle of one. Points of the sampler are not reached. In a model that
        changes its attention, `kind` says what the pass is; by default, what the running pass is.

        Raises:
            HookNameError: no such point, or one of the sampler.
            SinklensError: another peek is running.
        """
        wanted = [self.resolve(name) for name in names]
        for name in wanted:
            require(
                not name.startswith("denoise."),
                f"{name!r} belongs to the sampler; a single pass does not reach it.",
                HookNameError,
            )
        require(
            self.watch.peeked is None,
            "another peek is running; call peek after it returns (hooks are not called during a peek).",
            SinklensError,
        )
        watch, handover = self.watch, self.watch.handover
        running, cache, sums = watch.forward_pass, watch.cache, watch.sums
        self.watch.peeked = peeked = dict.fromkeys(wanted)
        if kind is None:
            kind = running.kind if self.changes_attention else PassKind()
        self.watch.forward_pass = ForwardPass(step=running.step, time=running.time, **kind._asdict())
        watch.cache = watch.sums = None
        try:  # a trace block that waits for one of transformers' modules must not be served here
            with (
                self.watch.armed(self.hook_dict[name] for name in wanted),  # type: ignore[misc]
                nullcontext() if handover is None else handover.suspended(),
            ):
                self.hidden(input_ids, attention_mask, time=time, kind=kind)
            return {name: value for name, value in peeked.items() if value is not None}
        finally:
            watch.peeked, watch.forward_pass, watch.cache, watch.sums = None, running, cache, sums

    def refuse_unusable(self) -> None:
        """Refuse a released or compiled model. Called once per run or single pass, as it takes longer than the points.

        Raises:
            SinklensError: the model was released, or a module was compiled. Compiled code bypasses the points: hooks
                would silently do nothing.
        """
        require(
            not self.disconnected,
            "this model was released (model.release(), or the end of a sinklens.borrow block); call sinklens.load "
            "on the transformers model again.",
            SinklensError,
        )
        modules = [self.hf]
        for module in modules:  # a list that grows: `modules()` would take a large part of the set-up of a short run
            modules += [one for one in module._modules.values() if one is not None]
            if module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules:
                name = next(name for name, other in self.hf.named_modules() if other is module)
                raise SinklensError(
                    f"{name or 'the model'} was compiled (torch.compile), and compiled code bypasses the hook "
                    f"points. Load the model again, and leave it uncompiled."
                )

    def head(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of final-norm outputs, softcapped in float32 if the architecture does so."""
        logits = self.hf.get_submodule(self.architecture.head)(hidden)
        if not self.architecture.softcap:
            return logits
        cap = getattr(self.hf, self.architecture.softcap)
        return torch.tanh(logits.float() / cap) * cap

    @in_turn
    def forward(
        self,
        input_ids: Any,
        attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
        *,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        self_conditioning: Float[Tensor, "batch canvas vocab"] | None = None,
        targets: Int[Tensor, "batch pos"] | None = None,
        time: Time = None,
        mode: str | None = None,
        block_start: Any = None,
        **unknown: Any,
    ) -> Any:
        """One pass over `input_ids` [batch, pos]: raw logits, or what `return_type` selects.

        Args:
            input_ids: token ids; with `start_at_layer` the stream entering that layer [batch, pos, d_model].
            attention_mask: 1 (or True) on real tokens, 0 on padding.
            return_type: "logits", "loss" (see losses.py: of the next token, or of the tokens behind the masks), "both"
                or None.
            loss_per_token: return the loss of each token instead of their mean.
            start_at_layer: the first layer to compute.
            stop_at_layer: the layer to stop before; the stream that would enter it is returned.
            self_conditioning: logits of the step before, for a model whose canvas is random tokens; the last
                ``canvas_length`` of `input_ids` are then the canvas, and the logits are those of the canvas.
            targets: for the loss of a canvas with masks: the ids behind them; other positions are not read.
            time: noise level of each row, or one for all rows, for a network that reads it; an untimed one ignores it,
                with a warning.
            mode: for a model that changes its attention: what the pass is, see `ForwardPass.mode`. "causal", "prefill",
                "commit" and "verify" are causal, and their logits predict the next token. "denoise" is causal before
                `block_start`, and the columns from there on see each other; their logits predict the tokens at their
                own positions. "draft" is the same with the checkpoint's adapter, if it has one, in the block. By
                default all tokens see each other.
            block_start: the first column of the block of a "denoise" or "draft" pass.

        Raises:
            PromptError: not a tensor, ids where a stream is expected, or a stream where ids are expected.
            SettingError: a layer does not exist, the loss cannot be computed, or an argument is one of a run.
        """
        if unknown:
            raise SettingError(
                f"a single pass has no argument {', '.join(unknown)}; sinklens.generate and sinklens.trace run models, "
                f"with hooks= and settings such as gen_length=, and model.to_canvas appends masks for a pass."
                f"{nearest(min(unknown), inspect.signature(self.forward).parameters)}"
            )
        self.refuse_unusable()
        layers = partial_pass.layers_run(self.cfg.n_layers, start_at_layer, stop_at_layer)
        from_stream = start_at_layer is not None
        partial_pass.check_return_type(return_type, from_stream)
        self._check_input(input_ids, from_stream)
        self._check_canvas(start_at_layer, stop_at_layer, self_conditioning)
        self._check_time(time)
        if isinstance(input_ids, PaddedIds):
            attention_mask = input_ids.is_real if attention_mask is None else attention_mask
            input_ids = input_ids.plain
        base: Any = self.hf.get_submodule(self.architecture.base)
        stream = input_ids if from_stream else None
        ids = input_ids.new_zeros(input_ids.shape[:2], dtype=torch.long) if from_stream else input_ids

        kind = self._kind_of(mode, block_start, ids.shape[1])
        loss = None if return_type not in partial_pass.LOSSES else self.loss_of(ids, attention_mask, targets, kind.mode)
        run = partial(
            self.hidden, ids, attention_mask,
            stream=stream, self_conditioning=self_conditioning, time=time, kind=kind,
        )  # fmt: skip
        with partial_pass.stepping_over(base, self.architecture.layers, layers.start):
            if stop_at_layer is not None:
                all_layers: Any = base.get_submodule(self.architecture.layers)
                return partial_pass.stream_before(
                    [*all_layers, base.get_submodule(self.architecture.norm)][layers.stop], run
                )
            hidden = run()
        if return_type is None:
            return None
        logits = self.head(hidden)
        if loss is not None:
            lost = loss(logits, loss_per_token)
            return lost if return_type == "loss" else (logits, lost)
        traced = self.watch.handover is not None and self.watch.handover.running
        return logits.as_subclass(partial_pass.Logits) if traced else logits

    def _check_time(self, time: Time) -> None:
        """Warn of a noise level that the network has an input for, and ignores."""
        if self.architecture.time and time is not None and not self.timed:
            warn_caller(
                "this network is untimed: it reads noise level 0 whatever it gets, so time= has no effect. Leave it "
                "out, or use a timed network, such as Duo or SEDD.",
                UserWarning,
            )

    def _kind_of(self, mode: str | None, block_start: Any, length: int) -> PassKind:
        """What a single pass over `length` columns is.

        Raises:
            SettingError: the model does not change its attention, or see `single_pass`.
        """
        require(
            self.changes_attention or (mode is None and block_start is None),
            f"mode= and block_start= are for models whose attention changes from pass to pass; that of this "
            f"{self.hf.config.model_type} model does not. Leave them out.",
        )
        return single_pass(mode, block_start, length, self.adapter is not None)

    def loss_of(
        self, ids: Int[Tensor, "batch pos"], real: Tensor | None, targets: Tensor | None, mode: str | None = None
    ) -> Loss:
        """The loss of a pass over `ids`, as a function of its logits; see losses.py.

        Raises:
            SettingError: it is not defined for this model, these ids or these targets.
        """
        if self.causal or mode in CAUSAL:
            require(targets is None, "the targets of an autoregressive model are its input; leave targets= out.")
            return next_token_loss(ids, real)
        if self.masks is None:
            raise SettingError(
                "the loss of this model is not defined by one pass: its canvas is random tokens, none of which is "
                "marked as undecided. Take the logits."
            )
        return self.masks.loss(ids, targets, real)

    def _check_canvas(self, start: int | None, stop: int | None, conditioning: Tensor | None) -> None:
        """Refuse what a tree with an encoder, or one without, does not offer."""
        require(
            not self.architecture.encoder or (start is None and stop is None),
            "a model with an encoder runs all layers of both; leave start_at_layer and stop_at_layer out.",
        )
        require(
            conditioning is None or self.architecture.self_conditioning,
            "this model is not conditioned on the last step's logits; leave self_conditioning out.",
        )

    def _check_input(self, given: Any, from_stream: bool) -> None:
        kind = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        require(
            isinstance(given, Tensor) and (from_stream or not given.is_floating_point()),
            f"a pass of the tree takes token ids [batch, pos]; got {kind}.",
            PromptError,
        )
        require(
            not from_stream or (given.ndim == 3 and given.shape[-1] == self.cfg.d_model),
            f"start_at_layer takes the residual-stream tensor that enters the layer, "
            f"[batch, pos, {self.cfg.d_model}]; got {kind}.",
            PromptError,
        )


def _sampler_specs(hf: PreTrainedModel, architecture: Architecture, drawn: bool) -> tuple[names.PointSpec, ...]:
    """The rows of the sampler's points."""
    if architecture.encoder:
        return names.NOISE
    if changes_attention(hf.config):
        return names.SWITCHING
    first, *rest = names.DENOISE
    return (first, *[names.UNIFORM] * drawn, *rest, *[names.EDIT] * (rule_of(hf.config) is not None))
