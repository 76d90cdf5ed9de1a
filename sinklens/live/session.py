"""One lab: its models, its runs, and what happens to them.

The page's requests arrive in the server's thread, runs happen in the model thread, and both find the runs here. Every
change is an event that all tabs get.

Status of a run: queued → running → done, failed or cancelled. A cancelled or failed run keeps the steps that it
finished; a failed one also has an error. The model remains usable, after running out of memory too.
"""

import secrets
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sinklens.errors import SinklensError
from sinklens.live import problems
from sinklens.live.events import EventLog
from sinklens.live.execution import LiveRun, check_start
from sinklens.live.history import ENDED, SHOWN, LabRun, RunHistory
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import Refused, require
from sinklens.live.spec import MOST_REPLAYS, RunSpec, read_request
from sinklens.live.thread import ModelThread, reason
from sinklens.model import Model
from sinklens.runs import Generation
from sinklens.utils.escaping import say

MOST_KEPT = 500  # runs of a lab without --keep


@dataclass(frozen=True)
class LabModel:
    """A model of the lab.

    Attributes:
        name: its name there.
        model: the model.
        loading: the expression that loads it, for scripts.
    """

    name: str
    model: "Model"
    loading: str


class Session:
    """The models and runs of a lab.

    Attributes:
        models: by name; the first is the default.
        events: what happened.
        history: the runs on disk.
        thread: the model thread.
    """

    def __init__(self, models: list[LabModel], keep: Path | None = None) -> None:
        """Open the lab with the runs in `keep`."""
        self.models = {entry.name: entry for entry in models}
        self.events, self.history, self.thread = EventLog(), RunHistory(keep), ModelThread()
        self._lock = threading.RLock()
        self._runs: dict[str, LabRun] = {}
        self._weights: dict[str, str] = {}
        for run in self.history.runs():
            run.spec = replace(run.spec, model=run.spec.model or next(iter(self.models)))
            self._runs[run.id] = run

    # Runs

    def submit(self, body: Any) -> str:
        """Queue the run of a request; returns its id.

        Raises:
            Refused: the request is malformed, names something unknown, cannot begin, or the queue is full.
        """
        run = LabRun(secrets.token_hex(8), self._specified(read_request(body)))
        check_start(run.spec, self.model(run.spec.model), self._replayed(run.spec))
        with self._lock:  # the run reports nothing before it has taken this lock
            self.thread.run(run.id, lambda: self._carry_out(run))
            self._runs[run.id] = run
            self.events.add("queued", run=run.id, summary=run.summary())
        self._forget_oldest()
        return run.id

    def cancel(self, run_id: str) -> None:
        """Cancel a run: take it out of the queue, or stop it before its next step; one that has ended, its trial."""
        with self._lock:
            run = self.run(run_id)
            if run.status == "queued" and self.thread.withdraw(run_id):
                run.status = "cancelled"
                run.facts["steps_run"] = 0
                self.events.add("cancelled", run=run_id, summary=run.summary())
            else:
                run.stop.requested = True

    def remove(self, run_id: str) -> None:
        """Remove a run, and its file; a run under way is cancelled first."""
        with self._lock:
            run = self.run(run_id)
            self.cancel(run_id)
            self.history.remove(run_id)
            run.removed = True
            del self._runs[run_id]
            self.events.add("removed", run=run_id)

    def run(self, run_id: str) -> LabRun:
        """The run with this id.

        Raises:
            Refused: no such run exists.
        """
        with self._lock:
            found = self._runs.get(run_id)
        if found is None:
            raise Refused("no such run; it was removed, or it belongs to another lab.", 404)
        return found

    def spec(self, run_id: str) -> RunSpec:
        """The specification of a run.

        Raises:
            Refused: no such run exists, or its file is damaged.
        """
        run = self.run(run_id)
        require(not run.damaged, str(run.facts.get("error")), 410)
        return run.spec

    def runs(self) -> list[dict[str, Any]]:
        """Summaries of all runs, oldest first."""
        with self._lock:
            return [run.summary() for run in self._runs.values()]

    def outcome(self, run_id: str) -> tuple[RunSpec, RunOutcome]:
        """The specification and outcome of a run that has ended.

        Raises:
            Refused: there is no such run, or it has no finished step.
        """
        run = self.run(run_id)
        require(run.readable, f"the run is {run.status} and has no finished steps to read.", 409)
        return run.spec, self.history.load(run_id)

    def model(self, name: str) -> "Model":
        """The model called `name`.

        Raises:
            Refused: the lab has no such model.
        """
        known = ", ".join(self.models)
        require(name in self.models, f"this lab has no model {name!r:.80}; it has {known}. Add it with --compare.", 404)
        return self.models[name].model

    def model_of(self, run_id: str) -> "Model":
        """The model that made a run; call it in the model thread, since it may read all weights.

        Raises:
            Refused: the lab has no such model, or another one of this name.
        """
        run = self.run(run_id)
        model, made_by = self.model(run.spec.model), run.facts.get("weights")
        require(
            made_by is None or made_by == self._weights_of(run.spec.model),
            f"the run was made by other weights called {run.spec.model!r}; open the lab with these, or run it again.",
            409,
        )
        return model

    def close(self) -> None:
        """Stop what is under way, end the connections, and delete what is not kept."""
        with self._lock:
            for run in self._runs.values():
                run.stop.requested = True
        self.thread.close()
        self.events.close()
        self.history.close()

    # Steps of the above

    def _specified(self, request: RunSpec) -> RunSpec:
        """A request with what it takes from the lab and from other runs."""
        name = request.model or next(iter(self.models))
        self.model(name)
        prompt = request.prompt if request.task is None else problems.problem(*request.task).prompt
        replayed = None if request.replay is None else self.spec(request.replay)
        deep = f"at most {MOST_REPLAYS} runs replay one another; run it without the replay first."
        require(replayed is None or replayed.replays < MOST_REPLAYS, deep)
        if request.compare_to is not None:
            self.run(request.compare_to)
        return replace(request, model=name, prompt=prompt, replayed=replayed)

    def _replayed(self, spec: RunSpec) -> Generation | None:
        """The run that `spec` replays, if it has ended: one that is still running is checked when its turn comes."""
        if spec.replay is None or self.run(spec.replay).status not in ENDED:
            return None
        replayed, outcome = self.outcome(spec.replay)
        return outcome.generation(self.model(spec.model), replayed.cache)

    def _weights_of(self, name: str) -> str:
        if name not in self._weights:
            self._weights[name] = self.model(name).fingerprint
        return self._weights[name]

    def _carry_out(self, run: LabRun) -> None:
        """Run in the model thread; whatever goes wrong there becomes the run's error."""
        try:
            self._attempt(run)
        except Exception as error:  # noqa: BLE001 — the lab outlives a run that crashes
            self._fail(run, reason(error, "the run"))
        finally:
            run.live = None

    def _attempt(self, run: LabRun) -> None:
        def report(kind: str, **data: Any) -> None:
            self.events.add(kind, run=run.id, **data)

        if run.spec.replay is not None:
            self.model_of(run.spec.replay)  # refuses a run of other weights
        live = LiveRun(run.spec, self.model(run.spec.model), self._replayed(run.spec), report, run.stop)
        with self._lock:
            if run.status != "queued" or run.removed:
                return
            run.live, run.status = live, "running"
            run.facts |= {"steps": live.denoising.settings.most_steps, "gen_length": live.denoising.settings.gen_length}
        outcome = live.carry_out()
        status = (
            "cancelled" if run.stop.requested and (outcome is None or outcome.steps < run.facts["steps"]) else "done"
        )
        _note(run, live, outcome)
        if self.history.kept:
            run.facts["weights"] = self._weights_of(run.spec.model)
        if outcome is not None:
            run.facts["right"] = self._right(run.spec, outcome)
        self._finish(run, status, outcome)

    def _fail(self, run: LabRun, text: str) -> None:
        """End a run with an error and the steps that it finished."""
        outcome = None
        if run.live is not None:
            with suppress(Exception):  # what is reported is the error that ended the run
                outcome = run.live.finished()
            _note(run, run.live, outcome)
        run.facts["error"] = text
        say(f"sinklens lab: run {run.id} failed: {text}", to=sys.stderr)
        self._finish(run, "failed", outcome)

    def _finish(self, run: LabRun, status: str, outcome: RunOutcome | None) -> None:
        """Write the run, then announce it: a run that a tab has seen finished is not lost, unless it says so."""
        if outcome is not None and not run.removed:
            try:
                self.history.save(run.id, run.summary() | {"status": status}, run.spec.to_json(), outcome)
            except SinklensError as error:
                before = f"{run.facts['error']} " if run.facts.get("error") else ""
                run.facts["error"] = f"{before}{error} The run is lost when the lab closes."
        with self._lock:
            run.status = status
            if run.removed:
                self.history.remove(run.id)
                return
        said = {"error": run.facts["error"]} if run.facts.get("error") else {}
        self.events.add(status, run=run.id, summary=run.summary(), **said)

    def _right(self, spec: RunSpec, outcome: RunOutcome) -> bool | None:
        if spec.task is None:
            return None
        model = self.model(spec.model)
        answer = outcome.canvas[-1, outcome.prompt_length :]
        return problems.right(*spec.task, outcome.answer, answer[answer >= 0].tolist(), model.eos_token_ids)

    def _forget_oldest(self) -> None:
        """Without --keep, remove the oldest runs above `MOST_KEPT`."""
        if self.history.kept:
            return
        with self._lock:
            ended = [run.id for run in self._runs.values() if run.status not in ("queued", "running")]
            for run_id in ended[: max(0, len(self._runs) - MOST_KEPT)]:
                self.remove(run_id)

    @property
    def loading(self) -> Mapping[str, str]:
        """For each model, the expression that loads it."""
        return {name: entry.loading for name, entry in self.models.items()}


def _note(run: LabRun, live: LiveRun, outcome: RunOutcome | None) -> None:
    """Note in the summary what a run came to."""
    run.facts |= {"seconds": round(live.seconds, 3), "steps_run": 0 if outcome is None else outcome.steps}
    if outcome is not None:
        run.facts |= {"sampler": outcome.sampler, "text": (outcome.answer.text or "")[:SHOWN]}
