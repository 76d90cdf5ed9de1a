"""TransformerLens's interface of the tree: hooks, caches and single passes, by name.

`HookFront` takes the arguments of TransformerLens 4.3's bridge and behaves like it, on the points of the tree:

- a call removes only the hooks that it added; with ``reset_hooks_end=False`` they stay, and later passes continue to
  write to the returned cache;
- ``clear_contexts=True`` empties ``hook.ctx`` of the points that the call touched;
- ``start_at_layer`` and ``stop_at_layer`` run some layers only; hooks outside them are not called.

TransformerLens ignores a name that matches no point; `HookFront` raises an error or warns.

Caveat: as in TransformerLens, a later hook on a point can edit a cached value in place.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint, LensHandle
from transformer_lens.utilities import Slice

from sinklens.errors import HookNameError, require
from sinklens.hooks import names
from sinklens.hooks.partial_pass import layers_run
from sinklens.hooks.spellings import GRADIENT, ByPoint, HookCache
from sinklens.hooks.turn import Turn, in_turn

NamesFilter = names.HookName | Iterable[names.HookName] | None
HookPair = tuple[names.HookName, Callable[..., Any]]
PosSlice = Any  # TransformerLens's slices: a position, (start, stop), a list of positions, a `Slice`, or None


class HookFront(HookedRootModule):
    """The hook methods of TransformerLens's models, for every spelling of a name."""

    cfg: Any
    hook_dict: ByPoint[HookPoint]
    turn: Turn

    def point_names(self) -> list[str]:
        """All points that are on, in the order a step reaches them."""
        raise NotImplementedError

    def is_on(self, name: str) -> bool:
        """Whether there is a point of this name, in this spelling, and it is on."""
        return name in self.hook_dict.keys() and bool(getattr(self.cfg, names.switch_of(name) or "", True))  # noqa: SIM118

    @property
    def spelled(self) -> Callable[[str], str]:
        """Returns the name of the point that any accepted spelling means, on or off; it can be pickled."""
        return partial(names.resolve, known=tuple(self.hook_dict), n_layers=self.cfg.n_layers)

    def resolve(self, name: str) -> str:
        """The name of the point that any accepted spelling means; see `names.resolve`."""
        return names.resolve(name, self.point_names(), self.cfg.n_layers)

    def select(self, chosen: Any) -> list[str]:
        """The points that a name, a predicate or several of either select, in forward order; None selects all.

        Raises:
            HookNameError: a name or predicate, also one of several, matches no point.
            SettingError: a point is off, or `chosen` is neither names nor predicates.
        """
        if isinstance(chosen, str) and self.is_on(chosen):  # a pass may have hooks on every point
            return [chosen]
        known = self.point_names()
        found = {point for one in _several(chosen) for point in names.select(one, known, self.cfg.n_layers)}
        return known if chosen is None else [point for point in known if point in found]

    def add_hook(self, name: names.HookName, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """TransformerLens's `add_hook`, for every accepted spelling of a name."""
        for point in self.select(name):
            super().add_hook(point, hook, *args, **kwargs)

    def list_hooks(
        self,
        name_filter: NamesFilter = None,
        dir: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = True,
    ) -> dict[str, list[LensHandle]]:
        """The hooks that are set, by point; points without hooks are omitted."""
        return super().list_hooks(None if name_filter is None else self.select(name_filter), dir, including_permanent)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookPair] = (),
        bwd_hooks: Sequence[HookPair] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator["HookFront"]:
        """Set hooks for the duration of a `with` block; hooks that were set before stay.

        Raises:
            HookNameError: not a list of pairs, or a name or predicate matches no point.
        """
        with self.turn, ExitStack() as undo:
            self.context_level += 1
            undo.callback(lambda: setattr(self, "context_level", self.context_level - 1))
            for dir, pairs in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, hook in _checked(pairs):
                    for point in (self.hook_dict[found] for found in self.select(name)):
                        handle = point.add_hook(hook, dir=dir, level=self.context_level)  # type: ignore[arg-type]
                        if reset_hooks_end:
                            undo.callback((point.fwd_hooks if dir == "fwd" else point.bwd_hooks).remove, handle)
                            undo.callback(handle.hook.remove)
                        if clear_contexts:
                            undo.callback(point.clear_context)
            yield self

    def run_with_hooks(  # type: ignore[override]  # the bridge's arguments, not those of the root class
        self,
        input: Tensor,
        fwd_hooks: Sequence[HookPair] = (),
        bwd_hooks: Sequence[HookPair] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        *,
        remove_batch_dim: bool = False,
        **forward: Any,
    ) -> Any:
        """One pass under hooks; `forward` are arguments of the tree's forward.

        ``remove_batch_dim=True`` passes each hook function its value without a batch axis of length 1.

        Raises:
            HookNameError: not a list of pairs, or a name or predicate matches no point of a single pass.
        """
        if bwd_hooks and reset_hooks_end:
            warnings.warn(
                "backward hooks are removed after this pass, before a backward pass can call them; "
                "use `with model.hooks(bwd_hooks=...)` around both, or reset_hooks_end=False.",
                stacklevel=2,
            )
        set_fwd, set_bwd = (
            [
                (point, _without_batch(hook) if remove_batch_dim else hook)
                for name, hook in _checked(pairs)
                for point in self._passed(name, forward)
            ]
            for pairs in (fwd_hooks, bwd_hooks)
        )
        with self.hooks(set_fwd, set_bwd, reset_hooks_end, clear_contexts):
            return self.forward(input, **forward)

    @in_turn
    def run_with_cache(  # type: ignore[override]
        self,
        input: Tensor,
        return_cache_object: Any = True,
        remove_batch_dim: bool = False,
        *,
        names_filter: Any = None,
        device: torch.device | str | None = None,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: PosSlice = None,
        **forward: Any,
    ) -> tuple[Any, Any]:
        """One pass that caches the values of points, and with ``incl_bwd=True`` their gradients as ``<name>_grad``.

        Args:
            input: token ids, or the stream entering ``start_at_layer``.
            return_cache_object: False returns a dictionary instead of an `ActivationCache`.
            remove_batch_dim: drop the batch axis, which must be of length 1.
            names_filter: a name, a predicate, or several of either; None caches all points.
            device: where values are stored; None leaves them where they are.
            incl_bwd: also run the output's backward pass; the output must be a scalar, such as ``return_type="loss"``.
            reset_hooks_end: False leaves the hooks in place, so that later passes overwrite the cached values.
            clear_contexts: empty ``hook.ctx`` of the cached points.
            pos_slice: the positions to cache.
            forward: arguments of the tree's forward.

        Raises:
            HookNameError: a name or predicate matches no point of a single pass.
            SettingError: `remove_batch_dim` with several rows.
        """
        require(
            isinstance(return_cache_object, bool),
            f"the second argument of run_with_cache is return_cache_object, True or False; got a "
            f"{type(return_cache_object).__name__}. Give a mask as attention_mask=.",
        )
        require(
            not remove_batch_dim or input.ndim <= 1 or len(input) == 1,
            f"remove_batch_dim=True needs a batch of one row; got {len(input)} rows.",
        )
        points = self._passed(names_filter, forward)
        store, fwd, bwd = self.get_caching_hooks(points, incl_bwd, device, remove_batch_dim, None, pos_slice)
        with self.hooks(fwd, bwd, reset_hooks_end, clear_contexts):
            output = self(input, **forward)
            if incl_bwd:
                output.backward()
        return output, HookCache(store, self, not remove_batch_dim) if return_cache_object else store

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> tuple[dict[str, Tensor], list[HookPair], list[HookPair]]:
        """The dictionary that caching hooks will fill, and the forward and backward hooks, which are not set yet.

        A new dictionary finds values under every spelling. One that is passed as `cache` receives them under the
        points' names and under the spellings in `names_filter`.
        """
        store = ByPoint[Tensor](self.spelled) if cache is None else cache
        points, given = self.select(names_filter), [one for one in _several(names_filter) if isinstance(one, str)]
        keys: dict[str, list[str]] = {}
        for spelling in given if cache is not None else ():
            keys.setdefault(self.resolve(spelling), []).append(spelling)
        self.is_caching = True
        keep = partial(_keep, store, keys, device, Slice.unwrap(pos_slice), remove_batch_dim)
        fwd: list[HookPair] = [(point, keep) for point in points]
        bwd: list[HookPair] = [(point, partial(keep, ending=GRADIENT)) for point in points]
        return store, fwd, bwd if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Set caching hooks until `reset_hooks`; returns the dictionary that later passes fill."""
        store, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        for dir, pairs in (("fwd", fwd), ("bwd", bwd)):
            for point, keep in pairs:
                self.add_hook(point, keep, dir=dir)
        return store

    def _passed(self, chosen: Any, forward: dict[str, Any]) -> list[str]:
        """The chosen points that a single pass with these arguments of forward reaches.

        Raises:
            HookNameError: a name or predicate matches points of the sampler only.
        """
        layers = layers_run(self.cfg.n_layers, forward.get("start_at_layer"), forward.get("stop_at_layer"))
        return [
            point
            for one in ([None] if chosen is None else _several(chosen))
            for point in self._reached(one, layers, forward.get("start_at_layer") is None)
        ]

    def _reached(self, chosen: names.HookName | None, layers: range, embeds: bool) -> list[str]:
        found = self.select(chosen)
        in_a_pass = [point for point in found if not point.startswith("denoise.")]
        require(
            in_a_pass,
            f"{found[0]!r} belongs to the sampler; a single pass does not reach it. "
            f"Use sinklens.generate(model, prompt, hooks=...) or a trace block.",
            HookNameError,
        )
        ends = layers.stop == self.cfg.n_layers
        reached = [point for point in in_a_pass if _is_reached(point, layers, embeds, ends)]
        if not reached:
            warnings.warn(
                f"{in_a_pass[0]!r} is outside layers {layers.start} to {layers.stop - 1}, which start_at_layer and "
                f"stop_at_layer select: its hooks are not called and its value is not cached.",
                stacklevel=4,
            )
        return reached


def _keep(
    store: dict[str, Tensor],
    keys: dict[str, list[str]],
    device: torch.device | str | None,
    positions: Slice,
    remove_batch_dim: bool,
    value: Tensor,
    hook: HookPoint,
    ending: str = "",
) -> None:
    """Store a value of `hook` under the point's name and its other `keys`, as `get_caching_hooks` says."""
    name, kept = hook.name or "", value.detach().to(device)
    if names.has_positions(name):
        kept = positions.apply(kept, dim=names.position_axis(name))
    kept = kept[0] if remove_batch_dim and len(kept) == 1 else kept
    for key in (name, *keys.get(name, ())):
        store[key + ending] = kept


