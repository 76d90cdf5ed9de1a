"""Two runs repeated with other seeds, or on the problems of a task: how often the answer changes, with an interval.

A repetition runs both specifications with the same seed and prompt; the second one has its changes. The share of
repetitions whose answers differ has Wilson's 95 % interval, and the difference in right answers Tango's. Both count the
pair that the page shows only if it is one of the repetitions.

Repetitions are background work of the model thread, one at a time, so that a run that somebody waits for goes first.

Pitfall: a sampler that draws nothing makes the same run with every seed. Then there is one observation, however many
seeds were tried, and no interval is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sinklens.live import problems
from sinklens.live.chips import is_index
from sinklens.live.execution import RunCancelled, denoising, ending
from sinklens.live.heads import Stop
from sinklens.live.refusal import require
from sinklens.live.session import Session
from sinklens.live.spec import RunSpec
from sinklens.utils.estimates import paired, proportion

MOST = 200  # repetitions
SEEDS = "seeds"


@dataclass
class Repetitions:
    """The repetitions of one pair of runs.

    Attributes:
        pair: ids of the runs.
        over: "seeds", or the name of a task.
        specs: for each repetition, the two specifications.
        status: "running", "done", "cancelled" or "failed".
        changed: whether the answers differ, for each repetition.
        right: whether each of the two answers solves the problem.
        answers: the first run's final canvases, which show whether seeds matter.
        error: what failed.
        stop: ends them.
    """

    pair: tuple[str, str]
    over: str
    specs: Sequence[tuple[RunSpec, RunSpec]]
    status: str = "running"
    changed: list[bool] = field(default_factory=list)
    right: list[tuple[bool, bool]] = field(default_factory=list)
    answers: set[tuple[int, ...]] = field(default_factory=set)
    error: str | None = None
    stop: Stop = field(default_factory=Stop)

    def to_json(self) -> dict[str, Any]:
        """Counts and intervals so far."""
        done = len(self.changed)
        alike = self.over == SEEDS and done > 1 and len(self.answers) == 1
        share = proportion(sum(self.changed), done)
        found: dict[str, Any] = {
            "a": self.pair[0], "b": self.pair[1], "over": self.over, "status": self.status, "total": len(self.specs),
            "done": done, "error": self.error, "changed": sum(self.changed), "alike": alike,
            "interval": None if alike or not done else [round(limit, 4) for limit in (share.low, share.high)],
        }  # fmt: skip
        if self.right and len(self.right) == done:
            base, changed = (np.array(verdicts, dtype=bool) for verdicts in zip(*self.right, strict=True))
            both = paired(base, changed).difference
            found["right"] = [int(base.sum()), int(changed.sum())]
            found["difference"] = [round(value, 4) for value in (both.value, both.low, both.high)]
        return found


class Repeats:
    """The repetitions of a lab; one pair at a time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._current: Repetitions | None = None
        session.at_close.append(self.cancel)

    def start(self, body: Any) -> dict[str, Any]:
        """Repeat a pair of runs, replacing an earlier one; returns the state.

        Args:
            body: the request: ids ``a`` and ``b``, ``over`` and ``count``.

        Raises:
            Refused: no such runs or task, a number out of range, or runs on the canvases of others.
        """
        require(isinstance(body, dict) and set(body) == {"a", "b", "over", "count"}, "give a, b, over and count.")
        over, count = body["over"], body["count"]
        known = (SEEDS, *problems.SHIPPED)
        require(over in known, f"over must be one of {', '.join(known)}; got {over!r:.40}.")
        require(is_index(count) and 2 <= count <= MOST, f"count must be 2 to {MOST}; got {count!r:.40}.")
        pair = (str(body["a"]), str(body["b"]))
        specs = [self._session.run(run).spec for run in pair]
        for spec in specs:
            self._session.model(spec.model)
            alone = spec.replay is None and spec.canvas is None
            require(
                alone,
                "a run on the canvases of another has no answers of its own on other prompts; repeat runs that decide "
                "for themselves.",
            )
        most = MOST if over == SEEDS else len(problems.samples(over))
        listed = [_varied(specs, over, number) for number in range(min(count, most))]
        self.cancel()
        made = self._current = Repetitions(pair, over, listed)
        self._next(made)
        return made.to_json()

    def state(self, a: str, b: str) -> dict[str, Any] | None:
        """The state of a pair's repetitions, or None."""
        made = self._current
        return made.to_json() if made is not None and made.pair == (a, b) else None

    def cancel(self) -> None:
        """Stop; the results so far remain."""
        if self._current is not None:
            self._current.stop.requested.set()

    def _next(self, made: Repetitions) -> None:
        self._session.thread.background(lambda: self._carry_out(made))

    def _carry_out(self, made: Repetitions) -> None:
        """One repetition, in the model thread."""
        with ending(made, "a repetition"):
            self._measure(made, made.specs[len(made.changed)])
            made.status = "running" if len(made.changed) < len(made.specs) else "done"
        self._session.events.add("repeats", **made.to_json())
        if made.status == "running":
            self._next(made)

    def _measure(self, made: Repetitions, specs: tuple[RunSpec, RunSpec]) -> None:
        if made.stop.requested.is_set():
            raise RunCancelled
        texts, verdicts = [], []
        for spec in specs:
            model = self._session.model(spec.model)
            work = denoising(spec, model, record=False)
            work.carry_out([made.stop])
            run = work.result()
            ids = [token for token in run.canvas[0, -1, run.prompt_length :].tolist() if token >= 0]
            texts.append((run.answers[0].text, ids if run.answers[0].text is None else None, ids))
            if spec.task is not None:
                verdicts.append(problems.right(*spec.task, run.answers[0], ids, model.eos_token_ids))
        made.changed.append(texts[0][:2] != texts[1][:2])
        made.answers.add(tuple(texts[0][2]))
        if verdicts and None not in verdicts:
            made.right.append((bool(verdicts[0]), bool(verdicts[1])))


def _varied(specs: Sequence[RunSpec], over: str, number: int) -> tuple[RunSpec, RunSpec]:
    """The two specifications of a repetition: another seed, or another problem."""
    if over == SEEDS:
        first, second = (replace(spec, seed=number) for spec in specs)
    else:
        prompt = problems.problem(over, number).prompt
        first, second = (replace(spec, prompt=prompt, task=(over, number)) for spec in specs)
    return first, second
