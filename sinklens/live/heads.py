"""What the ablation of each head changes in a run.

Each head is ablated twice. On the canvases of the run, the KL divergence of a step is the head's effect at that step
alone. In a run that decides its own tokens, the answer shows what follows. Several heads share a batch, each on its own
row, as in `sinklens.experiments.sweep`.

Caveat: the logits of a batch agree with those of a single run to about 1e-5. Where two tokens are that close, the
answer found here can differ from that of a run with the same head ablated.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.experiments import compare
from sinklens.experiments.stacking import Stacked
from sinklens.interventions import AblateHeads, MaskedLogits
from sinklens.live import problems
from sinklens.live.comparing import fitting, why_not
from sinklens.live.events import EventLog
from sinklens.live.execution import built, denoising, repeat
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import require
from sinklens.live.spec import RunSpec
from sinklens.live.thread import ModelThread, RunCancelled, Stop, reason
from sinklens.runs import Generation, Intervention

if TYPE_CHECKING:
    from sinklens.live.session import Session
    from sinklens.model import Model

MOST_ROWS = 8  # heads per pass
MOST_TRIALS = 32  # runs whose trials are kept; the oldest is stopped
REPLACEMENTS = ("zero", "mean")
LayerHead = tuple[int, int]  # layer, head


@dataclass(frozen=True)
class HeadEffect:
    """What a head's ablation changes.

    Attributes:
        layer, head: the head.
        kl: mean KL divergence over steps on the run's canvases, in nats; None if it is undefined.
        same: whether the answer is the same; None for a run on the canvases of another, which cannot change.
        changed: share of the answer's positions with another final token; None if `same` is.
        text: the answer without the head; None if `same` is, or without a tokenizer.
        number: the number that this answer states after ``####``; None if it states none.
        right: whether that answer solves the task's problem; None without one.
    """

    layer: int
    head: int
    kl: float | None
    same: bool | None
    changed: float | None
    text: str | None
    number: str | None
    right: bool | None


class HeadTrial:
    """The trial of the heads of one run, one pass of several heads after another.

    Args:
        run: id of the run.
        spec, outcome, model: the run and its model.
        by: the replacement of a head's output.
        layers: the layers whose heads are tried.

    Attributes:
        why: why the KL divergence is undefined; None if it is defined.
        status: "running", "done", "cancelled" or "failed".
        stop: ends it.
    """

    def __init__(
        self, run: str, spec: RunSpec, outcome: RunOutcome, model: "Model", by: str = "zero", layers: Sequence[int] = ()
    ) -> None:
        self.status, self.stop, self._began = "running", Stop(), time.perf_counter()
        self._error: str | None = None
        self._run, self._spec, self._outcome, self._model, self._by = run, spec, outcome, model, by
        self._layers, self._parts = layers, self._groups(layers)
        self._total, self._told = sum(map(len, self._parts)), 0
        self._found: list[dict[str, object]] = []
        self.why = why_not([spec, spec], [outcome, outcome])
        self._number = problems.stated_number(outcome.answer.text)

    def proceed(self) -> None:
        """Try the heads of one pass. Nothing is raised, so that the lab outlives a crash."""
        try:
            self.stop.before(0, None)
            self._found += self.measure(self._parts.pop(0))
            self.status = "running" if self._parts else "done"
        except RunCancelled:
            self.status = "cancelled"
        except Exception as error:  # noqa: BLE001
            self.status, self._error = "failed", reason(error, "the trial")

    def to_json(self) -> dict[str, Any]:
        """The state with all effects; ``left`` is the number of seconds that it may still take."""
        seconds, done = time.perf_counter() - self._began, len(self._found)
        return {
            "run": self._run, "by": self._by, "layers": list(self._layers), "status": self.status,
            "total": self._total, "done": done, "kl_why": self.why, "number": self._number, "error": self._error,
            "left": round(seconds / done * (self._total - done), 1) if done else None, "heads": list(self._found),
        }  # fmt: skip

    def news(self) -> dict[str, Any]:
        """The state with the effects that were found since the last one."""
        new, self._told = self._found[self._told :], len(self._found)
        return self.to_json() | {"heads": new}

    def _groups(self, layers: Sequence[int]) -> list[list[LayerHead]]:
        """The heads of `layers` in groups of one pass each."""
        heads = [(layer, head) for layer in layers for head in range(self._model.cfg.n_heads)]
        return [heads[start : start + MOST_ROWS] for start in range(0, len(heads), MOST_ROWS)]

    def measure(self, heads: Sequence[LayerHead]) -> list[dict[str, object]]:
        """The effects of some heads, as JSON of `HeadEffect`.

        Raises:
            RunCancelled: the trial was stopped.
        """
        kls = [None] * len(heads) if self.why else self._divergences(heads)
        effects = zip(heads, kls, self._answers(heads), strict=True)
        return [
            asdict(HeadEffect(layer, head, kl, same, changed, text, problems.stated_number(text), right))
            for (layer, head), kl, (same, changed, text, right) in effects
        ]

    def _ablations(self, heads: Sequence[LayerHead]) -> Stacked:
        """The run's own interventions and the ablation of one head, for each row."""
        return Stacked(
            [
                [*self._own, AblateHeads(layers=[layer], heads=[head], by=self._by)]  # type: ignore[arg-type]
                for layer, head in heads
            ]
        )

    @cached_property
    def _own(self) -> list[Intervention]:
        return built(self._spec, self._model)

    @cached_property
    def _base(self) -> tuple[Generation, MaskedLogits]:
        """The run on its own canvases, with the logits of the compared steps."""
        outcome, rows = self._outcome, MOST_ROWS + 1
        kept = MaskedLogits(steps=fitting([outcome], self._model, outcome.steps, rows))
        return self._again(kept, None, 1), kept

    def _again(self, kept: MaskedLogits, changes: Sequence[Stacked] | None, copies: int) -> Generation:
        steps = max(kept.steps or [0]) + 1
        return repeat(
            self._spec, self._model, self._outcome, steps=steps, extra=[kept], changes=changes, copies=copies,
            listeners=[self.stop],
        )  # fmt: skip

    def _divergences(self, heads: Sequence[LayerHead]) -> list[float | None]:
        base, logits = self._base
        kept = MaskedLogits(steps=logits.steps)
        self._again(kept, [self._ablations(heads)], len(heads))
        found = []
        for row in range(len(heads)):
            part = {step: values.chunk(len(heads))[row] for step, values in kept.kept.items()}
            kl = compare(base, base, logits.kept, part, edited=True)["kl"].to_numpy()[0]  # on the canvases of `base`
            found.append(None if np.isnan(kl).all() else float(np.nanmean(kl)))
        return found

    def _answers(
        self, heads: Sequence[LayerHead]
    ) -> Iterator[tuple[bool | None, float | None, str | None, bool | None]]:
        """``same``, ``changed``, ``text`` and ``right`` of each head."""
        if self._spec.replay is not None:
            yield from [(None, None, None, None)] * len(heads)
            return
        run = denoising(self._spec, self._model, record=False, changes=[self._ablations(heads)], copies=len(heads))
        run.carry_out([self.stop])
        changed = run.result()
        base = self._outcome.canvas[-1, self._outcome.prompt_length :]
        for answer, ids in zip(changed.answers, changed.canvas[:, -1, changed.prompt_length :].numpy(), strict=True):
            right = None
            if self._spec.task is not None:
                right = problems.right(*self._spec.task, answer, ids[ids >= 0].tolist(), self._model.eos_token_ids)
            differs = (ids != base)[(ids >= 0) | (base >= 0)]
            same = answer.text == self._outcome.answer.text if answer.text is not None else not differs.any()
            yield bool(same), float(differs.mean()), answer.text, right


