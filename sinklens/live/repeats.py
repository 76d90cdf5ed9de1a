"""Two runs repeated with other seeds, or on the problems of a task: how often the answer changes, with an interval.

A repetition runs both specifications with the same seed and prompt; the second one has its changes. The share of
repetitions whose answers differ has Wilson's 95 % interval, and the difference in right answers Tango's. Both count the
pair that the page shows only if it is one of the repetitions.

Pitfall: a sampler that draws nothing makes the same run with every seed. Then there is one observation, however many
seeds were tried, and no interval is given.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sinklens.live import problems
from sinklens.live.background import Work
from sinklens.live.chips import is_index
from sinklens.live.execution import denoising
from sinklens.live.refusal import require
from sinklens.live.session import Session
from sinklens.live.spec import RunSpec
from sinklens.utils.estimates import paired, proportion

MOST = 200  # repetitions
SEEDS = "seeds"


class Repetitions(Work):
    """The repetitions of one pair of runs.

    Args:
        session: the lab.
        pair: ids of the runs.
        over: "seeds", or the name of a task.
        specs: for each repetition, the two specifications.
    """

    kind, name = "repeats", "a repetition"

    def __init__(
        self, session: Session, pair: tuple[str, str], over: str, specs: Sequence[tuple[RunSpec, RunSpec]]
    ) -> None:
        super().__init__()
        self._session, self.pair, self._over, self._specs = session, pair, over, specs
        self._changed: list[bool] = []
        self._right: list[tuple[bool, bool]] = []  # whether each of the two answers solves the problem
        self._canvases: set[tuple[int, ...]] = set()  # the first run's answers, which show whether seeds matter

    def to_json(self) -> dict[str, Any]:
        """Counts and intervals so far."""
        done = len(self._changed)
        alike = self._over == SEEDS and done > 1 and len(self._canvases) == 1
        share = proportion(sum(self._changed), done)
        found: dict[str, Any] = {
            "a": self.pair[0], "b": self.pair[1], "over": self._over, "status": self.status, "total": len(self._specs),
            "done": done, "error": self.error, "changed": sum(self._changed), "alike": alike,
            "interval": None if alike or not done else [round(limit, 4) for limit in (share.low, share.high)],
        }  # fmt: skip
        if self._right and len(self._right) == done:
            base, changed = (np.array(verdicts, dtype=bool) for verdicts in zip(*self._right, strict=True))
            both = paired(base, changed).difference
            found["right"] = [int(base.sum()), int(changed.sum())]
            found["difference"] = [round(value, 4) for value in (both.value, both.low, both.high)]
        return found

    def part(self) -> bool:
        """Run both specifications of one repetition."""
        answers, verdicts = [], []
        for spec in self._specs[len(self._changed)]:
            model = self._session.model(spec.model)
            work = denoising(spec, model, record=False)
            work.carry_out([self.stop])
            run = work.result()
            ids = [token for token in run.canvas[0, -1, run.prompt_length :].tolist() if token >= 0]
            answers.append((run.answers[0].text, ids))
            if spec.task is not None:
                verdicts.append(problems.right(*spec.task, run.answers[0], ids, model.eos_token_ids))
        (text, ids), (other, others) = answers
        self._changed.append((text, ids if text is None else None) != (other, others if other is None else None))
        self._canvases.add(tuple(ids))
        if verdicts and None not in verdicts:
            self._right.append((bool(verdicts[0]), bool(verdicts[1])))
        return len(self._changed) < len(self._specs)


def requested_repetitions(session: Session, body: Any) -> Repetitions:
    """The repetitions that a request asks for.

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
    specs = [session.run(run).spec for run in pair]
    for spec in specs:
        session.model(spec.model)
        require(
            spec.replay is None and spec.canvas is None,
            "a run on the canvases of another has no answers of its own on other prompts; repeat runs that decide "
            "for themselves.",
        )
    most = MOST if over == SEEDS else len(problems.samples(over))
    return Repetitions(session, pair, over, [_varied(specs, over, number) for number in range(min(count, most))])


def _varied(specs: Sequence[RunSpec], over: str, number: int) -> tuple[RunSpec, RunSpec]:
    """The two specifications of a repetition: another seed, or another problem."""
    if over == SEEDS:
        first, second = (replace(spec, seed=number) for spec in specs)
    else:
        prompt = problems.problem(over, number).prompt
        first, second = (replace(spec, prompt=prompt, task=(over, number)) for spec in specs)
    return first, second
