"""What interventions do to a prompt's run, in the measures that the studies of this folder share.

Every prompt is swept by itself, with all its interventions in one batch: what is measured of a prompt then depends on
no other prompt. Each intervention is run twice, *free* (what becomes of the answer?) and *under replay* of the
unchanged run (what does it do to the predictions of a step, on the same canvas?).

Sinks are masked in two ways. The *strongest* keys of the step before are the paper's (Rulli et al., 2510.15731, Sec.
4.3). But a key that is masked receives nothing, so at the next step it is not the strongest, another is masked, and it
is seen again: a lasting sink is masked at every other step. *Steady* masking takes the strongest keys of the unchanged
run's step before (of an autoregressive model, by column sums), and so hides a lasting sink at every step. *Random*
keys, as many and drawn anew for every step and head, are the control.

One way this fails: an answer in other words can be as right, and one changed digit makes it wrong. ``changed`` and
``right`` are told side by side, and a prompt whose answer is not known has no ``right``.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from sinklens.experiments import sweep
from sinklens.interventions import MaskSinks
from sinklens.sinks import SinkTrack
from sinklens.tasks.word_problems import held_out, read_answer

if TYPE_CHECKING:
    from sinklens.analyses.study import Study
    from sinklens.model import Model

MEANINGS = {
    "kl": "KL divergence from the unchanged run (nats per undecided position, under replay)",
    "agreement": "undecided positions whose likeliest token stays the same (under replay)",
    "confidence": "change of the likeliest token's probability (under replay)",
    "changed": "answers that change",
    "edits": "tokens to insert, delete or replace until the answer is that of the unchanged run",
    "right": "word problems answered right",
}

KEYS = {
    "strongest": "strongest key of the step before",
    "steady": "strongest key of the unchanged run",
    "random": "random key",
}


def masked(track: SinkTrack, top_k: int = 1, **place: Any) -> dict[str, MaskSinks]:
    """The three ways of `KEYS`.

    Args:
        track: of the unchanged run of the same prompt.
        place: ``layers=``, ``heads=`` and the like.
    """
    return {
        "strongest": MaskSinks(top_k=top_k, **place),
        "steady": MaskSinks(top_k=top_k, source=track, **place),
        "random": MaskSinks(top_k=top_k, pick="random", **place),
    }


def unchanged(study: "Study", model: "Model", prompt: Any, settings: Mapping[str, Any]) -> SinkTrack:
    """The sink track of a prompt's run."""
    track = study.generate(model, [prompt], settings).run.sinks
    assert track is not None
    return track


def each_prompt(prompts: Sequence[Any], one: Callable[[Any], xr.Dataset]) -> xr.Dataset:
    """`one` of every prompt, along ``prompt``; axes of different length are filled with NaN."""
    return xr.concat([one(prompt) for prompt in prompts], dim="prompt", join="outer")


def free_effects(
    study: "Study", model: "Model", prompt: Any, settings: Mapping[str, Any], interventions: Mapping[str, Any]
) -> xr.Dataset:
    """``changed``, ``edits`` and ``right`` of `MEANINGS`, [intervention]; an empty list is the unchanged run."""
    found = _swept(study, model, prompt, settings, interventions, replay=False)
    right = [is_right(prompt, text) for text in found["answer"].to_numpy()]
    return xr.Dataset(
        {
            "changed": ("intervention", 1.0 - found["same_answer"].to_numpy().astype(float)),
            "edits": ("intervention", found["edit_distance"].to_numpy().astype(float)),
            "right": ("intervention", np.array(right)),
        },
        coords={"intervention": list(interventions)},
    )


def replayed_effects(
    study: "Study", model: "Model", prompt: Any, settings: Mapping[str, Any], interventions: Mapping[str, Any]
) -> xr.Dataset:
    """``kl``, ``agreement`` and ``confidence`` of `MEANINGS`, [intervention], and ``kl_step`` [intervention, step]."""
    found = _swept(study, model, prompt, settings, interventions, replay=True)
    values = {
        "kl_step": found["kl"],
        "kl": found["kl"].mean("step"),
        "agreement": found["top1_agreement"].mean("step"),
        "confidence": (found["confidence_changed"] - found["confidence"]).mean("step"),
    }
    return xr.Dataset(values).assign_coords(intervention=list(interventions))


def effects(
    study: "Study", model: "Model", prompt: Any, settings: Mapping[str, Any], interventions: Mapping[str, Any]
) -> xr.Dataset:
    """`free_effects` and `replayed_effects`: all of `MEANINGS`, [intervention], and ``kl_step``."""
    asked = (study, model, prompt, settings, interventions)
    return xr.merge([free_effects(*asked), replayed_effects(*asked)])


def _swept(
    study: "Study", model: "Model", prompt: Any, settings: Mapping[str, Any], interventions: Mapping[str, Any],
    replay: bool,
) -> xr.Dataset:  # fmt: skip
    found = sweep(
        model, prompt, interventions, replay=replay, seed=study.seed, chat_template=study.chat_template,
        progress=False, **settings,
    )  # fmt: skip
    return found.isel(prompt=0)


def is_right(prompt: str | Sequence[int], text: str) -> float:
    """1 where the number behind ``####`` is right, 0 where not; NaN for a prompt that is no shipped word problem, and
    for one of token ids.
    """
    result = _results().get(prompt) if isinstance(prompt, str) else None
    return float("nan") if result is None else float(read_answer(text) == result)


@cache
def _results() -> dict[str, int]:
    return {problem.prompt: problem.result for problem in held_out()}
