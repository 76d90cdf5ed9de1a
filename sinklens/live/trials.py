"""Trials of all heads of a run: started, followed and stopped by the page.

A trial is background work of the model thread: one group of heads at a time, so that a run or a pattern that somebody
waits for goes first. Each group is an event ``heads``, and all tabs show the heads found so far.

Limitation: trials are not kept on disk; after a restart they are computed again.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklens.live.execution import RunCancelled, ending
from sinklens.live.heads import HeadTrial, LayerHead, Stop
from sinklens.live.refusal import require
from sinklens.live.session import Session

MOST_KEPT = 32  # trials of different runs
REPLACEMENTS = ("zero", "mean")


@dataclass
class Trial:
    """A trial of one run.

    Attributes:
        run: id of the run.
        by: the replacement of a head's output.
        layers: the layers whose heads are tried.
        status: "running", "done", "cancelled" or "failed".
        total: number of heads.
        found: effects so far, as JSON of `HeadEffect`.
        why: why there is no KL divergence.
        number: the number that the run's answer states after ``####``.
        error: what failed.
        stop: ends it.
        began: when it began.
    """

    run: str
    by: str
    layers: Sequence[int]
    status: str = "running"
    total: int = 0
    found: list[dict[str, Any]] = field(default_factory=list)
    why: str | None = None
    number: str | None = None
    error: str | None = None
    stop: Stop = field(default_factory=Stop)
    began: float = field(default_factory=time.perf_counter)

    def to_json(self, heads: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The state, with all effects or some."""
        seconds, done = time.perf_counter() - self.began, len(self.found)
        left = round(seconds / done * (self.total - done), 1) if done else None
        return {
            "run": self.run, "by": self.by, "layers": list(self.layers), "status": self.status, "total": self.total,
            "done": done, "left": left, "kl_why": self.why, "number": self.number,
            "error": self.error,             "heads": self.found if heads is None else list(heads),
        }  # fmt: skip


class Trials:
    """The trials of a lab."""

    def __init__(self, session: Session) -> None:
        self._session, self._lock = session, threading.Lock()
        self._trials: OrderedDict[str, Trial] = OrderedDict()
        session.at_close.append(self.close)

    def start(self, run: str, body: Any) -> dict[str, Any]:
        """Try the heads of a run, instead of an earlier trial of it; returns the state.

        Args:
            body: the request: ``by`` and, for the heads of one layer, ``layer``.

        Raises:
            Refused: no such run, layer or replacement, or the run has no finished step.
        """
        require(isinstance(body, dict) and not set(body) - {"by", "layer"}, "a trial of heads has by and layer.")
        by, layer = body.get("by", "zero"), body.get("layer")
        require(by in REPLACEMENTS, f"by must be one of {', '.join(REPLACEMENTS)}; got {by!r:.40}.")
        spec, outcome = self._session.outcome(run)
        model = self._session.model_of(run)
        layers = range(model.cfg.n_layers)
        known = layer is None or (type(layer) is int and layer in layers)
        require(known, f"layer must be a number from 0 to {len(layers) - 1}, or null for all; got {layer!r:.40}.")
        trial = Trial(run, by, list(layers) if layer is None else [layer])
        work = HeadTrial(spec, outcome, model, by, trial.stop)
        parts = work.parts(trial.layers)
        trial.total, trial.why, trial.number = sum(map(len, parts)), work.why, work.number
        self.cancel(run)
        with self._lock:
            self._trials[run] = trial
            self._trials.move_to_end(run)
            dropped = [self._trials.popitem(last=False)[1] for _ in range(len(self._trials) - MOST_KEPT)]
        for old in dropped:
            old.stop.requested.set()
        self._report(trial, [])
        self._session.thread.background(lambda: self._carry_out(trial, work, parts))
        return trial.to_json()

    def state(self, run: str) -> dict[str, Any] | None:
        """The state of a run's trial, or None."""
        with self._lock:
            trial = self._trials.get(run)
        return None if trial is None else trial.to_json()

    def cancel(self, run: str) -> None:
        """Stop a run's trial, if there is one; the heads found so far remain."""
        with self._lock:
            trial = self._trials.get(run)
        if trial is not None:
            trial.stop.requested.set()

    def forget(self, run: str) -> None:
        """Stop and drop a run's trial."""
        self.cancel(run)
        with self._lock:
            self._trials.pop(run, None)

    def close(self) -> None:
        """Stop all trials."""
        with self._lock:
            for trial in self._trials.values():
                trial.stop.requested.set()

    def _carry_out(self, trial: Trial, work: HeadTrial, parts: list[list[LayerHead]]) -> None:
        """Try the next group of heads, in the model thread, and queue the group after it."""
        found: list[dict[str, Any]] = []
        with ending(trial, "the trial"):
            if trial.stop.requested.is_set():
                raise RunCancelled
            found = work.measure(parts[0])
            trial.found.extend(found)
            trial.status = "running" if parts[1:] else "done"
        self._report(trial, found)
        if trial.status == "running":
            self._session.thread.background(lambda: self._carry_out(trial, work, parts[1:]))

    def _report(self, trial: Trial, found: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            current = self._trials.get(trial.run) is trial
        if current:
            self._session.events.add("heads", **trial.to_json(found))