def _several(chosen: Any) -> list[names.HookName]:
    """Names and predicates, one or several, as a list."""
    if chosen is None:
        return []
    if isinstance(chosen, str) or callable(chosen):
        return [chosen]
    require(isinstance(chosen, Iterable), f"select points by a name, a predicate or a list of them; got {chosen!r}.")
    return list(chosen)


def _checked(pairs: Any) -> list[HookPair]:
    """The pairs of ``fwd_hooks=`` or ``bwd_hooks=``.

    Raises:
        HookNameError: they are not a list of pairs.
    """
    listed = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    require(
        all(isinstance(pair, list | tuple) and len(pair) == 2 and callable(pair[1]) for pair in listed),
        f"fwd_hooks= and bwd_hooks= must be lists of (name or predicate, function) pairs, [(name, fn), …]; got "
        f"{pairs!r:.80}. The pairs of an intervention are intervention.hooks_for(model).",
        HookNameError,
    )
    return listed


def _is_reached(point: str, layers: range, embeds: bool, ends: bool) -> bool:
    first, _, rest = point.partition(".")
    if first == "blocks":
        return int(rest.partition(".")[0]) in layers
    return embeds if first == "hook_embed" else ends


def _without_batch(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, called with values without their batch axis of length 1."""

    @wraps(hook)
    def called(value: Tensor, hook: HookPoint, function: Callable[..., Any] = hook) -> Any:
        if len(value) != 1:
            return function(value, hook=hook)
        changed = function(value[0], hook=hook)
        return changed[None] if isinstance(changed, Tensor) and changed.ndim == value.ndim - 1 else changed

    return called
