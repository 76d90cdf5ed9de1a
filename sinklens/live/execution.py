"""Runs a specification on a model, step by step, with a report of every step, and can stop between two.

`LiveRun` uses `Denoising` as `sinklens.generate` does, with the same prompt, settings, hooks and replay, and adds one
listener. So a run of the lab equals the call that `script` prints.

Limitation: a run stops between steps; a pass of a large model is completed first.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SinklensError
from sinklens.hooks import Point
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import Refused
from sinklens.live.spec import RunSpec
from sinklens.live.thread import RunCancelled, Stop
from sinklens.model import Model
from sinklens.runs import Generation
from sinklens.runs.denoising import Denoising
from sinklens.runs.request import RunRequest
from sinklens.sampling.state import State
from sinklens.sinks import Record
from sinklens.views.html import visible

CONFIDENCE = "denoise.hook_confidence"
STRONGEST = 3  # keys of each head that a step reports
OnEvent = Callable[..., None]


class LiveRun:
    """A run under way.

    Attributes:
        denoising: the run.
        canvases: the canvases so far: what each step worked on, and the newest.
        undecided: their undecided positions.
        scores: sink scores of the finished steps, [layer, head, pos] each.
        seconds: time since the first step began.
    """

    def __init__(self, spec: RunSpec, model: "Model", replay: Generation | None, report: OnEvent, stop: Stop) -> None:
        """Prepare the run, which `stop` ends; see `Denoising` for the errors raised."""
        self._report, self._stop = report, stop
        self.denoising = denoising(spec, model, replay=replay)
        self.canvases: list[np.ndarray] = []
        self.undecided: list[np.ndarray] = []
        self.scores: list[np.ndarray] = []
        self._known: set[int] = set()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    def carry_out(self) -> RunOutcome | None:
        """Run all steps, or those before it was stopped; None if none finished.

        Raises:
            DeviceMemoryError: memory ran out; the model remains usable.
        """
        state, planned = self.denoising.state, self.denoising.settings.most_steps
        self._began = time.perf_counter()
        self._report(
            "started", steps=planned, prompt_length=state.prompt_length, positions=state.canvas.shape[1],
            canvas=state.canvas[0].tolist(), tokens=self._new_tokens(state.canvas[0].tolist()),
        )  # fmt: skip
        with suppress(RunCancelled):
            self.denoising.carry_out([self, self._stop])
        return self.finished()

    def finished(self) -> RunOutcome | None:
        """The steps that are finished; None if none is."""
        run = self.denoising.result()
        return None if run.sinks is None else RunOutcome.of(run)

    def before(self, step: int, state: "State") -> None:
        """Keep the first canvas."""
        if step == 0:
            self.canvases.append(state.canvas[0].cpu().numpy())
            self.undecided.append(state.undecided_after()[0].cpu().numpy())

    def after(self, step: int, state: "State") -> None:
        """Report the step."""
        latest = self.denoising.latest
        self.canvases[-1] = state.step_canvas[0].cpu().numpy()
        self.undecided[-1] = state.undecided_before()[0].cpu().numpy()
        canvas, undecided = state.canvas[0].cpu().numpy(), state.undecided_after()[0].cpu().numpy()
        self.scores.append(latest["score"][0])
        self.canvases.append(canvas)
        self.undecided.append(undecided)
        seconds, done = self.seconds, step + 1
        self._report(
            "step",
            step=step,
            canvas=canvas.tolist(),
            undecided=np.flatnonzero(undecided).tolist(),
            committed=np.flatnonzero(latest["committed"][0]).tolist(),
            sinks=strongest(latest["score"][0]),
            tokens=self._new_tokens(canvas.tolist()),
            seconds=round(seconds, 3),
            left=round(seconds / done * (self.denoising.settings.most_steps - done), 3),
        )

    def _new_tokens(self, ids: Sequence[int]) -> dict[int, str]:
        """Text of tokens that no event has had yet."""
        new = set(ids) - self._known
        self._known |= new
        return texts(self.denoising.model, new)


def texts(model: "Model", ids: Any) -> dict[int, str]:
    """Text of token ids as a page shows it; empty for a model without a tokenizer."""
    if model.tokenizer is None:
        return {}
    return {int(token): visible(str(model.tokenizer.decode([int(token)]))) for token in ids if token >= 0}


def strongest(score: Float[np.ndarray, "layer head pos"]) -> list[list[list[list[int | float]]]]:
    """The strongest keys of every layer and head as [position, score], strongest first."""
    known = np.nan_to_num(score.astype(np.float32), nan=-np.inf)
    order = np.argsort(-known, axis=-1, kind="stable")[..., :STRONGEST]
    values = np.take_along_axis(known, order, axis=-1).astype(np.float64).round(3).tolist()
    return [
        [[[at, value] for at, value in zip(*head, strict=True) if value > -np.inf] for head in zip(*layer, strict=True)]
        for layer in zip(order.tolist(), values, strict=True)
    ]


def denoising(
    spec: RunSpec,
    model: "Model",
    *,
    replay: Generation | None = None,
    extra: Sequence[Any] = (),
    record: bool | Record = True,
    changes: Sequence[Any] | None = None,
    copies: int = 1,
) -> Denoising:
    """The run of `spec`, not yet carried out.

    Args:
        replay: the run that `spec.replay` names.
        extra: hooks that change nothing, after those of the run.
        record: what to record.
        changes: interventions instead of those of `spec`.
        copies: rows of the run; each has the prompt of `spec`.
    """
    own = [change.build() for change in spec.changes] if changes is None else changes
    request = RunRequest(
        spec.prompt, spec.seed, spec.chat_template, [*own, *extra], record, replay, spec.cache, progress=False,
        settings=spec.of_sampler, copies=copies,
    )  # fmt: skip
    return Denoising(model, request)


def check_start(spec: RunSpec, model: "Model", replay: Generation | None = None) -> None:
    """Check that the run can begin: its prompt, its settings, what it replays, and each of its chips.

    The run is prepared as for real, and nothing is attached to the model, so this is safe while another run is in
    progress.

    Raises:
        Refused: it cannot; names the chip if one is at fault.
    """
    try:
        denoising(spec, model, replay=replay)
    except (SinklensError, Refused) as error:
        raise _blamed(spec, model, error) from error


def _blamed(spec: RunSpec, model: "Model", error: Exception) -> Refused:
    """The refusal of a run that cannot begin, which names the first chip with which alone it cannot either."""
    plain = replace(spec, chips=())
    with suppress(SinklensError):
        denoising(plain, model)
        for chip in spec.chips:
            try:
                denoising(replace(plain, chips=(chip,)), model)
            except (SinklensError, Refused) as reason:
                return Refused(str(reason), 422, chip["id"])
    return Refused(str(error), 422)


def repeat(
    spec: RunSpec,
    model: "Model",
    outcome: RunOutcome,
    *,
    steps: int | None = None,
    extra: Sequence[Any] = (),
    record: bool | Record = False,
    changes: Sequence[Any] | None = None,
    copies: int = 1,
    listeners: Sequence[Stop] = (),
) -> Generation:
    """Repeat a finished run on its own canvases, to read what it did not keep.

    Args:
        steps: number of steps to repeat, from the first; by default all.
        extra: hooks that keep values.
        record: what to record.
        changes, copies: as in `denoising`.
        listeners: called before and after each step.
    """
    again = denoising(spec, model, extra=extra, record=record, changes=changes, copies=copies)
    frames = (outcome.steps if steps is None else steps) + 1
    canvases = torch.from_numpy(outcome.canvas[None, :frames].astype(np.int64)).repeat(copies, 1, 1)
    if not again.settings.draws_canvas:
        begun = again.state.canvas.cpu()  # without tokens forced at step 0, which are on the recorded canvas
        canvases[:, 0] = torch.where(begun >= 0, begun, canvases[:, 0])
    again.state.replay = canvases
    again.state.replay_undecided = torch.from_numpy(outcome.undecided[None, :frames].copy()).repeat(copies, 1, 1)
    again.carry_out(listeners)
    return again.result()


def snapshot(live: LiveRun) -> Mapping[str, Any]:
    """The steps so far of a run under way, in the form of `RunOutcome`'s arrays."""
    done = len(live.scores)
    return {
        "canvas": list(live.canvases[: done + 1]),
        "undecided": list(live.undecided[: done + 1]),
        "score": list(live.scores[:done]),
    }


def confidence_hooks(model: "Model", kept: dict[int, Tensor]) -> list[tuple[str, Callable[..., None]]]:
    """The hook that keeps the confidence of every position by step; none if the model's sampler computes none."""

    def keep(value: Tensor, hook: Point) -> None:
        kept[hook.step or 0] = value[0].detach().float().cpu()

    return [(CONFIDENCE, keep)] if CONFIDENCE in model.tree.hook_dict else []
