"""The Jacobian lens by noise level: early streams moved by what they do to the last one, to first order.

For each layer l and each bucket of the masked share (see tuned_lens.py),

    J_l = mean over passes of 1/|V| Σ_{t ∈ V} Σ_{t' ∈ T(t)} ∂h_last[t'] / ∂h_l[t],

where V are the streams that predict a step's undecided positions, or the answer of an autoregressive run. A reading is
softmax(W_U · norm(J_l h)), so J_l = I is the logit lens. For causal models (Gurnee et al., "Verbalizable
Representations Form a Global Workspace in Language Models", 2026; as in TransformerLens 4.3) T(t) are the valid
positions from t on. A bidirectional model has no order, so here ``targets="all"`` is T(t) = V, and ``targets="own"`` is
T(t) = {t}: what a position does to its own prediction. In a causal model, the derivatives at earlier positions are 0,
so T(t) = V is the causal definition.

h ↦ J h is the affine map of a `TunedLens` with A = Jᵀ − 1 and b = 0, and `fit_jacobian_lens` returns one: pass it as
``lens=``. Nothing is trained: it can only carry what later layers compute on average, to first order.

Caveat: derivatives of different passes may cancel in the mean; and with ``targets="own"`` one pass gives one position.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.attribution import differentiable
from sinklens.experiments.lens import streams_before
from sinklens.experiments.step_ids import exact_step
from sinklens.experiments.tuned_lens import TunedLens, check_buckets, masked_share, predicted_places
from sinklens.hooks.points import Point
from sinklens.runs import generate
from sinklens.runs.intervention import Pairs
from sinklens.utils.integers import as_seed

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


class _Step(NamedTuple):
    """A step of a row of a run, and the positions whose tokens it predicts."""

    run: "Generation"
    row: int
    step: int
    predicted: Bool[Tensor, " pos"]


def fit_jacobian_lens(
    model: "Model",
    prompts: Sequence[Any],
    *,
    buckets: int = 4,
    targets: Literal["all", "own"] = "all",
    passes: int = 16,
    dims: int = 16,
    rows: int = 16,
    seed: int = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> TunedLens:
    """Fit a Jacobian lens on runs of `prompts`.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        buckets: number of equal parts of the masked share, each with its own matrices; 1 for an autoregressive model.
        targets: positions whose last stream counts: "all" undecided ones, or each one's "own".
        passes: steps per bucket, drawn among the rows and steps of all runs. Each takes
            d_model / `dims` backward passes.
        dims: dimensions per backward pass, each with a copy of the row.
        rows: prompts per run.
        seed: of the runs and of the draws.
        chat_template, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: several buckets of an autoregressive model, a number below 1, unknown targets, or a bucket
            without steps.
    """
    check_buckets(model, buckets)
    if min(buckets, passes, dims, rows) < 1:
        raise SettingError("buckets, passes, dims and rows must be at least 1.")
    if targets not in ("all", "own"):
        raise SettingError(f"targets must be 'all' or 'own'; got {targets!r}.")
    d_model, layers = model.cfg.d_model, model.cfg.n_layers
    lens = TunedLens(model.name, torch.zeros(buckets, layers, d_model, d_model), torch.zeros(buckets, layers, d_model))
    listed: list[list[_Step]] = [[] for _ in range(buckets)]
    for start in range(0, len(prompts), rows):
        shared: dict[str, Any] = {
            "seed": seed,
            "chat_template": chat_template,
            "record_sinks": False,
            "progress": False,
        }
        run = generate(model, list(prompts[start : start + rows]), **shared, **settings)
        shares = masked_share(run)
        for step, places in predicted_places(run):
            for row in places.any(dim=1).nonzero()[:, 0].tolist():
                listed[lens.bucket(float(shares[row, step]))].append(_Step(run, row, step, places[row]))
    drawn = torch.Generator().manual_seed(as_seed(seed))
    for number, steps in enumerate(listed):
        if not steps:
            raise SettingError(
                f"no step has a masked share above {number / buckets:.2f} and up to {(number + 1) / buckets:.2f}; pass "
                f"fewer buckets, or settings with more steps."
            )
        chosen = [steps[place] for place in torch.randperm(len(steps), generator=drawn)[:passes].tolist()]
        mean = torch.stack([_jacobians(one, targets, dims, drawn) for one in chosen]).mean(dim=0)
        lens.maps[number, :-1] = mean.transpose(1, 2) - torch.eye(d_model)
    return lens


def _jacobians(one: _Step, targets: str, dims: int, drawn: torch.Generator) -> Float[Tensor, "earlier d_model d_model"]:
    """J of every layer but the last in one pass, [layer, out, in]."""
    model, run = one.run.model, one.run
    ids, real, time = exact_step(run, one.step).row(one.row)
    here = run.real[[one.row]]
    valid = streams_before(model, here, one.predicted[None])[here][: ids.shape[1]].to(ids.device)
    places = valid.nonzero()[:, 0]
    if targets == "own":
        places = places[torch.randint(len(places), (1,), generator=drawn).to(places.device)]
    d_model, found = model.cfg.d_model, []
    with differentiable(model), torch.enable_grad():
        streams = _streams(
            model, ids.repeat(dims, 1), real.repeat(dims, 1), time if time is None else time.repeat(dims)
        )
        for first in range(0, d_model, dims):
            count = min(dims, d_model - first)
            copies = torch.arange(count, device=ids.device)
            cotangent = torch.zeros_like(streams[-1])
            cotangent[copies[:, None], places, first + copies[:, None]] = 1.0
            slopes = torch.autograd.grad(streams[-1], streams[:-1], cotangent, retain_graph=first + dims < d_model)
            found.append(torch.stack([slope[:count, places].float().mean(dim=1).cpu() for slope in slopes]))
    return torch.cat(found, dim=1)


def _streams(model: "Model", ids: Tensor, real: Tensor, time: Tensor | None) -> list[Tensor]:
    """The streams that leave the layers, in a graph that begins with the first of them."""
    kept: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]

    def keep(value: Tensor, hook: Point) -> Tensor:
        kept[str(hook.name)] = value if value.requires_grad else value.detach().requires_grad_()
        return kept[str(hook.name)]

    pairs: Pairs = [(name, keep) for name in names]
    with model.tree.hooks(fwd_hooks=[*pairs]):
        model.tree.hidden(ids, real, time=time)
    return [kept[name] for name in names]
