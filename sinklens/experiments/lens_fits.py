"""Fits the maps of a `TunedLens` on runs of prompts: by training, or from Jacobians.

Runs of the prompts are read step by step with a separate pass, at the streams that predict a step's undecided positions
(one position earlier where the stream at i predicts the token at i + 1, as in lens.py). An autoregressive run is one
pass over its text, with the streams that predict the tokens of the answer. Each bucket of the masked share has its own
maps.

*Trained* (`train_tuned_lens`; Belrose et al., 2303.08112): each layer's map is trained with Adam on a random sample of
the streams, from the identity, which is the logit lens, to minimize

    KL(p ‖ q),    p the model's prediction, q the reading of the moved stream.

*Jacobian* (`fit_jacobian_lens`): early streams are moved by what they do to the last one, to first order. For each
layer l and bucket,

    J_l = mean over passes of 1/|V| Σ_{t ∈ V} Σ_{t' ∈ T(t)} ∂h_last[t'] / ∂h_l[t],

where V are these streams. A reading is softmax(W_U · norm(J_l h)), so J_l = I is the logit lens. For causal models
(Gurnee et al., "Verbalizable Representations Form a Global Workspace in Language Models", 2026; as in TransformerLens
4.3) T(t) are the valid positions from t on. A bidirectional model has no order, so here ``targets="all"`` is T(t) = V,
and ``targets="own"`` is T(t) = {t}: what a position does to its own prediction. In a causal model, the derivatives at
earlier positions are 0, so T(t) = V is the causal definition. h ↦ J h is the affine map with A = Jᵀ − 1 and b = 0.

Limitation: readings at decided positions and in the prompt use maps that have not seen such streams. Derivatives of
different passes may cancel in the mean; and with ``targets="own"`` one pass gives one position.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.lens import (
    CONDITION,
    TunedLens,
    bucket_of,
    check_buckets,
    conditions,
    log_probabilities,
    masked_share,
    predicted_places,
    streams_before,
)
from sinklens.experiments.step_ids import exact_step
from sinklens.runs import generate
from sinklens.utils.integers import as_seed

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


class _Pass(NamedTuple):
    """A step of a run, and the streams of each row that predict its tokens."""

    run: "Generation"
    step: int
    sources: Bool[Tensor, "batch pos"]
    buckets: list[int]


class _Fitted:
    """A lens to be fitted, which is the logit lens so far, and the passes that it is fitted on."""

    def __init__(self, model: "Model", buckets: int, **numbers: int) -> None:
        check_buckets(model, buckets)
        if min(buckets, *numbers.values()) < 1:
            raise SettingError(f"buckets, {', '.join(numbers)} must be at least 1.")
        layers, size = model.cfg.n_layers, model.cfg.d_model
        self.lens = TunedLens(model.name, torch.zeros(buckets, layers, size, size), torch.zeros(buckets, layers, size))

    def passes(self, model: "Model", prompts: Sequence[Any], rows: int, **settings: Any) -> Iterator[list[_Pass]]:
        """The passes of runs of `rows` prompts each."""
        for start in range(0, len(prompts), rows):
            run = generate(model, list(prompts[start : start + rows]), record_sinks=False, progress=False, **settings)
            level = bucket_of(masked_share(run), self.lens.buckets)
            yield [
                _Pass(run, step, streams_before(model, run.real, places), level[:, step].tolist())
                for step, places in predicted_places(run)
            ]

    def check_all(self, found: Sequence[Sequence[Any]]) -> None:
        """Check that every bucket has something to be fitted on."""
        count = len(found)
        for number in [number for number, parts in enumerate(found) if not parts]:
            raise SettingError(
                f"no step has a masked share above {number / count:.2f} and up to {(number + 1) / count:.2f}; pass "
                f"fewer buckets, or settings with more steps."
            )


def train_tuned_lens(
    model: "Model",
    prompts: Sequence[Any],
    *,
    buckets: int = 4,
    updates: int = 300,
    batch: int = 256,
    learning_rate: float = 1e-3,
    places: int = 8192,
    rows: int = 16,
    seed: int = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> TunedLens:
    """Train a tuned lens on runs of `prompts`.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        buckets: number of equal parts of the masked share, each with its own maps; 1 for an autoregressive model.
        updates: optimizer steps per bucket.
        batch: positions per update.
        learning_rate: of Adam, in units of the stream's size; falls to 0.
        places: positions kept per bucket, at places × layers × d_model numbers of memory.
        rows: prompts per run.
        seed: of the runs, of the sample and of the order of training.
        chat_template, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: several buckets of an autoregressive model, a number below 1, or a bucket without positions.
    """
    fitted = _Fitted(model, buckets, updates=updates, batch=batch, places=places, rows=rows)
    drawn = torch.Generator().manual_seed(as_seed(seed))
    kept: list[list[_Places]] = [[] for _ in range(buckets)]
    for passes in fitted.passes(model, prompts, rows, seed=seed, chat_template=chat_template, **settings):
        for one in passes:
            for bucket, read in _read(one):
                kept[bucket].append(read)
        kept = [_sample(parts, places, drawn) for parts in kept]
    fitted.check_all(kept)
    for number, parts in enumerate(kept):
        found = _trained(model, _joined(parts), updates, batch, learning_rate, drawn)
        fitted.lens.maps[number, :-1], fitted.lens.offsets[number, :-1] = found
    return fitted.lens


class _Places(NamedTuple):
    """What was read at some places.

    Attributes:
        streams: the streams that leave each layer.
        condition: what the modulations of each place's row are made from; None without modulations.
    """

    streams: Float[Tensor, "layer place d_model"]
    condition: Float[Tensor, "place d_cond"] | None

    def at(self, index: Tensor) -> "_Places":
        """Some of the places."""
        return _Places(self.streams[:, index], None if self.condition is None else self.condition[index])


def _joined(parts: Sequence[_Places]) -> _Places:
    condition = [part.condition for part in parts if part.condition is not None]
    return _Places(torch.cat([part.streams for part in parts], dim=1), torch.cat(condition) if condition else None)


def _sample(parts: list[_Places], places: int, drawn: torch.Generator) -> list[_Places]:
    """At most `places` positions of what was kept, at random."""
    count = sum(part.streams.shape[1] for part in parts)
    if count <= places:
        return parts
    return [_joined(parts).at(torch.randperm(count, generator=drawn)[:places])]


@torch.no_grad()
def _read(one: _Pass) -> Iterator[tuple[int, _Places]]:
    """The bucket of each row of a pass, and its streams."""
    model, (ids, real, time) = one.run.model, exact_step(one.run, one.step)
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    seen = model.tree.peek(ids, real, [*points, *conditions(model)], time)
    streams = torch.stack([seen[name].float().cpu() for name in points])
    for row, places in enumerate(one.sources[:, : ids.shape[1]]):
        if count := int(places.sum()):
            condition = seen[CONDITION][row].float().cpu().expand(count, -1) if CONDITION in seen else None
            yield one.buckets[row], _Places(streams[:, row, places], condition)


def _trained(
    model: "Model",
    places: _Places,
    updates: int,
    batch: int,
    learning_rate: float,
    drawn: torch.Generator,
) -> tuple[Float[Tensor, "earlier d_model d_model"], Float[Tensor, "earlier d_model"]]:
    """Maps and offsets of all layers but the last."""
    streams, device, dtype = places.streams, model.cfg.device, model.cfg.dtype
    layers, d_model = len(streams) - 1, streams.shape[2]
    size = streams[:-1].pow(2).mean(dim=(1, 2)).sqrt().clamp(min=1e-12)[:, None, None].to(device)
    maps = torch.zeros(layers, d_model, d_model, device=device, requires_grad=True)
    offsets = torch.zeros(layers, d_model, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([maps, offsets], lr=learning_rate)
    for update in range(updates):
        part = places.at(torch.randint(streams.shape[1], (batch,), generator=drawn))
        chosen, condition = part.streams.to(device), part.condition
        every = None if condition is None else condition.repeat(layers, 1)
        with torch.no_grad():
            target = log_probabilities(model, chosen[-1].to(dtype), condition)
        with torch.enable_grad():
            moved = chosen[:-1] + torch.bmm(chosen[:-1], maps) + offsets[:, None] * size
            read = log_probabilities(model, moved.flatten(0, 1).to(dtype), every).unflatten(0, (layers, batch))
            loss = (target.exp() * (target - read)).sum(dim=-1).mean(dim=1).sum()
            maps.grad, offsets.grad = torch.autograd.grad(loss, [maps, offsets])
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - update / updates)
        optimizer.step()
    return maps.detach().cpu(), (offsets * size[:, 0]).detach().cpu()
