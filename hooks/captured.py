"""The passes of a run, captured once and replayed in its later steps.

In a short text, or a small network, starting a pass costs more than computing it: thousands of calls of Python and of
the GPU's driver. The shapes of a denoising run stay the same, so its pass is *captured* as a CUDA graph: the sequence
of kernels, with the memory they read and write. A *replay* starts all of them in one call. The graphs of a model share
their memory: what a replay leaves there, the next one overwrites, so its output and its sink scores are copied.

The first pass of a kind runs without a graph, so that kernels are compiled, tried (trust.py) and timed (tiles.py). The
second is captured. It is used if a replay agrees with a plain pass over the same inputs: at every position, the two
outputs differ by at most `fused.TOLERANCE` of their length, and so do the scores of each head. Later passes of this
kind, also of later runs, are replayed.

A pass that Python takes part in runs as it always did: one with a trace block or a hook function inside it, with a
cache of keys, with experts, offloaded or quantized weights, or in training. Hooks on ``hook_attn_mask``, as those of
`MaskSinks`, get zeros, which do not depend on the pass: they are called before it, and a replay reads what they
returned. `fingerprint` says what has to be equal for a replay. ``sinklens.hooks.captured.DEVICES = ()`` turns captures
off.

Pitfall: a replay calls no Python. A hook on a module of transformers is noticed when a run begins, and its passes are
then not captured. One that is registered, or weights that are replaced, while the run lasts, are not noticed.

Limitation: PyTorch may choose other kernels for a capture, which round differently. On the CPU, where tests record
operations instead of kernels, replays equal plain passes bit for bit; on a GPU that has not been shown.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sinklens.errors import require
from sinklens.hooks.attention import column_sums, fused
from sinklens.hooks.attention.layer_sums import LayerSums
from sinklens.hooks.attention.masks import bias_of, hooked_masks, known, of_one_hook, only_masks
from sinklens.hooks.points import Point, Watch

DEVICES: tuple[str, ...] = ("cuda",)  # kinds of devices on which passes are captured
KEPT = 6  # captured passes of a model; they share their memory
POSITIONS = 2048  # rows times columns; a longer pass keeps the GPU busy without a graph, which would hold much memory
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OF_MODULES = vars(nn.Module()).keys()
PLAIN = (bool, int, float, str, Tensor, nn.Parameter)
KNOWN = ("sinklens.hooks.", "nnsight.", "transformers.")  # whose hooks and forwards do nothing in a plain pass


Forward = Callable[[dict[Any, Tensor]], Tensor]


class Captured(NamedTuple):
    """A captured pass.

    Attributes:
        given: the tensors that a replay reads: inputs by name, and masks by their point.
        outputs: what it computes, and the next replay overwrites: the output of the stack [batch, pos, d_model], and
            the recorded scores [layer, batch, head, key] or None.
        points: the points of ``hook_sink_scores`` of these scores.
        graph: a `torch.cuda.CUDAGraph`.
    """

    given: dict[Any, Tensor]
    outputs: tuple[Tensor, Tensor | None]
    points: list[Point]
    graph: Any

    def replay(self, given: dict[Any, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The `outputs` for other inputs."""
        for name, value in given.items():
            self.given[name].copy_(value)
        self.graph.replay()
        return self.outputs


