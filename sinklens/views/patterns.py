"""Attention patterns of a finished run, recorded during the run or recomputed, and the picture of one.

A run keeps sink scores, not patterns (2 GB per step for an 8-billion-parameter model). A pattern requested afterwards
is recomputed by one pass of the unchanged model over the canvas of the step. The result is checked: its column sums
must equal the scores that the run recorded.

Known failure: hooks, or statements of a trace block, changed what the model computed, or a cache policy reused keys.
The column sums then differ, and the pattern has to be recorded during the run. A change too small to show in them
(`TOLERANCE`) goes unnoticed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import TrackError, require
from sinklens.hooks.forward_pass import PassKind
from sinklens.sinks.drawing import axes_or_new
from sinklens.sinks.labels import plain, token_label, token_ticks
from sinklens.sinks.palette import color_map
from sinklens.utils.arguments import Words, checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinklens.runs import Trace
    from sinklens.runs.result import Generation

HeadPattern = Annotated[Tensor | np.ndarray, Words("the pattern of one head, as pattern_at(run, step, layer)[head]")]

# Largest share of a head's attention that may differ from the run, by the model's dtype. The explicit and the fused
# kernel round differently, and this accumulates over layers: the shipped models differ by at most 3e-7 in float32, 3e-4
# in float16 and 2e-3 in bfloat16; 24 layers of random weights, which amplify every rounding error, by 2e-6, 7e-3 and
# 8e-2. Masking one sink moves more than this in its head.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}


def generation_of(t: "Generation | Trace") -> "Generation":
    """The finished run of `t`.

    Raises:
        SettingError: `t` is neither a `Generation` nor a trace.
        HookOrderError: the trace has not run.
    """
    return getattr(t, "generation", t)


@checked
def pattern_at(run: "Generation | Trace", step: int, layer: int, row: int = 0) -> Float[Tensor, "head query key"]:
    """Attention pattern of one step and layer, on the real positions of row `row`; rows of a softmax sum to 1.

    Left padding is excluded, and so are positions that an autoregressive run had not reached. In a recorded pattern,
    rows of queries that the step did not compute are NaN: those that a cache policy left out, and the text before the
    canvas of a model with an encoder. Query i and key i are position ``first + i`` of the run's canvas, with ``first``
    the length of the row's padding.

    Args:
        run: a run with sink scores. Its model recomputes the pattern unless ``run.patterns`` has it.
        step, layer, row: indices; negative numbers count from the end.

    Raises:
        TrackError: no such step, layer or row; no sink scores to check against; or the run was changed by hooks, by
            its block or by a cache policy, and did not record this pattern.
    """
    return patterns_at(run, step, [layer], row)[layer]


@checked
def pattern_map(
    pattern: HeadPattern,
    tokens: Sequence[str],
    ax: "Axes | None" = None,
    *,
    queries: Sequence[str] | None = None,
    title: str = "",
) -> "Axes":
    """A picture of one head's attention pattern, labeled with tokens; queries without values are gray.

        views.pattern_map(views.pattern_at(run, step=4, layer=1)[2], words).figure.savefig("head.pdf")

    A new figure has room for 60 labels along each axis. If there are more positions, those that receive the most
    attention are labeled. `attention(...).picture()` takes the tokens from the run.

    Args:
        pattern: [query, key].
        tokens: text of each key.
        queries: text of each query; by default `tokens`.
        title: text above the picture.

    Raises:
        SettingError: `pattern` is not a map, or its size is not that of the texts.
    """
    values, queries = (
        np.asarray(torch.as_tensor(pattern).detach().float().cpu()),
        tokens if queries is None else queries,
    )
    require(
        values.shape == (len(queries), len(tokens)) and values.size,
        f"pattern has shape {list(values.shape)} for {len(queries)} queries × {len(tokens)} keys with a text; pass the "
        f"pattern of one head, [query, key], one text in tokens= per key and, if there are fewer queries, queries=.",
    )
    inches = [1.2 + 0.12 * max(8, min(60, size)) for size in values.shape]
    ax = axes_or_new(ax, (inches[1] + 1, inches[0] + 0.4))
    image = ax.imshow(values, aspect="auto", cmap=color_map(), interpolation="nearest", vmin=0)
    received = np.nansum(values, axis=0)
    for axis, texts in ((ax.xaxis, tokens), (ax.yaxis, queries)):
        token_ticks(axis, [token_label(text) for text in texts], received if len(texts) == len(received) else None)
    ax.set(xlabel="key", ylabel="query", title=plain(title))
    ax.figure.colorbar(image, ax=ax, label="attention")
    return ax


def patterns_at(
    t: "Generation | Trace", step: int, layers: Sequence[int], row: int = 0
) -> dict[int, Float[Tensor, "head query key"]]:
    """`pattern_at` of several layers of one step, keyed by `layers` as given; they share one pass."""
    run = generation_of(t)
    track = recorded(run)
    for layer in layers:
        track.require(step=step, layer=layer, batch=row)
    sizes = track.data.sizes
    step, row, wanted = step % sizes["step"], row % sizes["batch"], {layer: layer % sizes["layer"] for layer in layers}
    exists = run.real[row] & (run.canvas[row, step] >= 0)
    if run.kind_at(step) is not None:  # a pass of such a model ends with its block
        scored = track.data["score"][row, step].notnull().any(("layer", "head")).to_numpy()
        exists &= torch.from_numpy(scored)[: len(exists)]
    missing = sorted({layer for layer in wanted.values() if (step, layer) not in run.patterns})
    found = _computed(run, step, missing, row, exists) if missing else {}
    for layer in set(wanted.values()) - set(missing):
        pattern = run.patterns[step, layer][row].float().cpu()
        length = pattern.shape[-1]
        missed = length - pattern.shape[1]  # queries before those of the pass: the text that an encoder has read
        pattern = torch.nn.functional.pad(pattern, (0, 0, missed, 0), value=torch.nan)
        found[layer] = pattern[:, exists[:length]][:, :, exists[:length]]
    return {name: found[layer] for name, layer in wanted.items()}


def recorded(run: "Generation") -> Any:
    """The run's sink track.

    Raises:
        TrackError: the run recorded no sink scores.
    """
    require(
        run.sinks is not None,
        "this run recorded no sink scores (record_sinks=False, or no step ended); run it again with "
        "record_sinks=True, the default.",
        TrackError,
    )
    return run.sinks


def _computed(
    run: "Generation", step: int, layers: Sequence[int], row: int, exists: Bool[Tensor, " pos"]
) -> dict[int, Float[Tensor, "head query key"]]:
    """Patterns of the unchanged model over the step's canvas, checked against the run's scores."""
    model = run.model
    require(
        not run.settings.slides,
        f"a step of the {run.settings.name} sampler sees a window of the text, and a separate pass sees all of the "
        f"text; record its patterns with Record(patterns=[(step, layer)]).",
        TrackError,
    )
    names = {layer: f"blocks.{layer}.attn.hook_pattern" for layer in layers}
    ids = run.canvas[row, step][exists][None].to(model.cfg.device)
    with torch.no_grad():
        time = run.time_at(step)
        time = None if time is None else time[[row]]
        if (kind := run.kind_at(step)) is None:
            _, cache = model.tree.run_with_cache(ids, names_filter=list(names.values()), time=time)
        else:
            cache = model.tree.peek(ids, None, names.values(), time, _moved(kind, int((~run.real[row]).sum())))
    found = {layer: cache[name][0].float().cpu() for layer, name in names.items()}
    track = recorded(run)
    policy = track.data.attrs.get("cache")
    cause = f"the step reused keys under {policy}" if policy else "hooks or the trace's block changed the run"
    scores = track.isel(batch=row, step=step, layer=list(layers)).scores().to_numpy()[0, 0]
    for layer, expected in zip(layers, torch.from_numpy(scores)[:, :, exists], strict=True):
        _check(found[layer], expected, (step, layer), TOLERANCE.get(model.cfg.dtype, max(TOLERANCE.values())), cause)
    return found


def _moved(kind: PassKind, padding: int) -> PassKind:
    """What a pass is, with the columns of its segments counted without the padding before the text."""
    if kind.segments is None:
        return kind
    segments = (range(max(0, one.start - padding), max(0, one.stop - padding)) for one in kind.segments)
    return kind._replace(segments=tuple(segments))


def _check(
    pattern: Float[Tensor, "head query key"],
    scores: Float[Tensor, "head key"],
    place: tuple[int, int],
    limit: float,
    cause: str,
) -> None:
    """Compare ½ Σ_j |Σ_i A[i, j] − score_j| / S, the share of attention that differs at (step, layer), with `limit`.

    Raises:
        TrackError: it is larger; the message gives `cause` as the reason.
    """
    elsewhere = 0.5 * (pattern.sum(dim=1) - scores).abs().sum(dim=-1) / pattern.shape[1]
    if not bool((elsewhere <= limit).all()):  # also where a score is NaN
        head = int(elsewhere.nan_to_num(nan=torch.inf).argmax())
        raise TrackError(
            f"the pattern of step {place[0]}, layer {place[1]} cannot be recomputed: {float(elsewhere[head]):.1%} of "
            f"the attention of head {head} differs between the run and a pass of the unchanged model (allowed: "
            f"{limit:.1%}), because {cause}. Record the pattern during the run: sinklens.trace(..., "
            f"record_sinks=Record(patterns=[{place}])), with Record from sinklens.sinks."
        )
