"""Many interventions on many prompts in few forward passes.

`sweep` puts the same prompts into one batch several times, once for each intervention, and lets each act on its own
rows. The result is that of running them one after the other: hooks see their rows alone, random numbers are drawn per
row, and every row is its own canvas. How many rows go into a pass follows from a memory budget.

One way this fails: a matrix product rounds differently in another batch size, so logits agree to about 1e-5 and not
bit for bit. Where two tokens are that close, a stacked run can choose the other one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from sinklens.denoising import Denoising
from sinklens.errors import SettingError
from sinklens.generation import Generation
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.interventions.base import HookFunction, Intervention, Pairs, Surroundings
from sinklens.interventions.comparing import MaskedLogits, compare
from sinklens.model import Model, load
from sinklens.writing import whole

if TYPE_CHECKING:
    from sinklens.denoising import Hooks

FORMAT = "sinklens sweep 1"


def sweep(
    model: Any,
    prompts: Sequence[str] | Int[Tensor, "batch pos"],
    interventions: "Mapping[str, Hooks]",
    *,
    replay: bool = False,
    memory_gb: float | int = 2.0,
    rows: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> xr.Dataset:
    """Run every intervention on every prompt, and compare each with the run without.

    Args:
        model: what `sinklens.load` takes.
        prompts: texts, or ids of one length.
        interventions: name -> intervention, or list of interventions and (name, function) pairs.
        replay: force the base run's canvas at every step, so that each step's effect stands alone; adds ``kl`` and
            the other measures of `compare` by step.
        memory_gb: budget for what a pass holds beside the weights, in 10⁹ bytes; see `bytes_per_row`.
        rows: rows per pass instead, at least one per prompt of a batch.
        out: folder in which finished parts are kept; an interrupted sweep of the same models, prompts, interventions
            and settings goes on there.
        progress: show a progress bar; by default on a terminal.
        seed, **settings: as in `sinklens.generate`.

    Returns:
        [intervention, prompt]: ``answer`` (text; ids as text without a tokenizer), and what `compare` gives.

    Raises:
        SettingError: no prompt or intervention, or a budget below one row.
    """
    model = load(model)
    listed = {
        name: [hooks] if isinstance(hooks, Intervention) else list(hooks) for name, hooks in interventions.items()
    }
    if not listed or not len(prompts):
        raise SettingError("a sweep needs at least one intervention and one prompt.")
    limit = rows if rows is not None else _rows_within(model, prompts, settings, memory_gb)
    size = min(len(prompts), limit)
    work = _Sweep(model, seed, settings, replay, None if out is None else Path(out))
    starts = range(0, len(prompts), size)
    parts = []
    for start in _shown(starts, progress):
        batch = prompts[start : start + size]
        together = max(1, limit // len(batch))
        base = None
        found = []
        for group in _groups(listed, together):
            part = work.kept(batch, group)
            if part is None:
                base = base or work.base(batch)
                part = work.keep(batch, group, work.run(batch, group, *base))
            found.append(part)
        parts.append(xr.concat(found, dim="intervention").sel(intervention=list(listed)))
    return xr.concat(parts, dim="prompt", join="outer").assign_attrs(model=model.name, replay=int(replay))


def bytes_per_row(model: Model, length: int, gen_length: int) -> int:
    """About what one row of a pass holds at a time, in bytes: hidden states, one layer's MLP, logits, and scores."""
    cfg = model.cfg
    item = cfg.dtype.itemsize
    stream = length * (8 * cfg.d_model + 3 * cfg.d_mlp) * item
    logits = gen_length * cfg.d_vocab * (item + 4 + 8 + 8)  # as computed, float32, and two float64 copies
    return stream + logits + 3 * cfg.n_layers * cfg.n_heads * length * 4