class Captures:
    """The captured passes of one model."""

    def __init__(self) -> None:
        self._model: Hashable = None  # the fingerprint of the captured model
        self._running = False
        self._kept: dict[Hashable, Captured] = {}  # the one used last comes last
        self._capturable: dict[Hashable, bool] = {}  # kinds of passes that have run

    def __reduce__(self) -> tuple[type["Captures"], tuple[()]]:
        return Captures, ()

    def clear(self) -> None:
        """Release the captured passes, and forget which kinds cannot be captured."""
        self._kept.clear()
        self._capturable.clear()

    @contextmanager
    def during_run(self, tree: Any) -> Iterator[None]:
        """Capture and replay passes inside this context, if the model allows it."""
        if DEVICES and (found := fingerprint(tree)) != self._model:
            self.clear()
            self._model = found
        self._running = bool(DEVICES) and self._model is not None
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError):
            self.clear()
            raise
        finally:
            self._running = False

    def usable(self, watch: Watch, ids: Tensor) -> bool:
        """Whether the pass of a step may be captured: no trace block, cache or hook inside takes part in it."""
        counted = watch.forward_pass.counted is not None
        return self._running and ids.numel() <= POSITIONS and not counted and only_masks(watch)

    def run(self, tree: Any, inputs: dict[str, Any], base: Any) -> Float[Tensor, "batch pos d_model"]:
        """The output of the stack `base` for `inputs`, from a graph if there is one.

        The sink scores that the run records go to ``watch.sums``.
        """
        watch, ids = tree.watch, inputs["input_ids"]
        given: dict[Any, Tensor] = {name: value for name, value in inputs.items() if value is not None}

        def forward(given: dict[Any, Tensor]) -> Tensor:
            watch.biases = {point: given.get(point) for point in biases}
            named = {name: value for name, value in given.items() if isinstance(name, str)}
            return base(**named, use_cache=False).last_hidden_state

        size, like = (len(ids), tree.cfg.n_heads, 1, ids.shape[1]), next(base.parameters())
        biases = of_one_hook(watch, size, like) or {point: bias_of(point, size, like) for point in hooked_masks(watch)}
        given |= {point: bias for point, bias in biases.items() if bias is not None}
        large = any(bias is not None and (bias.shape[2] > 1 or not bias.is_contiguous()) for bias in biases.values())
        with known(watch, biases, ids.device):
            kept = None if large else self._of_kind(watch, given, forward)  # a large one is not kept for every layer
            if kept is None:
                return forward(given)
            hidden, scores = kept.replay(given)
        for point, of_layer in zip(kept.points, () if scores is None else scores.clone(), strict=True):
            watch.sums.put(point, of_layer)
        return hidden.clone()

    def _of_kind(self, watch: Watch, given: dict[Any, Tensor], forward: Forward) -> Captured | None:
        """The captured pass with such inputs; None for one that has not run before, or cannot be captured."""
        recorded = None if watch.sums is None else (watch.sums.rows, frozenset(watch.sums.layers))
        hooked = frozenset(hooked_masks(watch))
        kind = (recorded, hooked, *((name, value.shape, value.dtype) for name, value in given.items()))
        kept = self._kept.pop(kind, None)
        if kept is None:
            if self._capturable.get(kind, False):
                while len(self._kept) >= KEPT:
                    oldest = next(iter(self._kept))
                    del self._kept[oldest], self._capturable[oldest]
                pool = next((one.graph.pool() for one in self._kept.values()), None)
                kept = _captured(watch, given, forward, pool)
            self._capturable[kind] = kept is not None or kind not in self._capturable
        if kept is not None:
            self._kept[kind] = kept
        return kept