class Trials:
    """The newest trial of each run; every pass of heads is an event, so all tabs show what was found so far.

    The passes run in the model thread while nothing else waits there, so a run or a pattern that somebody waits for
    goes first.

    Limitation: trials are not kept on disk.

    Args:
        events, thread: those of the lab.
    """

    def __init__(self, events: EventLog, thread: ModelThread) -> None:
        self._events, self._thread, self._lock = events, thread, threading.Lock()
        self._kept: OrderedDict[str, HeadTrial] = OrderedDict()

    def begin(self, run: str, trial: HeadTrial) -> dict[str, Any]:
        """Begin a trial, instead of any earlier one of the run; returns its state."""
        self.forget(run)
        with self._lock:
            self._kept[run] = trial
            while len(self._kept) > MOST_TRIALS:
                self._kept.popitem(last=False)[1].stop.requested = True
        state = trial.to_json()
        self._events.add("heads", **trial.news())
        self._thread.background(lambda: self._proceed(run, trial))
        return state

    def state(self, run: str) -> dict[str, Any] | None:
        """The state of a run's trial, or None."""
        trial = self._kept.get(run)
        return None if trial is None else trial.to_json()

    def cancel(self, run: str) -> None:
        """Stop a run's trial, if there is one; what was found so far remains."""
        if (trial := self._kept.get(run)) is not None:
            trial.stop.requested = True

    def cancel_all(self) -> None:
        """Stop all trials."""
        for run in list(self._kept):
            self.cancel(run)

    def forget(self, run: str) -> None:
        """Stop and drop a run's trial."""
        self.cancel(run)
        with self._lock:
            self._kept.pop(run, None)

    def _proceed(self, run: str, trial: HeadTrial) -> None:
        """Try the heads of a pass, and queue the next."""
        trial.proceed()
        if self._kept.get(run, trial) is trial:
            self._events.add("heads", **trial.news())
        if trial.status == "running":
            self._thread.background(lambda: self._proceed(run, trial))


def requested_trial(session: "Session", run: str, body: Any) -> HeadTrial:
    """The trial that a request asks for.

    Args:
        body: the request: ``by`` and, for the heads of one layer, ``layer``.

    Raises:
        Refused: no such run, layer or replacement, or the run has no finished step.
    """
    require(isinstance(body, dict) and not set(body) - {"by", "layer"}, "a trial of heads has by and layer.")
    by, layer = body.get("by", "zero"), body.get("layer")
    require(by in REPLACEMENTS, f"by must be one of {', '.join(REPLACEMENTS)}; got {by!r:.40}.")
    spec, outcome = session.outcome(run)
    model = session.model_of(run)
    layers = range(model.cfg.n_layers)
    known = layer is None or (type(layer) is int and layer in layers)
    require(known, f"layer must be a number from 0 to {len(layers) - 1}, or null for all; got {layer!r:.40}.")
    return HeadTrial(run, spec, outcome, model, by, layers if layer is None else [layer])
