"""Trains the maps of a tuned lens (tuned_lens.py).

Runs of the prompts are read step by step with a separate pass. At every undecided position the streams of all layers
are kept, a random sample per bucket of the masked share, and each layer's map is trained with Adam to minimize

    KL(p ‖ q),    p the model's prediction, q the reading of the moved stream,

starting at the identity, which is the logit lens. If the stream at i predicts the token at i + 1 (Dream), the streams
one position earlier are used, as in lens.py.

Limitation: only undecided positions are trained on. Readings at decided positions and in the prompt use maps that have
not seen such streams.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.attribution import exact_step
from sinklens.experiments.lens import log_probabilities, streams_before
from sinklens.experiments.tuned_lens import TunedLens, masked_share
from sinklens.tracing import generate
from sinklens.utils.integers import as_seed

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


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
        model: a diffusion model.
        prompts: texts, or rows of token ids.
        buckets: number of equal parts of the masked share, each with its own maps.
        updates: optimizer steps per bucket.
        batch: positions per update.
        learning_rate: of Adam, in units of the stream's size; falls to 0.
        places: positions kept per bucket, at places × layers × d_model numbers of memory.
        rows: prompts per run.
        seed: of the runs, of the sample and of the order of training.
        chat_template, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: an autoregressive model, a number below 1, or a bucket without positions.
    """
    if model.mask_token_id is None:
        raise SettingError(f"a tuned lens is trained by the masked share, and {model.name} has no mask token.")
    if min(buckets, updates, batch, places, rows) < 1:
        raise SettingError("buckets, updates, batch, places and rows must be at least 1.")
    d_model, layers = model.cfg.d_model, model.cfg.n_layers
    empty = TunedLens(model.name, torch.zeros(buckets, layers, d_model, d_model), torch.zeros(buckets, layers, d_model))
    drawn = torch.Generator().manual_seed(as_seed(seed))
    kept: list[list[Tensor]] = [[] for _ in range(buckets)]
    for start in range(0, len(prompts), rows):
        part = list(prompts[start : start + rows])
        run = generate(
            model, part, seed=seed, chat_template=chat_template, record_sinks=False, progress=False, **settings
        )
        for share, streams in _streams(run):
            kept[empty.bucket(share)].append(streams)
        kept = [_sample(parts, places, drawn) for parts in kept]
    for number, parts in enumerate(kept):
        if not parts:
            raise SettingError(
                f"no step has a masked share above {number / buckets:.2f} and up to {(number + 1) / buckets:.2f}; pass "
                f"fewer buckets, or settings with more steps."
            )
        streams = torch.cat(parts, dim=1)
        empty.maps[number, :-1], empty.offsets[number, :-1] = _fit(model, streams, updates, batch, learning_rate, drawn)
    return empty


def _sample(parts: list[Tensor], places: int, drawn: torch.Generator) -> list[Tensor]:
    """At most `places` positions of what was kept, at random."""
    if sum(part.shape[1] for part in parts) <= places:
        return parts
    joined = torch.cat(parts, dim=1)
    return [joined[:, torch.randperm(joined.shape[1], generator=drawn)[:places]]]


@torch.no_grad()
def _streams(run: "Generation") -> Iterator[tuple[float, Float[Tensor, "layer place d_model"]]]:
    """Masked share of each row and step, and the streams that predict its undecided positions."""
    model, shares = run.model, masked_share(run)
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    for step in range(run.steps_run):
        ids, real = exact_step(run, step)
        seen = model.tree.peek(ids, real, points, run.time_at(step))
        streams = torch.stack([seen[name].float().cpu() for name in points])
        sources = streams_before(model, run.real, run.undecided[:, step])
        for row, places in enumerate(sources):
            if bool(places.any()):
                yield float(shares[row, step]), streams[:, row, places]


def _fit(
    model: "Model",
    streams: Float[Tensor, "layer place d_model"],
    updates: int,
    batch: int,
    learning_rate: float,
    drawn: torch.Generator,
) -> tuple[Float[Tensor, "earlier d_model d_model"], Float[Tensor, "earlier d_model"]]:
    """Maps and offsets of all layers but the last."""
    device, scale = model.cfg.device, streams[:-1].pow(2).mean(dim=(1, 2)).sqrt().clamp(min=1e-12)
    layers, d_model = len(streams) - 1, streams.shape[2]
    maps = torch.zeros(layers, d_model, d_model, device=device, requires_grad=True)
    offsets = torch.zeros(layers, d_model, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([maps, offsets], lr=learning_rate)
    size, dtype = scale[:, None, None].to(device), model.cfg.dtype
    for update in range(updates):
        chosen = streams[:, torch.randint(streams.shape[1], (batch,), generator=drawn)].to(device)
        with torch.no_grad():
            target = log_probabilities(model, chosen[-1].to(dtype))
        with torch.enable_grad():
            moved = chosen[:-1] + torch.bmm(chosen[:-1], maps) + offsets[:, None] * size
            read = log_probabilities(model, moved.flatten(0, 1).to(dtype)).unflatten(0, (layers, batch))
            loss = (target.exp() * (target - read)).sum(dim=-1).mean(dim=1).sum()
            gradients = torch.autograd.grad(loss, [maps, offsets])
        maps.grad, offsets.grad = gradients
        optimizer.param_groups[0]["lr"] = learning_rate * (1 - update / updates)
        optimizer.step()
    return maps.detach().cpu(), (offsets * size[:, 0]).detach().cpu()
