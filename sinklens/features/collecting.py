"""Collect activations of runs on disk, to train an SAE on them.

`collect` runs the prompts in batches and keeps the activations at some points wherever the scope and the steps select
the place. Only one batch is in memory. A row that waits for others of its batch, because it has ended, is left out, so
the places do not depend on the batch size.

Pitfall: a diffusion run of S steps has each prompt token S times, with almost the same activations; collect "masked"
and "decided" positions separately, or only some steps.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sinklens.errors import require
from sinklens.families import settings_for
from sinklens.features.places import Scope, ScopeReader, places_of_step, states_of, states_of_run, stream_point
from sinklens.features.store import COLUMNS, ActivationStore, array_of
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.intervention import whole_numbers
from sinklens.runs.result import Generation
from sinklens.sinks.store import StoredType
from sinklens.utils.arguments import Count, Seed, as_tuple, checked, read_as
from sinklens.utils.progress import Progress, reporting

Kept = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
"""What was kept at a point, by step: the rows, columns and activations of the places."""


@checked
def collect(
    model: Model,
    prompts: str | Sequence[Any],
    point: str | Sequence[str],
    out: str | Path,
    *,
    scope: Scope = "all",
    only_steps: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    batch_size: Count = 16,
    seed: Seed = 0,
    chat_template: bool | str = False,
    dtype: StoredType = "float32",
    progress: Progress = None,
    **settings: Any,
) -> ActivationStore:
    """Run `model` on `prompts` and write the activations at `point` to a Zarr store; the same call resumes.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        point: a point with a vector at each position, or several, which share one store; heads are flattened.
        out: path of the store, a new folder or that of an interrupted call with the same arguments.
        scope: states of the positions that are kept: "all", or one or several of "prompt", "masked",
            "committed" and "decided" (prompt and committed).
        only_steps, positions: indices, as ``steps=`` and ``positions=`` of an intervention; None means all. (``steps``
            is the sampler's setting.)
        batch_size: prompts per run; the places do not depend on it. Copies of a prompt run in separate batches, since
            copies in one batch would get different random numbers. With cached blocks (``use_cache``,
            ``use_block_cache``), each prompt runs alone, because a pass computes the current blocks of all rows
            of its batch.
        seed, chat_template, **settings: as in `sinklens.generate`.
        dtype: type of the activations on disk; float16 and bfloat16 halve its size.
        progress: as in `sinklens.generate`; a function is called with the number of finished prompts and of all.

    Raises:
        SettingError: there are no prompts, a batch_size below 1, a model without a mask token, or `out` holds
            something else.
    """
    prompts = as_tuple(prompts)
    require(len(prompts), "collect needs at least one prompt.")
    require(
        not model.tree.architecture.encoder,
        f"collect needs a model with a mask token; {model.name} has a canvas of random tokens. Keep its "
        f"activations with a hook function: generate(model, prompt, hooks=[({point!r}, function)]).",
    )
    listed = [prompt if isinstance(prompt, str) else np.asarray(prompt).tolist() for prompt in prompts]
    points = dict.fromkeys(stream_point(model, one) for one in as_tuple(point))
    sampler = settings_for(model, dict(settings))
    blocks = sampler.caches_keys and model.tree.attention_blocks is not None
    size = 1 if blocks or sampler.reuses_keys else read_as(Count, "batch_size", batch_size)
    about = {
        "model": model.name, "weights": model.fingerprint, "points": list(points),
        "scope": states_of(scope), "only_steps": None if only_steps is None else whole_numbers("only_step", only_steps),
        "positions": None if positions is None else whole_numbers("position", positions),
        "settings": asdict(sampler), "seed": seed, "chat_template": chat_template, "dtype": dtype,
        "prompts": len(listed), "prompts_sha256": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
    }  # fmt: skip
    store = ActivationStore.begin(out, about)
    with reporting(progress, "prompts", lambda: "collect") as report:
        for part in _batches(listed, store, size):
            kept: dict[str, Kept] = {name: {} for name in points}
            hooks = [
                ScopeReader(name, partial(_keep, found), scope=scope, steps=only_steps, positions=positions)
                for name, found in kept.items()
            ]
            run = generate(
                model, part, seed=seed, chat_template=chat_template, hooks=hooks, progress=False, record_sinks=False,
                **settings,
            )  # fmt: skip
            store.append(_rows(run, kept, store.prompts_done), store.prompts_done + len(part))
            report(store.prompts_done, len(listed))
    require(len(store), f"no run has a place in {scope=}, {only_steps=}, {positions=}.")
    return store


def _batches(prompts: list[Any], store: ActivationStore, size: int) -> Iterator[list[Any]]:
    """The prompts that are not stored yet, in batches without copies."""
    while (first := store.prompts_done) < len(prompts):
        part = prompts[first : first + size]
        repeated = (at for at, prompt in enumerate(part) if prompt in part[:at])
        yield part[: next(repeated, len(part))]


def _keep(kept: Kept, hook: Point, places: Tensor, values: Tensor) -> None:
    row, column = places.nonzero().cpu().numpy().T
    kept[hook.step or 0] = row, column + hook.forward_pass.first(places.shape[1]), values.detach().cpu().numpy()


def _rows(run: "Generation", kept: dict[str, Kept], first: int) -> dict[str, np.ndarray]:
    """What was kept of a run whose prompts are numbered from `first`, as rows of a store."""
    states, canvas = states_of_run(run), run.canvas.cpu().numpy()
    pads = (~run.real).long().cumprod(dim=1).sum(dim=1).cpu().numpy()
    parts = []
    for step, (row, column, _) in next(iter(kept.values())).items():
        own = places_of_step(run, step)[row, column]
        place = row[own], step, column[own]
        values = {array_of(name): found[step][2][own] for name, found in kept.items()}
        parts.append({
            "prompt": first + row[own], "step": np.full(own.sum(), step), "pos": column[own] - pads[row[own]],
            "state": states[place], "token_id": canvas[place], **values,
        })  # fmt: skip
    if not parts:
        return {name: np.zeros(0, dtype=kind) for name, kind in COLUMNS.items()}
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(joined["prompt"], kind="stable")
    return {name: values[order] for name, values in joined.items()}
