"""Trains the maps of a `TunedLens` on runs of prompts.

Runs of the prompts are read step by step with a separate pass, at the streams that predict a step's undecided positions
(one position earlier where the stream at i predicts the token at i + 1, as in lens.py). An autoregressive run is one
pass over its text, with the streams that predict the tokens of the answer. Each bucket of the masked share has its own
maps.

Each layer's map is trained with Adam on a random sample of the streams, from the identity, which is the logit lens, to
minimize (Belrose et al., 2303.08112)

    KL(p ‖ q),    with p the model's prediction and q the reading of the mapped stream.

Limitation: readings at decided positions and in the prompt use maps that have not seen such streams.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import require
from sinklens.experiments.lens import (
    CONDITION,
    TunedLens,
    bucket_of,
    conditions,
    log_probabilities,
    masked_share,
    streams_before,
)
from sinklens.experiments.step_ids import exact_step
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.result import Generation
from sinklens.utils.arguments import Seed, as_tuple, checked, read_as


@checked
def train_tuned_lens(
    model: "Model",
    prompts: str | Sequence[Any],
    *,
    buckets: int = 4,
    updates: int = 300,
    update_size: int = 256,
    learning_rate: float = 1e-3,
    sample_size: int = 8192,
    batch_size: int = 16,
    seed: Seed = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> TunedLens:
    """Train a tuned lens on runs of `prompts`.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        buckets: number of equal parts of the masked share, each with its own maps; 1 for an autoregressive model.
        updates: optimizer steps per bucket.
        update_size: positions per update.
        learning_rate: of Adam, in units of the stream's size; falls to 0.
        sample_size: positions kept per bucket, at sample_size × layers × d_model numbers of memory.
        batch_size: prompts per run.
        seed: of the runs, of the sample and of the order of training.
        chat_template, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: several buckets of an autoregressive model, a number below 1, or a bucket without positions.
    """
    _check(model, buckets, updates, update_size, sample_size, batch_size)
    layers, size, drawn = (
        model.cfg.n_layers,
        model.cfg.d_model,
        torch.Generator().manual_seed(read_as(Seed, "seed", seed)),
    )
    prompts = as_tuple(prompts)
    lens = TunedLens(model.name, torch.zeros(buckets, layers, size, size), torch.zeros(buckets, layers, size))
    kept: list[list[_Places]] = [[] for _ in range(buckets)]
    given: dict[str, Any] = {"seed": seed, "chat_template": chat_template, "record_sinks": False, "progress": False}
    for start in range(0, len(prompts), batch_size):
        for bucket, read in _read(
            generate(model, list(prompts[start : start + batch_size]), **given, **settings), buckets
        ):
            kept[bucket].append(read)
        kept = [_sample(parts, sample_size, drawn) for parts in kept]
    for number, parts in enumerate(kept):
        require(
            parts,
            f"no step has a masked share above {number / buckets:.2f} and up to {(number + 1) / buckets:.2f}; pass "
            f"fewer buckets, or settings with more steps.",
        )
        lens.maps[number, :-1], lens.offsets[number, :-1] = _trained(
            model, _joined(parts), updates, update_size, learning_rate, drawn
        )
    return lens


def _check(model: "Model", buckets: int, *numbers: int) -> None:
    require(
        not model.causal or buckets == 1,
        f"{model.name} is autoregressive, so its passes have no masked share; pass buckets=1.",
    )
    require(
        model.mask_token_id is not None or model.causal,
        f"lenses are split by the masked share, and {model.name} has no mask token.",
    )
    require(
        min(buckets, *numbers) >= 1, "buckets, updates, update_size, sample_size and batch_size must be at least 1."
    )


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
def _read(run: "Generation", buckets: int) -> Iterator[tuple[int, _Places]]:
    """The streams of each row and pass that predict its tokens, with their bucket.

    Of a diffusion run these are all steps, with their undecided positions; of an autoregressive run the last step
    alone, whose pass over the text predicts every token of the answer.
    """
    model, level = run.model, bucket_of(masked_share(run), buckets)
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    for step in [run.steps_run - 1] if run.causal else range(run.steps_run):
        predicted = run.undecided[:, step] & run.real
        if run.causal:
            predicted = torch.zeros_like(run.real)
            predicted[:, run.prompt_length : run.prompt_length + run.steps_run] = run.active[:, : run.steps_run]
        ids, real, time = exact_step(run, step)
        seen = model.tree.peek(ids, real, [*points, *conditions(model)], time)
        streams = torch.stack([seen[name].float().cpu() for name in points])
        for row, places in enumerate(streams_before(model, run.real, predicted)[:, : ids.shape[1]]):
            if count := int(places.sum()):
                condition = seen[CONDITION][row].float().cpu().expand(count, -1) if CONDITION in seen else None
                yield int(level[row, step]), _Places(streams[:, row, places], condition)


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
