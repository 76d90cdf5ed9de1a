"""Many interventions on many prompts in few forward passes.

`sweep` repeats the same prompts in one batch, once per intervention, and applies each intervention only to its own
rows. The result is that of separate runs: hooks see only their rows, random numbers are drawn per row, and every row
has its own canvas. `rows` is the most rows in a pass.

Caveat: a matrix product rounds differently at another batch size, so logits agree to about 1e-5 and not bit for bit.
Where two tokens are that close, a stacked run can choose the other one. With ``threshold=`` a row also waits for the
slowest row of its batch, so its step numbers depend on the rest of the batch.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.effects import compare, kept_places
from sinklens.experiments.metrics import Metric, at_places, measured
from sinklens.experiments.stacking import Repeated, Stacked
from sinklens.families.samplers import settings_for
from sinklens.interventions.logits import MaskedLogits
from sinklens.model import Model, load
from sinklens.model.prompts import Prompt
from sinklens.runs.denoising import Denoising
from sinklens.runs.identity import fingerprint
from sinklens.runs.intervention import HookSource
from sinklens.runs.request import RunRequest, hook_list
from sinklens.runs.result import Generation
from sinklens.sampling import Policy
from sinklens.sampling.policies import CachePolicy, as_policy
from sinklens.utils.arguments import Count, Seed, read_as
from sinklens.utils.atomic import atomic_write

if TYPE_CHECKING:
    from sinklens.runs.request import Hooks

FORMAT = "sinklens sweep 2"
Group = dict[str, list[Any]]


def sweep(
    model: Any,
    prompts: Prompt,
    interventions: "Mapping[Any, Hooks]",
    *,
    metric: Metric | None = None,
    replay: bool = False,
    rows: Count = 32,
    out: str | Path | None = None,
    seed: Seed = 0,
    chat_template: bool | str = False,
    cache: CachePolicy | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> xr.Dataset:
    """Run every intervention on every prompt, and compare each with the run without it.

    Args:
        model: anything that `sinklens.load` accepts.
        prompts: one or several, as in `sinklens.generate`.
        interventions: name -> intervention, or list of interventions and (name, function) pairs. With `metric`, a name
            may also be a place, ``(layer, head)`` or ``(layer, head, step)``.
        metric: a function of a step's logits and canvas, `StepOutput` -> one number per prompt. The result is then
            ``metric`` and nothing else. Under replay a diffusion model runs only the steps that the interventions name,
            where these act on each step alone (`Intervention.within_step`).
        replay: force the base run's canvas at every step, to isolate each step's effect; adds ``kl`` and the other
            per-step measures of `compare`. Answers and canvases are then always the base run's.
        rows: most rows in a pass; one intervention on one prompt is one row. Pass fewer if memory runs out.
        out: folder in which finished parts are kept; an interrupted sweep of the same model, prompts, interventions
            and settings resumes from there. `sinklens.runs.identity.fingerprint` decides which interventions are
            the same.
        cache: a cache policy or its name, for every run, also those that the others are compared with.
        progress: show a progress bar; by default on a terminal.
        seed, chat_template, **settings: as in `sinklens.generate`.

    Returns:
        [intervention, prompt]: ``answer`` (text; ids as text without a tokenizer), and the measures of `compare`; for
        an intervention that makes the canvas longer only those of answers, NaN elsewhere. ``control_requested`` and
        ``control_picked`` are NaN for an intervention without a control. A control without any key is not refused but
        has 0 here, and a `ControlWarning`. With `metric`: ``metric``
        [intervention, prompt, step], NaN at steps that were not run, and ``metric_base`` [prompt, step]; if the names
        are places, [layer, head, step, prompt].

    Raises:
        SettingError: no prompt or intervention, an intervention that makes the canvas longer
            under replay, or, with `out`, an intervention that cannot be fingerprinted; `metric` with `out` or `cache`,
            or a metric that does not return one number per prompt; a cache policy that this run cannot have; replay
            with cached blocks (``use_cache=True``), whose steps lack the logits of later blocks.
    """
    model = load(model)
    if not isinstance(interventions, Mapping):
        raise SettingError(
            f"interventions must be a dict of names and interventions, {{'name': AblateHeads(heads=[0])}}; got "
            f"{type(interventions).__name__}."
        )
    listed = {name: hook_list(hooks) for name, hooks in interventions.items()}
    prompts = _rows(model, prompts)
    if not listed or not len(prompts):
        raise SettingError("a sweep needs at least one intervention and one prompt.")
    request = RunRequest(
        prompts, seed, chat_template, cache=cache, record_sinks=False, progress=False, settings=settings
    )
    _check(listed, metric is not None, replay, out, as_policy(cache))
    work = _Sweep(model, request, replay, None if out is None else Path(out))
    size = min(len(prompts), read_as(Count, "rows", rows))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    if metric is not None:
        hooks = list(listed.values())
        parts = [
            measured(work.start, hooks, metric, rows, batch, size * number, replay)
            for number, batch in enumerate(batches)
        ]
        return at_places(xr.concat(parts, dim="prompt", join="outer"), list(listed))
    found = work.all_parts(batches, _groups(listed, rows // size), progress)
    found = found.sel(intervention=list(listed))
    found = found.assign_coords(intervention=list(listed))  # concatenation can truncate names read from files
    return found.assign_attrs(model=model.name, replay=int(replay))


def _check(listed: Mapping[Any, list[Any]], measures: bool, replay: bool, out: Any, policy: Policy | None) -> None:
    """Refuse what replay or a metric cannot be combined with, and names that do not go together."""
    longer = [name for name, hooks in listed.items() if _needs_separate_run(hooks)]
    if replay and longer:
        raise SettingError(
            f"{longer[0]} makes the canvas longer, so it cannot be replayed; sweep it with replay=False."
        )
    if measures and out is not None:
        raise SettingError("metric= does not support out=; save the result, an xarray Dataset, instead.")
    if measures and policy is not None:
        raise SettingError(
            "metric= runs single steps, and a step under a cache policy needs the keys of the steps before; drop "
            "cache=."
        )
    if measures and longer:
        raise SettingError(f"{longer[0]} makes the canvas longer, so metric= cannot compare it; sweep it without.")
    kinds = {str if isinstance(name, str) else len(name) if isinstance(name, tuple) else None for name in listed}
    if kinds != {str} and not (measures and kinds in ({2}, {3})):
        raise SettingError(
            f"interventions must be named by texts or, with metric=, all by (layer, head) or all by (layer, head, "
            f"step); got {next(iter(listed))!r}."
        )


def _rows(model: Model, prompts: Prompt) -> list[str] | list[list[int]]:
    """Prompts as a list of texts or of rows of ids; a single prompt becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and all(isinstance(prompt, str) for prompt in prompts):
        return [str(prompt) for prompt in prompts]
    return [row[keep].tolist() for row, keep in zip(*model.encode(prompts), strict=True)]


