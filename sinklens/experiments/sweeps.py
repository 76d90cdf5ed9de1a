"""Many interventions on many prompts in few forward passes.

`sweep` repeats the same prompts in one batch, once per intervention, and applies each intervention only to its own
rows. The result is that of separate runs: hooks see only their rows, random numbers are drawn per row, and every row
has its own canvas. `batch_size` is the most rows in a pass.

Caveat: a matrix product rounds differently at another batch size, so logits agree to about 1e-5 and not bit for bit.
Where two tokens are that close, a stacked run can choose the other one. With ``threshold=`` a row also waits for the
slowest row of its batch, so its step numbers depend on the rest of the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import xarray as xr
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.experiments.effects import compare, kept_places
from sinklens.experiments.metrics import Metric, Start, at_places, finished, measured
from sinklens.experiments.stacking import Repeated, Stacked
from sinklens.interventions.logits import MaskedLogits
from sinklens.model import Model, load
from sinklens.model.prompts import Prompt
from sinklens.runs.control_keys import ControlLog
from sinklens.runs.denoising import Denoising
from sinklens.runs.intervention import HookSource
from sinklens.runs.request import Hooks, RunRequest, hook_list
from sinklens.runs.result import Generation
from sinklens.sampling import Policy
from sinklens.sampling.policies import CachePolicy, as_policy
from sinklens.utils.arguments import Count, Seed, Words, checked, read_as
from sinklens.utils.progress import Progress, reporting

Group = dict[str, list[Any]]


@checked
def sweep(
    model: Any,
    prompts: Prompt,
    interventions: Annotated[
        Mapping[Any, Hooks],
        Words("a dict of names and interventions, such as {'name': AblateHeads(heads=[0])}"),
    ],
    *,
    metric: Metric | None = None,
    replay: bool = False,
    batch_size: Count = 32,
    seed: Seed = 0,
    chat_template: bool | str = False,
    cache: CachePolicy | None = None,
    progress: Progress = None,
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
        batch_size: most rows in a pass; one intervention on one prompt is one row. Pass fewer if memory runs out.
        cache: a cache policy or its name, for every run, also those that the others are compared with.
        progress: as in `sinklens.generate`; it counts runs, each of several interventions; ignored with `metric`.
        seed, chat_template, **settings: as in `sinklens.generate`.

    Returns:
        [intervention, prompt]: ``answer`` (text; ids as text without a tokenizer), and the measures of `compare`; for
        an intervention that makes the canvas longer only those of answers, NaN elsewhere. ``control_requested`` and
        ``control_picked`` are NaN for an intervention without a control. A control without any key is not refused but
        has 0 here, and a `ControlWarning`. With `metric`: ``metric``
        [intervention, prompt, step], NaN at steps that were not run, or at which the prompt waited for others of its
        batch, and ``metric_base`` [prompt, step]; if the names are places, [layer, head, step, prompt].

    Raises:
        SettingError: no prompt or intervention; an intervention that makes the canvas longer under replay; `metric`
            with `cache`, or a metric that does not return one number per prompt; a cache policy that this run cannot
            have; replay with cached blocks (``use_cache=True``), whose steps lack the logits of later blocks.
    """
    model = load(model)
    listed = {name: hook_list(hooks) for name, hooks in interventions.items()}
    prompts = _rows(model, prompts)
    require(listed and len(prompts), "a sweep needs at least one intervention and one prompt.")
    request = RunRequest(
        prompts, seed, chat_template, cache=cache, record_sinks=False, progress=False, settings=settings
    )
    _check(listed, metric is not None, replay, as_policy(cache))
    size = min(len(prompts), read_as(Count, "batch_size", batch_size))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

    log = ControlLog()  # of all runs: an intervention may find nothing for some prompts

    def start(batch: Any, hooks: Any, canvases: Any, copies: int) -> Any:
        asked = replace(request, prompts=batch, hooks=hooks, replay=canvases, copies=copies)
        return Denoising(model, asked, ControlLog(found=log.found))

    if metric is not None:
        hooks = list(listed.values())
        parts = [
            measured(start, hooks, metric, batch_size, batch, size * number, replay)
            for number, batch in enumerate(batches)
        ]
        log.report()
        return at_places(xr.concat(parts, dim="prompt", join="outer"), list(listed))
    groups, found = _groups(listed, batch_size // size), [list[xr.Dataset]() for _ in batches]
    work = [(number, group) for number in range(len(batches)) for group in groups]
    with reporting(progress, "runs", lambda: "sweep") as report:
        for done, (number, group) in enumerate(work, 1):
            if not found[number]:
                logits = MaskedLogits()
                base = finished(start(batches[number], [logits] if replay else [], None, 1))
            found[number].append(_run(start, batches[number], group, base, logits if replay else None))
            report(done, len(work))
    log.report()
    parts = [xr.concat(part, dim="intervention", join="outer") for part in found]
    swept = xr.concat(parts, dim="prompt", join="outer").sel(intervention=list(listed))
    return swept.assign_attrs(model=model.name, replay=int(replay))


def _check(listed: Mapping[Any, list[Any]], measures: bool, replay: bool, policy: Policy | None) -> None:
    """Refuse what replay or a metric cannot be combined with, and names that do not go together."""
    longer = [name for name, hooks in listed.items() if _needs_separate_run(hooks)]
    if replay and longer:
        raise SettingError(
            f"{longer[0]} makes the canvas longer, so it cannot be replayed; sweep it with replay=False."
        )
    require(
        not measures or policy is None,
        "metric= runs single steps, and a step under a cache policy needs the keys of the steps before; drop cache=.",
    )
    if measures and longer:
        raise SettingError(f"{longer[0]} makes the canvas longer, so metric= cannot compare it; sweep it without.")
    kinds = {str if isinstance(name, str) else len(name) if isinstance(name, tuple) else None for name in listed}
    require(
        kinds == {str} or (measures and kinds in ({2}, {3})),
        f"interventions must be named by texts or, with metric=, all by (layer, head) or all by (layer, head, "
        f"step); got {next(iter(listed))!r}.",
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


def _groups(listed: Mapping[str, list[Any]], size: int) -> list[Group]:
    """Interventions in groups of `size`; those that make the canvas longer or change the model run separately."""
    sources = {name: [one for one in hooks if isinstance(one, HookSource)] for name, hooks in listed.items()}
    changing = {name for name, ones in sources.items() if any(one.changes_model for one in ones)}
    alone = {name for name, hooks in listed.items() if name in changing or _needs_separate_run(hooks)}
    others = [name for name in listed if name not in alone]
    shared = [others[start : start + size] for start in range(0, len(others), size)]
    return [{name: listed[name] for name in names} for names in [*([name] for name in alone), *shared]]


def _run(
    start: Start, batch: Any, group: Mapping[str, list[Any]], base: Generation, logits: MaskedLogits | None
) -> xr.Dataset:
    """All interventions of `group` in one run, compared with `base`; under replay, with its `logits`."""
    count, kept = len(base.answers), MaskedLogits()
    hooks: list[Any] = list(next(iter(group.values()))) if len(group) == 1 else [Stacked(list(group.values()))]
    repeated = None if logits is None else Repeated.of(base, len(group))
    result = finished(start(batch, hooks if logits is None else [*hooks, kept], repeated, len(group)))
    found = []
    for number in range(len(group)):
        rows = slice(number * count, (number + 1) * count)
        changed = _rows_of(result, rows)
        both = () if logits is None else (logits.kept, _logits_of(result, kept.kept, rows))
        answers = [
            answer.text if answer.text is not None else str(ids.tolist())
            for answer, ids in zip(changed.answers, changed.canvas[:, -1, changed.prompt_length :], strict=True)
        ]
        compared = compare(base, changed, *both, edited=True)
        found.append(compared.assign(answer=("batch", np.array(answers, dtype=object))))
    stacked = xr.concat(found, dim="intervention", join="outer").rename(batch="prompt")
    return stacked.assign_coords(intervention=list(group))


def _rows_of(run: Generation, rows: slice) -> Generation:
    return replace(
        run,
        canvas=run.canvas[rows],
        undecided=run.undecided[rows],
        unmask_step=run.unmask_step[rows],
        active=run.active[rows],
        ties=None if run.ties is None else run.ties[rows],
        real=run.real[rows],
        answers=run.answers[rows],
        time=None if run.time is None else run.time[rows],
        control_keys=None if run.control_keys is None else run.control_keys[rows],
    )


def _logits_of(run: Generation, kept: Mapping[int, Tensor], rows: slice) -> dict[int, Tensor]:
    """The part of `MaskedLogits.kept` that belongs to some rows."""
    if run.causal:
        return {step: values[rows] for step, values in kept.items()}
    row_of = {step: kept_places(run, step).nonzero()[:, 0] for step in kept}
    return {step: values[(row_of[step] >= rows.start) & (row_of[step] < rows.stop)] for step, values in kept.items()}
