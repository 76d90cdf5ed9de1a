"""The effect of an intervention, and of a mode: runs of the same prompts, and their comparisons, in one call.

With an intervention, `effect` runs a prompt without it, with it, and with it on the canvases of the first run. With two
modes of a model that changes its attention, it decodes the prompt in both, and feeds the first mode's text to passes of
both kinds.

Pitfall: two modes decode in different steps, so their runs are compared by their answers, not step by step.
"""

from dataclasses import dataclass
from typing import Any, overload

import xarray as xr

from sinklens.errors import SettingError
from sinklens.experiments.comparison import compare
from sinklens.experiments.modes import modes_compared
from sinklens.experiments.sink_changes import sinks_compared
from sinklens.interventions.logits import MaskedLogits
from sinklens.model import load
from sinklens.runs import generate
from sinklens.runs.request import Hooks, hook_list
from sinklens.runs.result import Generation
from sinklens.sampling.key_cache import Policy
from sinklens.sampling.registry import find_sampler, sampler_name
from sinklens.sampling.settings import Mode
from sinklens.sinks.record import Record


@dataclass(frozen=True)
class Effect:
    """An intervention's effect, as returned by `effect`.

    Attributes:
        base, free, replayed: the run without it, with it, and with it on the base run's canvases.
        free_running, under_replay: `compare` of base with `free` and with `replayed`.
        same_queries: the base run once more, with sink scores summed over the queries that `replayed` computed; None
            without a cache policy, or without sinks.
    """

    base: Generation
    free: Generation
    replayed: Generation
    free_running: xr.Dataset
    under_replay: xr.Dataset
    same_queries: Generation | None = None

    def __repr__(self) -> str:
        same, kl = self.free_running["same_answer"], self.under_replay["kl"]
        return (
            f"Effect({int(same.sum())} of {same.size} answers stay the same, "
            f"mean KL under replay {float(kl.mean()):.3g} nats over {kl.sizes['step']} steps)"
        )


@dataclass(frozen=True)
class ModeEffect:
    """What decoding in another mode changes, as returned by `effect` with ``modes=``.

    Attributes:
        base, free: the runs in the two modes.
        free_running: `compare` of them.
        at_equal_text: `modes_compared` of the text of `base`, in passes of the unchanged model, without `hooks`.
    """

    base: Generation
    free: Generation
    free_running: xr.Dataset
    at_equal_text: xr.Dataset

    def __repr__(self) -> str:
        same, kl = self.free_running["same_answer"], self.at_equal_text["kl"]
        return (
            f"ModeEffect({int(same.sum())} of {same.size} answers are the same, mean KL of the unchanged model at "
            f"equal text {float(kl.mean()):.3g} nats)"
        )


@overload
def effect(
    model: Any, prompt: Any, hooks: Hooks = (), *, seed: int = 0, cache: Policy | str | None = None, **settings: Any
) -> Effect: ...
@overload
def effect(
    model: Any, prompt: Any, hooks: Hooks = (), *, modes: tuple[Mode, Mode], seed: int = 0, **settings: Any
) -> ModeEffect: ...
def effect(
    model: Any,
    prompt: Any,
    hooks: Hooks = (),
    *,
    modes: tuple[Mode, Mode] | None = None,
    seed: int = 0,
    cache: Policy | str | None = None,
    **settings: Any,
) -> Effect | ModeEffect:
    """Run `model` on `prompt` without `hooks`, with them, and with them under replay; compare, logits included.

    With `cache` the first run is exact and the others follow the policy: ``effect(model, prompt, cache="dual")``
    reports what the policy changes. ``under_replay`` then also has the counts of `sinks_compared`. A step under a
    policy computes fewer queries, and sums over fewer queries have other sinks even if no attention changed. So a
    fourth run repeats the exact one with sums over the queries of the third, and these two are compared.

    With `modes` the prompt is decoded in two modes instead, under `hooks` in both, and with the same settings as far as
    both have them; see `ModeEffect`. The passes at equal text are those of the unchanged model.

    Args:
        prompt: as in `sinklens.generate`; with several prompts, each measure is [batch, …] (use
            `analyses.intervals.mean_interval` for its interval over them).
        hooks: an intervention, or a list of interventions and (name, function) pairs.
        modes: two modes of a model that changes its attention, such as ``("autoregressive", "diffusion")``.
        cache: a cache policy or its name, for the second and third run.
        seed, **settings: as in `sinklens.generate`.
    """
    entries = hook_list(hooks)
    if modes is not None:
        return _of_modes(model, prompt, modes, entries, {"seed": seed, "cache": cache, **settings})
    kept = [MaskedLogits() for _ in range(3)]
    base = generate(model, prompt, seed=seed, hooks=[kept[0]], progress=False, **settings)
    settings |= {"seed": seed, "cache": cache, "progress": False}
    free = generate(base.model, prompt, hooks=[*entries, kept[1]], **settings)
    replayed = generate(base.model, prompt, hooks=[*entries, kept[2]], replay=base, **settings)
    free_running, under_replay = (
        compare(base, run, kept[0].kept, logits.kept) for run, logits in ((free, kept[1]), (replayed, kept[2]))
    )
    if cache is None or replayed.sinks is None:
        return Effect(base, free, replayed, free_running, under_replay)
    record = Record(queries=replayed.sinks["fresh"].any("layer") if "fresh" in replayed.sinks else None)
    same = generate(base.model, prompt, replay=base, **settings | {"cache": None, "record_sinks": record})
    under_replay = xr.merge([under_replay, sinks_compared(same, replayed)], join="outer")
    return Effect(base, free, replayed, free_running, under_replay, same)


def _of_modes(
    model: Any, prompt: Any, modes: tuple[Mode, Mode], hooks: list[Any], settings: dict[str, Any]
) -> ModeEffect:
    """The effect of decoding in the second of two modes instead of the first."""
    if len(modes) != 2 or modes[0] == modes[1]:
        raise SettingError(f"modes= takes two different modes, such as ('autoregressive', 'diffusion'); got {modes!r}.")
    model = load(model)

    def run(mode: Mode) -> Generation:
        known = find_sampler(sampler_name(model.family_record, {"mode": mode})).setting_names()
        others = {name for other in model.family_record.modes.values() for name in find_sampler(other).setting_names()}
        chosen = {name: value for name, value in settings.items() if name in known or name not in others}
        return generate(model, prompt, mode=mode, hooks=hooks, progress=False, **chosen)

    base, free = run(modes[0]), run(modes[1])
    at_equal_text = modes_compared(base, settings.get("block_length"))
    return ModeEffect(base, free, compare(base, free), at_equal_text)
