"""A run as JSON for the page. Large arrays are base64 of little-endian float16."""

import base64
from functools import lru_cache
from typing import Any

import numpy as np

from sinklens.live.execution import LiveRun, snapshot, texts
from sinklens.live.history import LabRun
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import require
from sinklens.live.session import Session
from sinklens.views.report_data import Numbers, layer_maps, run_data

LARGE = 32_000_000  # bytes of scores that are not sent


def packed(array: np.ndarray) -> dict[str, Any]:
    """An array as {shape, dtype, data}."""
    data = np.ascontiguousarray(array, dtype="<f2").tobytes()
    return {"shape": list(array.shape), "dtype": "float16", "data": base64.b64encode(data).decode()}


def detail(session: Session, run_id: str) -> dict[str, Any]:
    """Everything that the page needs of a run, finished or under way; without steps, what was requested."""
    run = session.run(run_id)
    found = {"summary": run.summary(), "spec": run.spec.to_json(), "chips": list(run.spec.chips), "heads": run.heads}
    if run.readable:
        return found | _of_outcome(session.history.load(run.id), run, session)
    live = run.live
    return found | ({} if live is None or not live.scores else _of_live(live))


def _of_outcome(outcome: RunOutcome, run: LabRun, session: Session) -> dict[str, Any]:
    return {
        "canvas": outcome.canvas.tolist(),
        "undecided": [np.flatnonzero(row).tolist() for row in outcome.undecided],
        "committed": [np.flatnonzero(row).tolist() for row in outcome.committed],
        "unmask_step": outcome.unmask_step.tolist(),
        "tokens": outcome.vocabulary,
        "prompt_length": outcome.prompt_length,
        "first": int(outcome.real.argmax()),
        "scores": _scores(outcome.score),
        "patterns": run.spec.model in session.models,
        "settings": dict(outcome.settings),
        "text": outcome.answer.text,
        "ended": outcome.answer.ended,
        "masks": outcome.answer.masks,
        "right": run.facts.get("right"),
        "record": dict(outcome.attrs),
        "data": run_data(numbers_of(session, run.id)),
    }


@lru_cache(maxsize=8)
def numbers_of(session: Session, run_id: str) -> Numbers:
    """The figures' numbers of a run that has ended; those of the latest runs are kept."""
    outcome = session.history.load(run_id)
    return Numbers(outcome.track(), outcome.canvas)


def maps_of_layer(session: Session, run: LabRun, layer: int | None) -> dict[str, Any]:
    """The maps of one layer; None: of the mean over all heads.

    Raises:
        Refused: there is no such layer, or the run has not ended.
    """
    session.outcome(run.id)
    numbers = numbers_of(session, run.id)
    if layer is not None:
        check_index("layer", layer, numbers.layers)
    return layer_maps(numbers, layer)


def _of_live(live: LiveRun) -> dict[str, Any]:
    """The steps so far."""
    arrays, state, model = snapshot(live), live.denoising.state, live.denoising.model
    canvas = [row.tolist() for row in arrays["canvas"]]
    return {
        "canvas": canvas,
        "undecided": [np.flatnonzero(row).tolist() for row in arrays["undecided"]],
        "tokens": texts(model, {token for row in canvas for token in row}),
        "prompt_length": state.prompt_length,
        "first": int(state.real[0].long().argmax()),
        "scores": _scores(np.stack(arrays["score"])),
        "patterns": False,
    }


def _scores(score: np.ndarray) -> dict[str, Any]:
    """The scores, or only their shape where they are large."""
    if 2 * score.size > LARGE:
        return {"shape": list(score.shape), "dtype": "float16", "data": None}
    return packed(score)


def check_index(what: str, index: int, size: int) -> None:
    """Refuse an index that does not exist.

    Raises:
        Refused: it does not.
    """
    require(0 <= index < size, f"{what} {index} does not exist; there are {size}, 0 to {size - 1}.", 404)
