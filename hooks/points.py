"""Hook points that do work only while they are watched.

A *point* is TransformerLens's `HookPoint`: an identity module that a value passes through. It is *watched* if a
TransformerLens or PyTorch hook is registered on it, if a trace block waits at its ``.output`` (or ``.input``), or if an
nnsight cache records it. During a *peek* (`HookTree.peek`) only the requested points are watched.

A point is *armed* while it may be watched: from the moment a hook is registered until the first pass without one,
while a trace block runs, and in a peek that requests it. The model's computation reaches only armed points: each has
*taps*, which are installed while it is armed. An unarmed point therefore costs nothing.

Hooks run inside the point's forward, nnsight's handover after it: a trace block reads the value that the hooks returned
at ``.output``, and the value that the model computed at ``.input``.

Limitation: a trace block names its points while it runs. Whether it watches a point is therefore known only at the
moment the forward pass reaches it, so all points are armed for it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint

from sinklens.hooks.forward_pass import ForwardPass
from sinklens.hooks.hook_functions import label, refuse_other, same_kind, same_shape
from sinklens.hooks.turn import Turn

if TYPE_CHECKING:
    from torch import Tensor

    from sinklens.hooks.attention.layer_sums import LayerSums
    from sinklens.hooks.interleaving import Handover


class Watch:
    """State that all points of one tree share: the current pass, the trace blocks and the peek.

    Attributes:
        forward_pass: the pass that runs, or ran last.
        handover: passes values to trace blocks and back; None while no nnsight root wraps the tree.
        peeked: during `HookTree.peek`, the values of the requested points by name; only these points are watched then,
            and no hook or trace block is called. None otherwise.
        turn: taken by whoever runs the model; see turn.py.
        cache: the `window_cache.WindowCache` of the pass; None in a pass without one.
        sums: collects the sink scores of a run that records them; None in any other pass.
        biases: values of ``hook_attn_mask`` by point, where hooks were called before the pass; see masks.py.
        short: whether nothing inside the pass that runs is watched, except `biases` and what `sums` records.
        points: all points of the tree.
        masks: its points ``hook_attn_mask``, in the order of the layers.
        hooked: the points that have hooks, or had some when the last pass began.
        served: whether a trace block runs in step with the model.
        recompute: whether results are recomputed from values that hooks left unchanged, too; see `read_at`.
    """

    def __init__(self) -> None:
        self.forward_pass = ForwardPass()
        self.peeked: dict[str, Tensor | None] | None = None
        self.handover: Handover | None = None
        self.turn = Turn()
        self.cache: Any = None
        self.sums: LayerSums | None = None
        self.biases: dict[Point, Tensor | None] = {}
        self.short = False
        self.points: list[Point] = []
        self.masks: list[Point] = []
        self.hooked: set[Point] = set()
        self.served = self.recompute = False
        self._held = Counter[Point]()  # points that `armed` blocks need

    def follow(self, handover: "Handover") -> None:
        """Arm all points while trace blocks of `handover` run."""
        self.handover, handover.changed = handover, self._serve

    def _serve(self, served: bool) -> None:
        self.served = served
        for point in self.points:
            self._arm(point)

    def _arm(self, point: "Point") -> None:
        point.arm(self.served or point in self.hooked or self._held[point] > 0)

    def notice(self, point: "Point") -> None:
        """Arm `point`, which has a new hook."""
        self.hooked.add(point)
        self._arm(point)

    def settle(self) -> None:
        """Disarm the points whose hooks were removed; called when a pass begins."""
        for point in [point for point in self.hooked if not point.hooked]:
            self.hooked.discard(point)
            self._arm(point)

    @contextmanager
    def summing(self, sums: "LayerSums", blocks: Any) -> Iterator[None]:
        """Collect the sink scores of the layers that `sums` records, if any, inside this context."""
        if not sums.layers:
            yield
            return
        with self.armed(blocks[layer].attn.hook_sink_scores for layer in sums.layers):
            self.sums = sums
            try:
                yield
            finally:
                self.sums = None

    @contextmanager
    def armed(self, points: Iterable["Point"]) -> Iterator[None]:
        """Arm `points` inside this context, whether or not they have hooks, also if one of them loses its hook."""
        points = list(points)
        self._held.update(points)
        for point in points:
            self._arm(point)
        try:
            yield
        finally:
            self._held.subtract(points)
            for point in points:
                self._arm(point)

    def describe(self, **changes: Any) -> None:
        """Change some fields of the pass that runs."""
        self.forward_pass = replace(self.forward_pass, **changes)


class Point(HookPoint):
    """A TransformerLens `HookPoint` with `watched` and `forward_pass`.

    TransformerLens hook functions ``fn(value, hook)`` get the point as `hook`; ``hook.name``, ``hook.layer()`` and
    ``hook.ctx`` are TransformerLens's, ``hook.forward_pass`` describes the pass, and ``hook.step`` is its step
    (None outside a run).
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.armed = False
        self.taps: list[Tap] = []
        self._functions: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        watch.points.append(self)

    def arm(self, armed: bool) -> None:
        """Install the taps of this point, or leave them to the other points that need them."""
        if armed != self.armed:
            self.armed = armed
            for tap in self.taps:
                tap.need(self, armed)

    @property
    def forward_pass(self) -> ForwardPass:
        """The pass that runs, or ran last."""
        return self.watch.forward_pass

    @property
    def step(self) -> int | None:
        """Number of the current denoising step; None outside a run."""
        return self.watch.forward_pass.step

    @property
    def key_positions(self) -> range:
        """Text positions of the keys of the current or last attention, the last axis of a pattern.

        With a key/value cache, the keys are the last positions up to the end of the pass: all of them, or in a layer
        with a sliding window those in reach. There are no keys of later blocks.
        """
        return self.watch.forward_pass.keys

    @property
    def watched(self) -> bool:
        """Whether a hook, trace block, cache or peek uses the value that passes here now."""
        watch = self.watch
        if watch.peeked is not None:
            return self.name in watch.peeked
        return (self.armed and self.hooked) or (
            watch.served and watch.handover is not None and watch.handover.wants(self.name or "")
        )

    @property
    def hooked(self) -> bool:
        """Whether a TransformerLens or PyTorch hook is registered here."""
        forward = self._functions or self._forward_hooks or self._forward_pre_hooks
        return bool(forward or self._backward_hooks or self._backward_pre_hooks)

    @property
    def only_function(self) -> Callable[..., Any] | None:
        """The function that a user set here, if there is just one, through `add_hook`, and no hook of another kind."""
        other = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        if other or len(self._functions) != 1 or len(self.fwd_hooks) != 1:
            return None
        return self.fwd_hooks[0].user_hook

    def __call__(self, x: "Tensor") -> "Tensor":
        if self.watch.peeked is not None:
            self.watch.peeked[self.name or ""] = x.detach()
            return x
        return super().__call__(x)

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemovableHandle:
        """As in PyTorch; plain hooks run inside `forward`, before nnsight's handover."""
        if with_kwargs or always_call:
            handle = super().register_forward_hook(
                hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
            )
        else:
            handle = RemovableHandle(self._functions)
            self._functions[handle.id] = hook
            if prepend:
                self._functions.move_to_end(handle.id, last=False)
        self.watch.notice(self)
        return handle

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As in PyTorch."""
        self.watch.notice(self)
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As in PyTorch."""
        self.watch.notice(self)
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As in PyTorch."""
        self.watch.notice(self)
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def forward(self, x: "Tensor") -> "Tensor":
        for key, function in tuple(self._functions.items()):
            if (changed := function(self, (x,), x)) is not None:
                if not (same_shape(changed, x, self.name) and same_kind(changed, x, self.name)):
                    at = self.name if self.step is None else f"{self.name} (step {self.step})"
                    refuse_other(changed, x, f"what {label(self._given(key, function))} returned at {at}", self.name)
                x = changed
        return x

    def _given(self, key: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that was passed to `add_hook`, where TransformerLens registered `function` in its place."""
        return next((handle.user_hook for handle in self.fwd_hooks if handle.hook.id == key), None) or function


