"""Effects of interventions on a prompt's run, in the measures that the studies of this folder share.

Every prompt is swept separately, with all its interventions in one batch, so the measurements of a prompt do not depend
on other prompts. Each intervention is run twice: *free* (how does the answer change?) and *under replay* of the
unchanged run (how do the predictions of a step change, on the same canvas?).

Sinks are masked in two ways. Masking the *strongest* keys of the previous step follows the paper (Rulli et al.,
2510.15731, Sec. 4.3). But a masked key receives no attention, so at the next step it is not the strongest, another key
is masked, and it is visible again: a lasting sink is masked at every other step. *Steady* masking takes the strongest
keys of the unchanged run's previous step (in an autoregressive model, by column sums), and so hides a lasting sink at
every step. The first control is as many *random* keys: weaker than the unchanged run's strongest, and drawn once per
head and run, because sinks last too. They receive less attention, so the second control is as many of them as receive,
together, the attention of the strongest (*same mass*), or all of the head's where even these receive less; mass.py
matches over all heads of a layer instead.

Caveat: a differently worded answer can be just as right, and one changed digit makes it wrong. ``changed`` and
``right`` are reported side by side, and a prompt whose answer is unknown has no ``right``.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from sinklens.experiments import sweep
from sinklens.interventions import MaskKeys, MaskSinks
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack
from sinklens.tasks.word_problems import NUMBER, held_out, read_answer

if TYPE_CHECKING:
    from sinklens.analyses.study import Study
    from sinklens.model import Model

MEANINGS = {
    "kl": "KL divergence from the unchanged run (nats per undecided position, under replay)",
    "changed": "share of answers that change",
    "right": "share of word problems answered right",
}

KEYS = {
    "strongest": "strongest key of the previous step",
    "steady": "strongest key of the unchanged run",
    "random": "random key",
    "same_mass": "random keys with as much attention",
}


def masked(track: SinkTrack, top_k: int = 1, **place: Any) -> dict[str, MaskKeys]:
    """One masking intervention per entry of `KEYS`.

    Args:
        track: the track of the unchanged run of the same prompt.
        top_k: number of keys masked per head.
        place: where to mask, e.g. ``layers=`` and ``heads=``.
    """
    return {
        "strongest": MaskSinks(top_k=top_k, **place),
        "steady": MaskSinks(top_k=top_k, source=track, **place),
        "random": MaskSinks(top_k=top_k, source=track, pick="random", persistent=True, **place),
        "same_mass": MaskSinks(top_k=top_k, source=track, pick="same_mass", persistent=True, **place),
    }


def unchanged(study: "Study", model: "Model", prompt: SinglePrompt, settings: Settings) -> SinkTrack:
    """The sink track of a prompt's run without interventions."""
    track = study.generate(model, [prompt], settings).run.sinks
    assert track is not None
    return track


def free_effects(
    study: "Study", model: "Model", prompt: SinglePrompt, settings: Settings, interventions: Mapping[str, Any]
) -> xr.Dataset:
    """``right`` and ``changed`` of `MEANINGS`, [intervention]; an empty list gives the unchanged run.

    ``control_found`` is the number of control keys over that of the keys they control for; NaN without a control.
    """
    found = swept(study, model, prompt, settings, interventions)
    controlled = "control_picked" in found
    shares = found["control_picked"] / found["control_requested"] if controlled else found["same_answer"] * np.nan
    values = {
        "right": [is_right(prompt, text, study.answers) for text in found["answer"].to_numpy()],
        "changed": 1.0 - found["same_answer"].to_numpy().astype(float),
        "control_found": shares.to_numpy(),
    }
    arrays = {name: ("intervention", value) for name, value in values.items()}
    return xr.Dataset(arrays, {"intervention": list(interventions)})


def costs_over(
    study: "Study", model: "Model", prompt: SinglePrompt, settings: Settings, axes: Mapping[str, Sequence[Any]],
    interventions: Mapping[str, Any],
) -> xr.Dataset:  # fmt: skip
    """`free_effects` over `axes`, with ``base``, right with nothing changed, and ``cost``: base minus right.

    Args:
        interventions: those of the cells, named by the cell's labels with spaces between them; a cell without one is
            NaN.
    """
    found = free_effects(study, model, prompt, settings, {"unchanged": [], **interventions})
    cells = found.reindex(intervention=[" ".join(map(str, labels)) for labels in product(*axes.values())])
    shape, base = [len(labels) for labels in axes.values()], found["right"].isel(intervention=0, drop=True)
    data = xr.Dataset({name: (tuple(axes), one.to_numpy().reshape(shape)) for name, one in cells.items()}, axes)
    return data.assign(cost=base - data["right"], base=base)


def swept(
    study: "Study", model: "Model", prompt: SinglePrompt, settings: Settings, interventions: Mapping[str, Any],
    replay: bool = False,
) -> xr.Dataset:  # fmt: skip
    found = sweep(
        model, prompt, interventions, replay=replay, seed=study.seed, chat_template=study.chat_template,
        progress=False, **settings,
    )  # fmt: skip
    return found.isel(prompt=0)


def is_right(prompt: SinglePrompt, text: str, answers: Mapping[str, str] | None = None) -> float:
    """1 if `text` is the right answer, else 0; NaN for a prompt whose answer is unknown, and for token ids.

    An expected answer that is a number, or states one as `read_answer` reads it, is compared with the number that
    `text` states (or with all of `text`, if it states none). Any other has to equal `text`, apart from white space at
    both ends.

    Args:
        answers: prompt -> expected answer; the shipped word problems are known without it.
    """
    if not isinstance(prompt, str):
        return float("nan")
    expected = (answers or {}).get(prompt)
    if expected is None:
        result = _results().get(prompt)
        return float("nan") if result is None else float(read_answer(text) == result)
    found, wanted = read_answer(text), read_answer(expected)
    if wanted is None and found is not None:
        wanted = read_answer(f"#### {expected.strip()}") if re.fullmatch(rf"\s*{NUMBER}\s*", expected) else None
    return float(found == wanted if wanted is not None else text.strip() == expected.strip())


def known(prompt: SinglePrompt, answers: Mapping[str, str]) -> bool:
    """Whether `is_right` can judge answers to a prompt."""
    return isinstance(prompt, str) and (prompt in answers or prompt in _results())


@cache
def _results() -> dict[str, int]:
    return {problem.prompt: problem.result for problem in held_out()}