def _needs_separate_run(hooks: Sequence[Any]) -> bool:
    """Whether the interventions lengthen the canvas, so that others cannot share their run."""
    return any(type(entry).extend is not HookSource.extend for entry in hooks if isinstance(entry, HookSource))


def _changes_model(hooks: Sequence[Any]) -> bool:
    """Whether the interventions change the model, for all rows of a batch."""
    return any(entry.changes_model for entry in hooks if isinstance(entry, HookSource))


def _groups(listed: Mapping[str, list[Any]], size: int) -> list[Group]:
    """Interventions in groups of `size`; those that make the canvas longer or change the model run separately."""
    alone = {name for name, hooks in listed.items() if _needs_separate_run(hooks) or _changes_model(hooks)}
    others = [name for name in listed if name not in alone]
    shared = [others[start : start + size] for start in range(0, len(others), size)]
    return [{name: listed[name] for name in names} for names in [*([name] for name in alone), *shared]]


def _shown(parts: Sequence[Any], progress: bool | None) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    # another bar may be active, and two cannot be shown
    yield from track(parts, "sweep", console=console, transient=True) if shown else parts


class _Sweep:
    """State shared by the parts of one sweep."""

    def __init__(self, model: Model, request: RunRequest, replay: bool, out: Path | None) -> None:
        self._model, self._request, self._replay, self._out = model, request, replay, out
        self._settings, self._cache = settings_for(model, request.settings), as_policy(request.cache)
        self._weights = model.fingerprint if out is not None else ""

    def all_parts(self, batches: Sequence[Any], groups: Sequence[Group], progress: bool | None) -> xr.Dataset:
        """Every group of interventions on every batch of prompts; finished parts are read from their files."""
        parts: list[list[xr.Dataset]] = [[] for _ in batches]
        base = None
        for number, group in _shown([(n, group) for n in range(len(batches)) for group in groups], progress):
            file = self._part(batches[number], group)
            if file is not None and file.exists():
                parts[number].append(xr.load_dataset(file, engine="h5netcdf"))
                continue
            if base is None or base[0] != number:
                base = number, *self.base(batches[number])
            parts[number].append(self.run(batches[number], group, *base[1:]))
            if file is not None:
                with atomic_write(file) as part:
                    part.write_bytes(parts[number][-1].to_netcdf(engine="h5netcdf"))
        batch_results = [xr.concat(found, dim="intervention", join="outer") for found in parts]
        return xr.concat(batch_results, dim="prompt", join="outer")

    def base(self, batch: Any) -> tuple[Generation, MaskedLogits]:
        """The run without interventions; keeps its logits under replay."""
        kept = MaskedLogits()
        denoising = self.start(batch, [kept] if self._replay else [], None, 1)
        denoising.carry_out()
        return denoising.result(), kept

    def start(self, batch: Any, hooks: Any, replay: Any, copies: int) -> Denoising:
        """A run that has not begun."""
        return Denoising(self._model, replace(self._request, prompt=batch, hooks=hooks, replay=replay, copies=copies))

    def run(self, batch: Any, group: Mapping[str, list[Any]], base: Generation, logits: MaskedLogits) -> xr.Dataset:
        """All interventions of `group` in one run."""
        count = len(base.answers)
        kept = MaskedLogits()
        hooks: list[Any] = list(next(iter(group.values()))) if len(group) == 1 else [Stacked(list(group.values()))]
        repeated = Repeated.of(base, len(group)) if self._replay else None
        denoising = self.start(batch, [*hooks, kept] if self._replay else hooks, repeated, len(group))
        denoising.carry_out()
        denoising.controls.report(refuse=False)
        result = denoising.result()
        slices = [slice(number * count, (number + 1) * count) for number in range(len(group))]
        found = [self._compared(base, logits, result, kept, rows) for rows in slices]
        stacked = xr.concat(found, dim="intervention", join="outer").rename(batch="prompt")
        return stacked.assign_coords(intervention=list(group))

    def _compared(
        self, base: Generation, logits: MaskedLogits, result: Generation, kept: MaskedLogits, rows: slice
    ) -> xr.Dataset:
        """One intervention of a run, the one of these `rows`, compared with the run without it."""
        changed = _rows_of(result, rows)
        if self._replay:
            part = compare(base, changed, logits.kept, _logits_of(result, kept.kept, rows), edited=True)
        else:
            part = compare(base, changed, edited=True)
        answers = [
            answer.text if answer.text is not None else str(ids.tolist())
            for answer, ids in zip(changed.answers, changed.canvas[:, -1, changed.prompt_length :], strict=True)
        ]
        return part.assign(answer=("batch", np.array(answers, dtype=object)))

    def _part(self, batch: Any, group: Mapping[str, list[Any]]) -> Path | None:
        if self._out is None:
            return None
        ids, real = self._model.encode(batch, self._request.chat_template)
        what = {
            "format": FORMAT,
            "model": [self._model.name, self._weights, str(self._model.cfg.dtype)],
            "prompts": [row[keep].tolist() for row, keep in zip(ids, real, strict=True)],
            "interventions": {name: fingerprint(hooks) for name, hooks in group.items()},
            "settings": [type(self._settings).__name__, asdict(self._settings), self._request.seed, self._replay],
        }
        if self._cache is not None:
            what["cache"] = fingerprint(self._cache)
        return self._out / f"sweep-{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]}.nc"


def _rows_of(run: Generation, rows: slice) -> Generation:
    return replace(
        run,
        canvas=run.canvas[rows],
        undecided=run.undecided[rows],
        unmask_step=run.unmask_step[rows],
        active=run.active[rows],
        real=run.real[rows],
        answers=run.answers[rows],
        time=None if run.time is None else run.time[rows],
        control_keys=None if run.control_keys is None else run.control_keys[rows],
    )


def _logits_of(run: Generation, kept: Mapping[int, Tensor], rows: slice) -> dict[int, Tensor]:
    """The part of `MaskedLogits.kept` that belongs to some rows."""
    found = {}
    for step, values in kept.items():
        if run.causal:
            found[step] = values[rows]
            continue
        row_of = kept_places(run, step).nonzero()[:, 0]
        found[step] = values[(row_of >= rows.start) & (row_of < rows.stop)]
    return found
