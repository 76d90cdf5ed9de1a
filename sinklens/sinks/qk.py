"""Why a position is a sink of a head: the attention score decomposed into lengths and direction.

Attention is decided by s[i, j] = scale · q_i · k_j = scale · |q_i| · |k_j| · cos(q_i, k_j) (Attention Floating,
2601.07894). A softmax compares the keys of one query with each other, and |q_i| is common to them. So a key attracts
attention because it is long, or because it points in the direction of the queries; long queries only sharpen the
difference. `decompose` compares each factor with that of the other keys; `why` does so for one head of a run, on
rotated queries and keys.

Limitation: the factors are means over queries. A key that a few queries score very high can receive the most attention
with an ordinary mean score; `Reason` reports this case.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import TrackError
from sinklens.utils.integers import as_integer

_VERDICTS = {
    "uniform": "no more than if all keys were equal",
    "few": "from a few queries; its mean score is not above the other keys'",
    "key_norm": "mainly because its key is longer",
    "cosine": "mainly because its key is better aligned with the queries",
    "rest": "mainly because the longer of the other keys point away from the queries",
}


@dataclass(frozen=True)
class Reason:
    """Why one position receives the attention of one head; `print` it for one line.

    Attributes:
        layer, head, step: the head and step.
        position: canvas position, including padding, as in the sink track.
        token_id: token at the position when the step began.
        text: its text; None without a tokenizer.
        share: share of the head's attention, in [0, 1].
        uniform: the share it would have if every query attended equally to all keys it may see.
        factors: `decompose` over the keys of the canvas; the coordinate ``key`` is the position.
    """

    layer: int
    head: int
    step: int
    position: int
    token_id: int
    text: str | None
    share: float
    uniform: float
    factors: xr.Dataset

    @property
    def chief(self) -> str:
        """The main reason why the position is a sink, as one word.

        "uniform": it is not a sink, its share is not above uniform; "few": its mean score is not above the other keys',
        so its share comes from a few queries; otherwise the largest part of ``score_excess``: "key_norm", "cosine" or
        "rest".
        """
        here = self.factors.sel(key=self.position)
        if self.share <= self.uniform:
            return "uniform"
        if not float(here["score_excess"]) > 0:
            return "few"
        return max(("key_norm", "cosine", "rest"), key=lambda part: float(here[f"from_{part}"]))

    def __str__(self) -> str:
        here = {str(name): float(value) for name, value in self.factors.sel(key=self.position).data_vars.items()}
        token = f"token {self.token_id}" if self.text is None else f"token {self.token_id}, {self.text!r}"
        return (
            f"position {self.position} ({token}) receives {self.share:.1%} of head {self.layer}.{self.head} at step "
            f"{self.step} (uniform {self.uniform:.1%}), {_VERDICTS[self.chief]}: |k| {here['key_norm_ratio']:.2f} × "
            f"the other keys', cosine {here['cosine']:+.2f} (others {here['cosine'] - here['cosine_excess']:+.2f}), "
            f"score {here['score']:+.2f} (others {here['score'] - here['score_excess']:+.2f})"
        )


def decompose(
    query: Float[Tensor, "query d_head"],
    key: Float[Tensor, "key d_head"],
    scale: float | int,
    seen: Bool[Tensor, "query key"] | None = None,
) -> xr.Dataset:
    """The factors of the attention scores s[i, j] = scale · |q_i| · |k_j| · cos(q_i, k_j), per key j.

    Means are over the queries i that may see j and at least one other key; a query that sees a single key has nothing
    to compare. x̄_i is the mean of x over the other keys that query i may see. Variables [key], in float64:

    - ``key_norm`` |k_j|; ``query_norm`` mean |q_i|; ``cosine`` mean cos(q_i, k_j); ``score`` mean s[i, j].
    - ``key_norm_ratio`` |k_j| / mean x̄_i of the key norms; ``cosine_excess``, ``score_excess``: mean (x − x̄_i), since a
      ratio is meaningless for values of either sign. ``query_norm_ratio``: query_norm / its mean over the other keys;
      it differs from 1 only under causal order, where keys have different queries.
    - ``from_key_norm`` mean scale · |q_i| (|k_j| − |k̄|_i)(cos + cos̄_i) / 2, and ``from_cosine`` mean scale · |q_i|
      (cos − cos̄_i)(|k_j| + |k̄|_i) / 2: the parts of score_excess due to the length of the key and to its
      direction. ``from_rest`` is the remainder: −mean scale · |q_i| · cov_i, the covariance of length and cosine
      among the other keys. The three sum to score_excess.

    All except key_norm are NaN where no such query may see the key; a zero vector has cosine 0.

    Args:
        scale: factor on the scores, usually 1 / √d_head.
        seen: True where a query may see a key; None means everywhere.
    """
    query, key = query.detach().cpu().double(), key.detach().cpu().double()  # not every device has float64
    dots, length = query @ key.T, query.norm(dim=1)[:, None]
    norm = key.norm(dim=1).expand_as(dots)
    cosine = torch.where(length * norm > 0, dots / (length * norm), 0.0)
    others = _Others(torch.ones_like(dots, dtype=torch.bool) if seen is None else seen.cpu())
    norm0, cosine0, score0 = others.mean(norm), others.mean(cosine), others.mean(scale * dots)
    query_norm = others.over_queries(length.expand_as(dots))
    values = {
        "key_norm": norm[0],
        "key_norm_ratio": norm[0] / others.over_queries(norm0),
        "query_norm": query_norm,
        "query_norm_ratio": query_norm / _leave_one_out(query_norm),
        "cosine": others.over_queries(cosine),
        "cosine_excess": others.over_queries(cosine - cosine0),
        "score": others.over_queries(scale * dots),
        "score_excess": others.over_queries(scale * dots - score0),
        "from_key_norm": others.over_queries(scale * length * (norm - norm0) * (cosine + cosine0) / 2),
        "from_cosine": others.over_queries(scale * length * (cosine - cosine0) * (norm + norm0) / 2),
    }
    values["from_rest"] = values["score_excess"] - values["from_key_norm"] - values["from_cosine"]
    return xr.Dataset({name: ("key", value.numpy()) for name, value in values.items()})


def why(model: Any, run: Any, step: int, layer: int, head: int, row: int = 0, position: int | None = None) -> Reason:
    """Why a position is the strongest key of a head at a step: `decompose` on its rotated queries and keys.

    One pass of `model` over the step's canvas, without padding and undecided positions (-1); grouped heads use the key
    of their group. Hooks of the run are not applied again, so under an intervention the share can differ from the run's
    sink track.

    Args:
        model: a `sinklens.Model`.
        run: a `Generation`, or a trace after its block.
        step, layer, head, row: indices; negative ones count from the end.
        position: canvas position to explain, including padding; by default the one that receives the most attention.

    Raises:
        TrackError: a step, layer, head, row or position that does not exist, a position that is padding or not decoded
            yet, or a run of a model of another kind or vocabulary.
    """
    _check_model(model, run)
    step = _place("step", step, run.canvas.shape[1] - 1)
    layer, head = _place("layer", layer, model.cfg.n_layers), _place("head", head, model.cfg.n_heads)
    row = _place("row", row, len(run.canvas))
    canvas = run.canvas[row, step]
    positions = (run.real[row] & (canvas >= 0)).nonzero()[:, 0].tolist()
    query, key, received = _read(model, canvas[positions], layer, head)
    seen = torch.ones(len(query), len(key), dtype=torch.bool)
    seen = seen.tril() if model.causal else seen
    factors = decompose(query, key, query.shape[1] ** -0.5, seen).assign_coords(key=positions)
    index = int(received.argmax()) if position is None else _index(position, positions, len(canvas))
    token = int(canvas[positions[index]])
    return Reason(
        layer, head, step, positions[index], token,
        None if model.tokenizer is None else str(model.tokenizer.decode([token])),
        float(received[index] / received.sum()),
        float((seen / seen.sum(dim=1, keepdim=True)).mean(dim=0)[index]),
        factors,
    )  # fmt: skip


def _check_model(model: Any, run: Any) -> None:
    """Reject the canvas of a model of another kind or vocabulary, whose ids mean something else."""
    run_model = getattr(run, "model", None)
    if run_model is None or run_model is model:
        return
    kinds = [(one.causal, one.cfg.d_vocab) for one in (model, run_model)]
    if kinds[0] != kinds[1]:
        names = [
            "{} with {} tokens".format("autoregressive" if causal else "diffusion", size) for causal, size in kinds
        ]
        raise TrackError(f"the model is {names[0]}, the run's {names[1]}; pass the model that made the run.")


def _read(
    model: Any, ids: Int[Tensor, " pos"], layer: int, head: int
) -> tuple[Float[Tensor, "query d_head"], Float[Tensor, "key d_head"], Float[Tensor, " key"]]:
    """Rotated queries and keys of a head, and the attention received by each key."""
    points = [f"blocks.{layer}.attn.{name}" for name in ("hook_rot_q", "hook_rot_k", "hook_sink_scores")]
    quiet = getattr(model, "tree", model)  # a Model warns about canvases without masks, such as a run's last
    with torch.no_grad():
        _, cache = quiet.run_with_cache(ids[None].to(model.cfg.device), names_filter=points)
    query, key, received = (cache[name][0] for name in points)
    return query[:, head], key[:, head * key.shape[1] // query.shape[1]], received[head]


def _place(name: str, value: int, size: int) -> int:
    index = as_integer(value)
    if index is None:
        raise TrackError(f"{name} must be an integer from 0 to {size - 1}; got {value!r}.")
    if not -size <= index < size:
        raise TrackError(f"{name} {value} does not exist; this run has {size}, 0 to {size - 1}.")
    return index % size


def _index(position: int, positions: Sequence[int], length: int) -> int:
    """Index of `position` among the positions of the pass."""
    position = _place("position", position, length)
    if position not in positions:
        raise TrackError(
            f"position {position} is padding or not decoded yet at this step; choose {positions[0]} to {positions[-1]}."
        )
    return positions.index(position)


class _Others:
    """Means over the other keys of a query, and over the queries that see more than one key."""

    def __init__(self, seen: Bool[Tensor, "query key"]) -> None:
        self.seen = seen
        self.count = seen.sum(dim=1, keepdim=True) - seen.long()
        self.choice = seen & (self.count > 0)

    def mean(self, values: Float[Tensor, "query key"]) -> Float[Tensor, "query key"]:
        """For each query and key, the mean over the other keys that the query may see."""
        visible = torch.where(self.seen, values, 0.0)
        return (visible.sum(dim=1, keepdim=True) - visible) / self.count.clamp(min=1)

    def over_queries(self, values: Float[Tensor, "query key"]) -> Float[Tensor, " key"]:
        """For each key, the mean over the queries that may see it and another key; NaN without such a query."""
        return torch.where(self.choice, values, 0.0).sum(dim=0) / self.choice.sum(dim=0)


def _leave_one_out(values: Float[Tensor, " key"]) -> Float[Tensor, " key"]:
    """For each key, the mean over the others that are not NaN."""
    valid = ~values.isnan()
    return (values.nansum() - values.nan_to_num()) / (valid.sum() - valid.long())
