"""Dose and effect: how much an intervention does as it grows, and what it costs in likelihood.

    steered = lambda dose: probe.steer(dose, where=AtNoise(0.5) & "masked")
    found = dose_response(model, prompts, {"probe": steered}, [1, 2, 4], measure, answers=answers)

A *condition* is a function of the dose that returns ``hooks=``: a direction by difference of means
(`difference_of_means`), of a probe (`sinklens.probes.Probe.steer`) or of an SAE (``Steer(sae.W_dec[feature], dose)``),
scheduled by ``steps=``, by `AtNoise` or by ``where=``. The effect is any measure of a run. The cost is what given
answers lose in log-likelihood per token, with the same masks for every dose.

Pitfall: every direction has an effect once it is large enough. Give a random direction of the same length as a second
condition, and compare both at equal cost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from sinklens.errors import SettingError
from sinklens.experiments.nll import likelihood
from sinklens.runs import generate
from sinklens.runs.intervention import HookSource

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

Dosed = Callable[[float], Any]
RunMeasure = Callable[["Generation"], Any]


def dose_response(
    model: "Model",
    prompts: Sequence[Any],
    conditions: Mapping[str, Dosed],
    doses: Sequence[float | int],
    measure: RunMeasure,
    *,
    answers: Sequence[Any] | None = None,
    mc_num: int = 32,
    seed: int = 0,
    **settings: Any,
) -> xr.Dataset:
    """Run every condition at every dose, and the model without any.

    Args:
        prompts: texts or rows of token ids, run in one batch.
        conditions: name -> function of the dose that returns what ``hooks=`` takes.
        doses: what these functions get.
        measure: of a run, one number for each prompt.
        answers: one for each prompt, whose likelihood is the cost; None measures no cost.
        mc_num: masks per answer, a multiple of 16.
        seed, **settings: as in `sinklens.generate`.

    Returns:
        A Dataset: ``effect`` [condition, dose, prompt], ``base`` [prompt] without hooks; with `answers` also ``cost``
        [condition, dose, prompt], nats per token by which the answer becomes less likely (negative if more), and
        ``base_likelihood`` [prompt], nats per token.

    Raises:
        SettingError: nothing to run; a measure that does not return one number per prompt; a cost of an intervention
            with ``steps=``, which a likelihood does not have.
    """
    if not conditions or not len(doses) or isinstance(prompts, str) or not len(prompts):
        raise SettingError("dose_response needs a list of prompts, a condition and a dose at least.")
    if answers is not None and len(answers) != len(prompts):
        raise SettingError(f"got {len(prompts)} prompts and {len(answers)} answers; give one answer for each prompt.")

    def effect(hooks: Any) -> np.ndarray:
        run = generate(model, list(prompts), hooks=hooks, seed=seed, record_sinks=False, progress=False, **settings)
        return _per_prompt(measure(run), len(prompts))

    def chance(hooks: Any) -> np.ndarray:
        assert answers is not None
        found = likelihood(model, list(prompts), list(answers), hooks=hooks, mc_num=mc_num, seed=seed)
        assert isinstance(found, list)
        return np.array([one.value / len(one.tokens) for one in found])

    hooks = {(name, dose): make(dose) for name, make in conditions.items() for dose in doses}
    if answers is not None:
        for entry in hooks.values():
            _refuse_steps(entry)
    axes, shape = ("condition", "dose", "prompt"), (len(conditions), len(doses), len(prompts))
    effects = np.stack([effect(entry) for entry in hooks.values()]).reshape(shape)
    data: dict[str, Any] = {"effect": (axes, effects), "base": ("prompt", effect([]))}
    if answers is not None:
        base = chance([])
        data["cost"] = (axes, base - np.stack([chance(entry) for entry in hooks.values()]).reshape(shape))
        data["base_likelihood"] = ("prompt", base)
    return xr.Dataset(data, {"condition": list(conditions), "dose": list(doses)})


def _per_prompt(values: Any, prompts: int) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    if found.shape != (prompts,):
        raise SettingError(
            f"a measure returns one number for each of the {prompts} prompts of a run; got shape {list(found.shape)}."
        )
    return found


def _refuse_steps(hooks: Any) -> None:
    """Refuse interventions at some steps, which would act in all passes of a likelihood or in none."""
    for entry in hooks if isinstance(hooks, list | tuple) else [hooks]:
        if isinstance(entry, HookSource) and entry.steps is not None:
            raise SettingError(
                f"{type(entry).__name__} has steps=, and a likelihood has no steps; schedule it by "
                f"where=AtNoise(least, most), or leave answers= out."
            )