def _captured(watch: Watch, given: dict[Any, Tensor], forward: Forward, pool: Any) -> Captured | None:
    """The pass, captured; None, with a warning, if it cannot be captured or a replay differs from a plain pass."""
    static = {name: value.clone() for name, value in given.items()}
    sums, described = watch.sums, watch.forward_pass
    points: list[Point] = []

    def whole() -> tuple[Tensor, Tensor | None]:
        if sums is None:
            return forward(static), None
        watch.sums = own = LayerSums(sums.rows)
        hidden = forward(static)
        own.end_step()
        points[:] = own.latest
        return hidden, torch.stack([one.scores for one in own.latest.values()])

    try:
        outputs, graph = capture(whole, static["input_ids"].device, pool)
        kept = Captured(static, outputs, points, graph)
        difference = _difference(kept.replay(given), whole())
        require(
            difference <= fused.TOLERANCE.get(outputs[0].dtype, 1e-3),  # NaN is no agreement
            f"its replay differs from it by {difference:.2g} of its length",
            ArithmeticError,
        )
        return kept
    except Exception as error:  # noqa: BLE001 - CUDA and libraries raise many kinds; the warning names it
        first = error.__context__ or error  # ending the capture raises another error
        warnings.warn(
            f"this pass runs without a CUDA graph, which is slower and gives the same results: "
            f"{type(first).__name__}: {' '.join(str(first).split())[:300]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    finally:
        watch.sums, watch.forward_pass = sums, described


def _difference(found: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """The largest difference of two vectors along the last axes, as a share of the length of the expected one."""
    both = zip(found, expected, strict=True)
    pairs = [(one.float(), other.float()) for one, other in both if one is not None and other is not None]
    shares = [(one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30) for one, other in pairs]
    return torch.stack([share.max() for share in shares]).max().item()


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Any, Any]:
    """What `run` returned, and the graph that computes it into the same tensors; nothing is computed yet.

    Args:
        pool: the memory of another graph, to use again; None for new memory.
    """
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    pool = pool or torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool, _stream(device), capture_error_mode="thread_local"):
            found = run()
    except BaseException:  # PyTorch then leaves the stream and the memory of the capture in use
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        raise
    return found, graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which passes are captured; graphs that share memory need the same one."""
    return torch.cuda.Stream(device)


def fingerprint(tree: Any) -> Hashable:
    """What has to be equal for a replay to be the pass of this model; None if its passes cannot be captured.

    It covers the address, shape and type of every parameter and buffer, the class of every module, its settings and
    those of the configuration that are numbers, texts or tensors, and PyTorch's settings for attention and products.
    """
    architecture, device = tree.architecture, tree.hf.device
    unlike = tree.causal or tree.adapter or tree.changes_attention or architecture.encoder or architecture.experts
    if device.type not in DEVICES or _under_a_mode(device) or unlike or tree.attention_blocks is not None:
        return None
    found: list[Hashable] = [_plain(vars(tree.hf.config))]
    devices, types = set(), set()
    for module in tree.hf.modules():
        own = vars(module)
        called = [function for name in HOOKS for function in own[name].values()]
        called += [own["forward"]] if "forward" in own else []
        if module.training or "_hf_hook" in own or not all(map(_is_known, called)):
            return None
        tensors = [one for part in ("_parameters", "_buffers") for one in own[part].values() if one is not None]
        if not all(one.is_floating_point() and one.element_size() > 1 for one in tensors):
            return None  # quantized
        devices |= {one.device for one in tensors}
        types |= {one.dtype for one in own["_parameters"].values() if one is not None}
        found.append((id(type(module)), _plain(own), *map(_place, tensors)))
    return (*found, *_settings()) if devices == {device} and len(types) == 1 else None


def _under_a_mode(device: torch.device) -> bool:
    """Whether something sees or changes every operation: autocast, a dispatch mode, or hooks on all modules."""
    everywhere = nn.modules.module
    hooks = everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks
    return bool(hooks) or torch._C._len_torch_dispatch_stack() > 0 or torch.is_autocast_enabled(device.type)


def _settings() -> tuple[Hashable, ...]:
    """Settings of PyTorch and sinklens that choose kernels."""
    backends = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(), backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled(), backends.cudnn_sdp_enabled(),
        backends.matmul.allow_tf32, backends.matmul.allow_bf16_reduced_precision_reduction,
        column_sums.TRITON_DEVICES, fused.FUSED_DEVICES,
    )  # fmt: skip


def _plain(values: dict[str, Any]) -> tuple[Hashable, ...]:
    """The entries that are numbers, texts or tensors, alone or in containers."""
    own = {name: one for name, one in values.items() if name not in OF_MODULES and not name.startswith("sinklens_")}
    leaves = ((name, one) for name, value in own.items() for one in tree_leaves(value) if type(one) in PLAIN)
    return tuple((name, _place(one) if isinstance(one, Tensor) else one) for name, one in leaves)


def _place(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_known(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(KNOWN)