class Tap:
    """A connection of the model's computation to some points, installed while one of them is armed."""

    def __init__(self, undo: ExitStack, points: Iterable[Point], install: Callable[[], Callable[[], Any]]) -> None:
        """Connect `points`.

        Args:
            undo: removes the tap for good when it is closed.
            points: the points that the computation reaches through it.
            install: installs it; returns what removes it.
        """
        self._install = install
        self._remove: Callable[[], Any] | None = None
        self._needed: set[Point] = set()
        for point in points:
            point.taps.append(self)
            undo.callback(point.taps.remove, self)
        undo.callback(self._take_off)

    def need(self, point: Point, needed: bool) -> None:
        """Install it if `point` is the first that needs it, or remove it if none does any more."""
        (self._needed.add if needed else self._needed.discard)(point)
        if self._needed and self._remove is None:
            self._remove = self._install()
        elif not self._needed:
            self._take_off()

    def _take_off(self) -> None:
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()


class SamplerPoint(Point):
    """A point of the sampler.

    Attributes:
        reached: the last step in which the sampler reached it; None before that. Samplers differ in the points that
            they pass, and one that they never pass would otherwise look like one that a step has passed already.
    """

    reached: int | None = None

    @property
    def watched(self) -> bool:
        """As `Point.watched`. Only the sampler asks, when it reaches the point, so this also sets `reached`."""
        self.__dict__["reached"] = self.step  # nn.Module's own way is slow, and the value is no module
        return super().watched


def at(point: Point, value: "Tensor") -> "Tensor":
    """`value`, passed through `point` if the point is watched."""
    return point(value) if point.watched else value


def writes(value: "Tensor") -> int | None:
    """Number of in-place writes to `value`; None under torch.inference_mode, where PyTorch does not count them."""
    return None if value.is_inference() else value._version


def read_at(point: Point, value: "Tensor") -> tuple["Tensor", bool]:
    """As `at`, and whether the value is known to be unchanged, without gradients.

    A module's own result can then stand, where that of a recomputation differs in its last bits. Comparing a value that
    a hook returned waits for a GPU.
    """
    before = writes(value)
    shown = at(point, value)
    unknown = point.watch.recompute or before is None or value.requires_grad or shown.requires_grad
    return shown, not unknown and writes(value) == before and (shown is value or torch.equal(shown, value))
