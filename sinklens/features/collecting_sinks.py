"""Record the sinks of many runs on disk, in one store.

`collect_sinks` runs prompts in batches and hands the recorded steps, a few at a time, to a `RunStore`. Neither the
number of runs nor their steps change how much memory it takes. What is kept of a step is everything, the strongest keys
of each head, or the sinks that a detector finds.

Pitfall: scores of the strongest keys do not say how strong the others were. A definition of a sink that compares with
the mean, as the paper's does, can be applied later only to a store of all scores.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from sinklens.errors import SettingError
from sinklens.features.collecting import batches, listed_prompts, run_settings
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.identity import fingerprint
from sinklens.runs.request import RunRequest
from sinklens.runs.start import start
from sinklens.sampling.policies import CachePolicy
from sinklens.sinks import Detector, EpsilonOverMean, Record
from sinklens.sinks.run_store import RunStore
from sinklens.sinks.store import StoredType, nothing
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Count, Seed, read_as
from sinklens.utils.progress import OnProgress

if TYPE_CHECKING:
    from sinklens.sinks.quantities import Quantity

Keep = Literal["all", "top", "sinks"]
SCORES = ("score", "score_error")


def collect_sinks(
    model: Model,
    prompts: Sequence[Any],
    to: str | Path,
    *,
    keep: Keep = "all",
    top_k: Count = 8,
    detector: Detector | None = None,
    quantities: "Sequence[str | Quantity]" = (),
    exact: bool = True,
    dtype: StoredType = "float32",
    cache: CachePolicy | None = None,
    batch: Count = 16,
    seed: Seed = 0,
    chat_template: bool | str = False,
    report: OnProgress | None = None,
    **settings: Any,
) -> RunStore:
    """Run `model` on `prompts` and write the sinks of every run to one store; the same call resumes.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        to: path of the store, a new folder or that of an interrupted call with the same arguments.
        keep: "all" scores; the "top", positions and scores of the `top_k` strongest keys of every head and step:
            ``top_pos`` and ``top_score`` [batch, step, layer, head, rank]; or "sinks", those that `detector` finds.
        top_k: see `keep`; fewer where a text has fewer positions.
        detector: see `keep`; the paper's definition by default. It sees a few steps at a time, so it must not compare
            steps.
        quantities: recorded in addition to the scores, as in `Record`; they are stored beside what is kept.
        exact: False estimates the scores, as in `Record`.
        dtype: type of scores and quantities on disk. float16 keeps three significant digits of numbers up to 65,504,
            bfloat16 two of any.
        cache: a cache policy, as in `sinklens.generate`.
        batch: prompts per run; what is stored does not depend on it. Copies of a prompt run in separate batches.
        seed, chat_template, **settings: as in `sinklens.generate`.
        report: called after each batch with the number of finished prompts and of all prompts.

    Raises:
        SettingError: there are no prompts, an argument is wrong or does not apply, or `to` holds something else.
    """
    listed = listed_prompts(prompts, "collect_sinks")
    _check(keep, detector, dtype)
    read_as(Count, "batch", batch), read_as(Count, "top_k", top_k)
    found = detector or EpsilonOverMean()
    about = {
        **run_settings(model, listed, settings, cache), "seed": seed, "chat_template": chat_template, "dtype": dtype,
        "keep": keep, "top_k": top_k if keep == "top" else None, "exact": exact,
        "detector": fingerprint(found) if keep == "sinks" else None,
        "quantities": [one if isinstance(one, str) else fingerprint(one) for one in quantities],
    }  # fmt: skip
    steps, positions = _sizes(model, listed, seed, chat_template, settings)
    store = RunStore.begin(to, about, steps, positions)
    for _, part in batches(listed, lambda: len(store), batch, report):
        into = _Into(store, keep, top_k, found, len(part))
        record = Record(quantities, exact=exact, reduce=into.take)
        run = generate(
            model, part, seed=seed, chat_template=chat_template, progress=False, cache=cache, record_sinks=record,
            **settings,
        )  # fmt: skip
        per_run = {"is_real": run.real.numpy(), "unmask_step": run.unmask_step.numpy().astype(np.int32)}
        per_run |= {"steps_run": np.full(len(part), run.steps_run, dtype=np.int32)} | into.bounds()
        store.end_batch(per_run, into.attributes(positions))
    return store


def _check(keep: str, detector: Detector | None, dtype: str) -> None:
    read_as(Keep, "keep", keep), read_as(StoredType, "dtype", dtype)
    if detector is not None and keep != "sinks":
        raise SettingError(f"detector= belongs to keep='sinks'; with keep={keep!r} leave it out.")


def _sizes(
    model: Model, prompts: list[Any], seed: int, chat_template: bool | str, settings: dict[str, Any]
) -> tuple[int, int]:
    """Steps and positions of the longest run."""
    lengths = [len(model.encode(prompt, chat_template)[0][0]) for prompt in prompts]
    longest = prompts[int(np.argmax(lengths))]
    begun = start(model, RunRequest(longest, seed, chat_template, settings=settings))
    return begun.settings.fitted(lengths).most_steps, begun.state.canvas.shape[1]


class _Into:
    """Hands the steps of a batch to the store.

    Args:
        store: the store.
        keep, top_k, detector: as in `collect_sinks`.
        rows: runs of the batch.
    """

    def __init__(self, store: RunStore, keep: Keep, top_k: int, detector: Detector, rows: int) -> None:
        self._store, self._detector, self._rows = store, detector, rows
        self._first_sink, self._step, self._k = store.sinks_so_far, 0, top_k
        self._attributes: dict[str, Any] = {}
        self._columns = 0
        self._keep = keep
        kept: dict[Keep, Callable[[SinkTrack], xr.Dataset]] = {"all": _all, "top": self._top, "sinks": self._sinks}
        self._kept = kept[keep]

    def take(self, track: SinkTrack) -> None:
        """Steps that follow those before."""
        self._attributes, self._columns = dict(track.data.attrs), track.data.sizes["pos"]
        kept = self._kept(track)
        real, steps = track.data["is_real"], [name for name in kept.data_vars if "step" in kept[name].dims]
        missing = {
            name: kept[name].where(real, nothing(kept[name].dtype)).transpose(*kept[name].dims)
            for name in steps
            if "pos" in kept[name].dims
        }  # padding within the batch is like padding before it
        kept = kept.assign(missing)[steps]
        self._store.add(self._step, kept.drop_vars(list(kept.coords)))
        self._step += track.steps

    def bounds(self) -> dict[str, np.ndarray]:
        """Where the sinks of the batch lie, for each of its runs."""
        if self._keep != "sinks":
            return {}
        ends = {"sinks_first": self._first_sink, "sinks_last": self._store.sinks_so_far}
        return {name: np.full(self._rows, end, dtype=np.int64) for name, end in ends.items()}

    def attributes(self, positions: int) -> dict[str, Any]:
        """The attributes of a track of the store, whose prompts are padded to `positions` with the answer."""
        answer = self._columns - int(self._attributes["prompt_length"])
        return self._attributes | {"prompt_length": positions - answer}

    def _top(self, track: SinkTrack) -> xr.Dataset:
        """The strongest keys in place of all scores; positions count from the store's first."""
        score = track.scores()
        place = track.top(min(self._k, score.sizes["pos"]))
        value = np.take_along_axis(score.fillna(-np.inf).to_numpy(), np.maximum(place.to_numpy(), 0), axis=-1)
        value = np.where(place.to_numpy() < 0, np.nan, value).astype(np.float32)
        shifted = (place + self._shift(track)).where(place >= 0, -1).astype(np.int32)
        return _without_scores(track).assign(top_pos=shifted, top_score=shifted.copy(data=value))

    def _sinks(self, track: SinkTrack) -> xr.Dataset:
        """No scores; the sinks go to the store."""
        found = track.detect(self._detector).to_numpy()
        run, step, layer, head, pos = np.nonzero(found)
        self._store.add_sinks({
            "run": run + len(self._store), "step": step + self._step, "layer": layer, "head": head,
            "pos": pos + self._shift(track), "score": track.data["score"].to_numpy()[found],
        })  # fmt: skip
        return _without_scores(track)

    def _shift(self, track: SinkTrack) -> int:
        """Positions of padding before those of the batch."""
        return self._store.sizes["pos"] - track.data.sizes["pos"]


def _all(track: SinkTrack) -> xr.Dataset:
    return track.data


def _without_scores(track: SinkTrack) -> xr.Dataset:
    return track.data.drop_vars(SCORES, errors="ignore")
