"""When do sinks appear in training, and do they come with accuracy?

    python -m training tiny-llada --checkpoints over-training
    sinklens analyse emergence over-training/*

Models are checkpoints of a training run, named ``RUN@STEP``; each runs on the same prompts with its default settings,
and every measure becomes a curve over steps, one line per run. Runs of one name in different folders are distinguished
by their parent folders. Sinks are defined as in Rulli et al. (2510.15731, Eq. 3, ε = 3 in column sums); how
autoregressive models acquire sinks is the question of Gu et al. (2410.10781).

Caveat: an untrained model gives arbitrary answers, and its runs have other lengths. The measures are means per head and
step, but over different steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr

from sinklens.analyses.diagnose import right_answers
from sinklens.analyses.intervals import interval_table
from sinklens.analyses.study import Study
from sinklens.errors import SettingError
from sinklens.model.prompts import SinglePrompt
from sinklens.sampling.settings import Settings
from sinklens.sinks import SinkTrack
from sinklens.sinks.motion import existing, jumps, strongest_key

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from sinklens.model import Model

MEASURES = {
    "right": "share of word problems answered right",
    "heads": "share of heads and steps that have a sink",
    "main_score": "score of the strongest key (column sum)",
    "start": "share of strongest keys that are the first position",
    "jump_share": "share of steps at which a head's strongest key changes",
}


@dataclass
class Emergence(Study):
    """See the module."""

    name: ClassVar[str] = "emergence"
    scored: ClassVar[str] = "some"

    def begin(self, models: Sequence[str], prompts: Sequence[SinglePrompt]) -> None:
        """Reject names without a step, and two models of the same run and step.

        Raises:
            SettingError: see above.
        """
        runs_and_steps(models)

    def measure(self, model: "Model", prompts: Sequence[SinglePrompt], settings: Settings) -> xr.Dataset:
        """`MEASURES` [prompt]; ``right`` is NaN for prompts without a known answer."""
        found = self.generate(model, prompts, settings)
        values = {"right": right_answers(found.run, prompts, self.answers), **sinks_of(found.track)}
        return xr.Dataset({name: ("prompt", values[name]) for name in MEASURES})

    def tables(self, measured: Mapping[str, xr.Dataset]) -> "dict[str, DataFrame]":
        """``emergence``: every measure by run and step."""
        table = interval_table(measured, list(MEASURES), self.seed)
        known = runs_and_steps(list(measured))
        places = [known[name] for name in table["model"]]
        table = table.assign(model=[run for run, _ in places], step=[step for _, step in places])
        table["meaning"] = [MEASURES[name] for name in table["measure"]]
        return {"emergence": table.sort_values(["measure", "model", "step"], kind="stable")}

    def figures(self, measured: Mapping[str, xr.Dataset], examples: Mapping[str, xr.Dataset]) -> "dict[str, Figure]":
        """``emergence``: a panel per measure."""
        from sinklens.sinks.labels import wrapped
        from sinklens.views.charts import curves
        from sinklens.views.figures import panels

        table = self.tables(measured)["emergence"]
        figure, axes = panels(len(MEASURES), columns=3, size=(4.4, 3.4))
        for (measure, meaning), ax in zip(MEASURES.items(), axes, strict=True):
            curves(table[table["measure"] == measure], "step", ax)
            ax.set(xlabel="training step", ylabel=wrapped(meaning, 34))
        return {"emergence": figure}


def run_and_step(name: str) -> tuple[str, int]:
    """The run and the training step in a checkpoint's name.

    >>> run_and_step("over-training/tiny-llada@400")
    ('tiny-llada', 400)

    Raises:
        SettingError: the name does not have that form.
    """
    run, at, step = name.rstrip("/").rpartition("/")[2].rpartition("@")
    if not at or not step.isdigit():
        raise SettingError(
            f"emergence compares checkpoints of a training run, in folders called RUN@STEP, e.g. tiny-llada@400; got "
            f"{name}. `python -m training NAME --checkpoints DIR` writes such folders."
        )
    return run, int(step)


def runs_and_steps(names: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Name -> `run_and_step`, prefixed by as many parent folders as needed to distinguish all runs.

    >>> runs_and_steps(["seeds/1/tiny@100", "seeds/2/tiny@100"])
    {'seeds/1/tiny@100': ('1/tiny', 100), 'seeds/2/tiny@100': ('2/tiny', 100)}

    Raises:
        SettingError: a name does not have that form, or two names are the same step of the same run.
    """
    places = {name: run_and_step(name) for name in names}
    paths = {name: (*Path(name).parent.resolve().parts, run) for name, (run, _) in places.items()}
    repeated = [
        place for place, number in Counter((paths[name], places[name][1]) for name in names).items() if number > 1
    ]
    if repeated:
        same = [name for name in names if (paths[name], places[name][1]) == repeated[0]]
        raise SettingError(f"{' and '.join(same)} are the same step of the same run; give each checkpoint once.")
    runs = set(paths.values())
    depth = next(depth for depth in count(1) if len({path[-depth:] for path in runs}) == len(runs))
    return {name: ("/".join(paths[name][-depth:]), step) for name, (_, step) in places.items()}


def sinks_of(track: SinkTrack) -> dict[str, np.ndarray]:
    """The sink measures of `MEASURES` [prompt], means over heads and steps."""
    there, main, axes = existing(track), strongest_key(track), ("step", "layer", "head")
    score, exists = track.scores().where(there), there.any("pos")
    changed = jumps(track)
    return {
        "heads": ((track.detect() & there).any("pos").sum(axes) / exists.sum(axes)).to_numpy(),
        "main_score": score.max("pos").mean(axes).to_numpy(),
        "start": ((main == track.data["is_real"].argmax("pos")).sum(axes) / exists.sum(axes)).to_numpy(),
        "jump_share": (changed["changes"].sum(("layer", "head")) / changed["pairs"].sum(("layer", "head"))).to_numpy(),
    }