def _rows_within(model: Model, prompts: Any, settings: Mapping[str, Any], memory_gb: float) -> int:
    ids, _ = model.encode(prompts)
    from sinklens.sampling import make_settings

    made = make_settings(model.record.sampler, dict(settings), model.checkpoint.defaults)
    row = bytes_per_row(model, ids.shape[1] + made.gen_length, made.gen_length)
    limit = int(memory_gb * 1e9 // row)
    if limit < 1:
        raise SettingError(
            f"one row takes about {row / 1e9:.2g} GB; the budget is {memory_gb} GB. Give more memory_gb."
        )
    return limit


def _groups(listed: Mapping[str, list[Any]], size: int) -> list[dict[str, list[Any]]]:
    """Interventions in groups of `size`; those that make the canvas longer go alone."""
    groups: list[dict[str, list[Any]]] = [{}]
    for name, hooks in listed.items():
        if any(type(entry).extend is not Intervention.extend for entry in hooks if isinstance(entry, Intervention)):
            groups.insert(0, {name: hooks})
        elif len(groups[-1]) < size:
            groups[-1][name] = hooks
        else:
            groups.append({name: hooks})
    return [group for group in groups if group]


def _shown(starts: Sequence[int], progress: bool | None) -> Any:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    return track(starts, "sweep", console=console, disable=not shown, transient=True)


class _Sweep:
    """What the parts of one sweep share."""

    def __init__(self, model: Model, seed: int, settings: Mapping[str, Any], replay: bool, out: Path | None) -> None:
        self._model, self._seed, self._settings, self._replay, self._out = model, seed, dict(settings), replay, out

    def base(self, batch: Any) -> tuple[Generation, MaskedLogits]:
        """The run without intervention, its logits kept under replay."""
        kept = MaskedLogits()
        denoising = self._denoising(batch, [kept] if self._replay else [], None, 1)
        denoising.carry_out()
        return denoising.result(), kept

    def _denoising(self, batch: Any, hooks: Any, replay: Any, copies: int) -> Denoising:
        return Denoising(
            self._model, batch, given=dict(self._settings), seed=self._seed, chat_template=False, hooks=hooks,
            record_sinks=False, replay=replay, progress=False, copies=copies,
        )  # fmt: skip

    def run(self, batch: Any, group: Mapping[str, list[Any]], base: Generation, logits: MaskedLogits) -> xr.Dataset:
        """All interventions of `group` in one run."""
        count = len(base.answers)
        kept = MaskedLogits()
        hooks: list[Any] = list(next(iter(group.values()))) if len(group) == 1 else [Stacked(list(group.values()))]
        repeated = _Canvas(base.canvas.repeat(len(group), 1, 1)) if self._replay else None
        denoising = self._denoising(batch, [*hooks, kept] if self._replay else hooks, repeated, len(group))
        denoising.carry_out()
        result = denoising.result()
        found = []
        for number in range(len(group)):
            rows = slice(number * count, (number + 1) * count)
            changed = _rows_of(result, rows)
            if self._replay:
                found.append(compare(base, changed, logits.kept, _logits_of(result, kept.kept, rows)))
            elif changed.canvas.shape[2] == base.canvas.shape[2]:
                found.append(compare(base, changed))
            else:
                found.append(xr.Dataset())
            answers = [
                answer.text if answer.text is not None else str(ids.tolist())
                for answer, ids in zip(changed.answers, changed.canvas[:, -1, changed.prompt_length :], strict=True)
            ]
            found[-1] = found[-1].assign(answer=("batch", np.array(answers, dtype=object)))
        stacked = xr.concat(found, dim="intervention", join="outer").rename(batch="prompt")
        return stacked.assign_coords(intervention=list(group))

    def _part(self, batch: Any, group: Mapping[str, list[Any]]) -> Path | None:
        if self._out is None:
            return None
        what = {
            "format": FORMAT,
            "model": [self._model.name, self._model.checkpoint.revision, str(self._model.cfg.dtype)],
            "prompts": [list(map(int, row)) for row in self._model.encode(batch)[0]],
            "interventions": {name: repr(hooks) for name, hooks in group.items()},
            "settings": [self._settings, self._seed, self._replay],
        }
        return self._out / f"sweep-{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}.nc"

    def kept(self, batch: Any, group: Mapping[str, list[Any]]) -> xr.Dataset | None:
        """What an earlier start has left of this part."""
        part = self._part(batch, group)
        return xr.load_dataset(part, engine="h5netcdf") if part is not None and part.exists() else None

    def keep(self, batch: Any, group: Mapping[str, list[Any]], found: xr.Dataset) -> xr.Dataset:
        """Keep a finished part."""
        part = self._part(batch, group)
        if part is not None:
            with whole(part) as file:
                file.write_bytes(found.to_netcdf(engine="h5netcdf"))
        return found


class _Canvas:
    """An earlier run's canvas, for ``replay=``."""

    def __init__(self, canvas: Int[Tensor, "batch step pos"]) -> None:
        self.canvas = canvas


def _rows_of(run: Generation, rows: slice) -> Generation:
    return replace(
        run, canvas=run.canvas[rows], unmask_step=run.unmask_step[rows], real=run.real[rows], answers=run.answers[rows]
    )


def _logits_of(run: Generation, kept: Mapping[int, Tensor], rows: slice) -> dict[int, Tensor]:
    """The part of `MaskedLogits.kept` that belongs to some rows."""
    found = {}
    for step, values in kept.items():
        if run.model.mask_token_id is None:
            found[step] = values[rows]
            continue
        row_of = ((run.canvas[:, step] == run.model.mask_token_id) & run.real).nonzero()[:, 0]
        found[step] = values[(row_of >= rows.start) & (row_of < rows.stop)]
    return found


class Stacked(Intervention):
    """Several interventions in one run, each on its own rows: the first on the first ``rows / count``, and so on.

    Args:
        listed: for each part of the batch, its interventions and (name, function) pairs.
    """

    def __init__(self, listed: Sequence[Sequence[Any]]) -> None:
        super().__init__()
        object.__setattr__(self, "listed", listed)

    def on(self, model: Model, run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`.

        Raises:
            SettingError: in a single pass, or a batch that does not divide.
        """
        listed: Sequence[Sequence[Any]] = self.__dict__["listed"]
        if run is None or len(run.real) % len(listed):
            raise SettingError(f"{len(listed)} stacked interventions need a run whose rows they can share evenly.")
        count = len(run.real) // len(listed)
        known, layers = model.hook_names(), model.cfg.n_layers
        by_point: dict[str, list[list[HookFunction]]] = {}
        for number, hooks in enumerate(listed):
            own = slice(number * count, (number + 1) * count)
            around = replace(run, real=run.real[own], row_keys=run.row_keys[own])
            for entry in hooks:
                pairs = entry.on(model, around) if isinstance(entry, Intervention) else [entry]
                for name, function in pairs:
                    for point in names.select(name, known, layers):
                        by_point.setdefault(point, [[] for _ in listed])[number].append(function)
        return [(point, _on_rows(functions, count)) for point, functions in by_point.items()]


def _on_rows(functions: Sequence[Sequence[HookFunction]], count: int) -> HookFunction:
    """One hook function that calls each list of functions on its own rows."""

    def call(value: Tensor, hook: Point) -> Tensor | None:
        parts, changed = [], False
        for number, own in enumerate(functions):
            part = value[number * count : (number + 1) * count]
            for function in own:
                given = function(part, hook=hook)
                if given is not None:
                    part, changed = given, True
            parts.append(part)
        if not changed:
            return None
        longest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
        return torch.cat([part.expand(-1, *longest) for part in parts])

    return call
