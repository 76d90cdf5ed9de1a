"""Attention patterns of a finished run: those it recorded, or the same passes made again.

A run keeps sink scores, not patterns (an 8-billion-parameter model has 2 GB of them a step). A pattern wanted
afterwards is computed again, by one pass of the unchanged model over the canvas that the step worked on. Whether that
pass is the one the run made is checked: its column sums must be the scores that the run recorded.

One way this fails: hooks, or statements of a trace block, changed what the model computed. The column sums then differ,
and the pattern has to be recorded while the run goes on. A change too small to be seen in them (`TOLERANCE`) passes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SinklensError, TrackError

if TYPE_CHECKING:
    from sinklens.runs.result import Generation
    from sinklens.tracing import Trace

# Share of a head's attention that may lie elsewhere than in the run, by the type the model computes in. The explicit
# and the fused kernel round differently, and layers add that up: the shipped models differ by at most 3e-7 in float32,
# 3e-4 in float16 and 2e-3 in bfloat16; 24 layers of random weights, which multiply every rounding, by 2e-6, 7e-3 and
# 8e-2. Masking one sink moves more than this in the head it is masked in.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


def generation_of(t: "Generation | Trace") -> "Generation":
    """The finished run behind `t`.

    Raises:
        SinklensError: `t` is neither a `Generation` nor a trace.
        HookOrderError: the trace has not run.
    """
    run: Any = getattr(t, "generation", t)
    if not hasattr(run, "canvas") or not hasattr(run, "sinks"):
        raise SinklensError(
            f"a run is needed: what sinklens.generate returned, or the trace after its `with` block; got "
            f"{type(t).__name__}."
        )
    return run


def pattern_at(t: "Generation | Trace", step: int, layer: int, row: int = 0) -> Float[Tensor, "head query key"]:
    """Attention pattern of one step and layer, on the real positions of row `row`; rows of a softmax sum to 1.

    Left padding is left out, and so are positions that an autoregressive run had not reached. Query i and key i are
    position ``first + i`` of the run's canvas, with ``first`` the length of the row's padding.

    Args:
        t: a run with sink scores. Its model computes the pattern again unless ``run.patterns`` has it.
        step, layer, row: which; negative numbers count from the end.

    Raises:
        TrackError: no such step, layer or row; no sink scores to check against; or the run was changed by hooks or by
            its block, and did not record this pattern.
    """
    return patterns_at(t, step, [layer], row)[layer]


def patterns_at(
    t: "Generation | Trace", step: int, layers: Sequence[int], row: int = 0
) -> dict[int, Float[Tensor, "head query key"]]:
    """`pattern_at` of several layers of one step, by layer as asked for; they cost one pass together."""
    run = generation_of(t)
    track = recorded(run)
    for layer in layers:
        track.require(step=step, layer=layer, batch=row)
    sizes = track.data.sizes
    step, row, wanted = step % sizes["step"], row % sizes["batch"], {layer: layer % sizes["layer"] for layer in layers}
    exists = run.real[row] & (run.canvas[row, step] >= 0)
    missing = sorted({layer for layer in wanted.values() if (step, layer) not in run.patterns})
    found = _computed(run, step, missing, row, exists) if missing else {}
    for layer in set(wanted.values()) - set(missing):
        whole = run.patterns[step, layer][row].float().cpu()
        length = whole.shape[-1]
        found[layer] = whole[:, exists[:length]][:, :, exists[:length]]
    return {asked: found[layer] for asked, layer in wanted.items()}


def recorded(run: "Generation") -> Any:
    """The run's sink track.

    Raises:
        TrackError: it recorded none.
    """
    if run.sinks is None:
        raise TrackError(
            "this run recorded no sink scores (record_sinks=False, or no step ended); run it again with "
            "record_sinks=True, the default."
        )
    return run.sinks


def _computed(
    run: "Generation", step: int, layers: Sequence[int], row: int, exists: Bool[Tensor, " pos"]
) -> dict[int, Float[Tensor, "head query key"]]:
    """Patterns of the unchanged model over the step's canvas, checked against the run's scores."""
    model = run.model
    names = {layer: f"blocks.{layer}.attn.hook_pattern" for layer in layers}
    ids = run.canvas[row, step][exists][None].to(model.cfg.device)
    with torch.no_grad():
        _, cache = model.tree.run_with_cache(ids, names_filter=list(names.values()))
    found = {layer: cache[name][0].float().cpu() for layer, name in names.items()}
    scores = recorded(run).isel(batch=row, step=step, layer=list(layers)).scores().to_numpy()[0, 0]
    for layer, expected in zip(layers, torch.from_numpy(scores)[:, :, exists], strict=True):
        _check(found[layer], expected, step, layer, TOLERANCE.get(model.cfg.dtype, max(TOLERANCE.values())))
    return found


def _check(
    pattern: Float[Tensor, "head query key"], scores: Float[Tensor, "head key"], step: int, layer: int, limit: float
) -> None:
    """Compare ½ Σ_j |Σ_i A[i, j] − score_j| / S, the share of attention that lies elsewhere, with `limit`."""
    elsewhere = 0.5 * (pattern.sum(dim=1) - scores).abs().sum(dim=-1) / pattern.shape[1]
    if not bool((elsewhere <= limit).all()):  # also where a score is NaN
        head = int(elsewhere.nan_to_num(nan=torch.inf).argmax())
        raise TrackError(
            f"the pattern of step {step}, layer {layer} cannot be computed again: {float(elsewhere[head]):.1%} of the "
            f"attention of head {head} lay elsewhere in the run than in a pass of the unchanged model (allowed: "
            f"{limit:.1%}), so hooks or the trace's block changed the run. Record the pattern while the run goes on: "
            f"sinklens.trace(..., record_sinks=Record(patterns=[({step}, {layer})])), with Record from sinklens.sinks."
        )
