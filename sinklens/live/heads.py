"""What the ablation of each head changes in a run.

Each head is ablated twice. On the canvases of the run, the KL divergence of a step is the head's effect at that step
alone. In a run that decides its own tokens, the answer shows what follows. Several heads share a batch, each on its own
row, as in `sinklens.experiments.sweep`.

Caveat: the logits of a batch agree with those of a single run to about 1e-5. Where two tokens are that close, the
answer found here can differ from that of a run with the same head ablated.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.experiments import compare
from sinklens.experiments.stacking import Stacked
from sinklens.interventions import AblateHeads, MaskedLogits
from sinklens.live import problems
from sinklens.live.comparing import fitting, why_not
from sinklens.live.execution import denoising, repeat
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import require
from sinklens.live.spec import RunSpec
from sinklens.live.thread import RunCancelled, Stop, reason
from sinklens.runs import Generation

if TYPE_CHECKING:
    from sinklens.live.history import LabRun
    from sinklens.live.session import Session
    from sinklens.model import Model

MOST_ROWS = 8  # heads per pass
REPLACEMENTS = ("zero", "mean")
LayerHead = tuple[int, int]  # layer, head


class HeadTrial:
    """The trial of the heads of one run, one pass of several heads after another.

    Args:
        run: id of the run.
        spec, outcome, model: the run and its model.
        by: the replacement of a head's output.
        layers: the layers whose heads are tried.
        stop: ends it.

    Attributes:
        why: why the KL divergence is undefined; None if it is defined.
        status: "running", "done", "cancelled" or "failed".
    """

    def __init__(
        self,
        run: str,
        spec: RunSpec,
        outcome: RunOutcome,
        model: "Model",
        by: str = "zero",
        layers: Sequence[int] = (),
        stop: Stop | None = None,
    ) -> None:
        self.status, self.stop, self._began = "running", stop or Stop(), time.perf_counter()
        self._error: str | None = None
        self._run, self._spec, self._outcome, self._model, self._by = run, spec, outcome, model, by
        every = [(layer, head) for layer in layers for head in range(model.cfg.n_heads)]
        self._layers = layers
        self._parts = [every[start : start + MOST_ROWS] for start in range(0, len(every), MOST_ROWS)]
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

    def measure(self, heads: Sequence[LayerHead]) -> list[dict[str, object]]:
        """The effects of some heads, as JSON.

        ``layer`` and ``head``; ``kl``, the mean KL divergence over steps on the run's canvases, in nats, or None if it
        is undefined; ``same``, whether the answer is the same, or None for a run on the canvases of another, which
        cannot change; ``changed``, the share of the answer's positions with another final token, ``text``, the answer
        without the head, and ``number``, which it states after ``####``; ``right``, whether it solves the task's
        problem, or None without one.

        Raises:
            RunCancelled: the trial was stopped.
        """
        kls = [None] * len(heads) if self.why else self._divergences(heads)
        effects = zip(heads, kls, self._answers(heads), strict=True)
        return [{"layer": layer, "head": head, "kl": kl} | answer for (layer, head), kl, answer in effects]

    def _ablations(self, heads: Sequence[LayerHead]) -> Stacked:
        """The run's own interventions and the ablation of one head, for each row."""
        own = [change.build() for change in self._spec.changes]
        ablations = [AblateHeads(layers=[layer], heads=[head], by=self._by) for layer, head in heads]  # type: ignore[arg-type]
        return Stacked([[*own, one] for one in ablations])

    @cached_property
    def _base(self) -> tuple[Generation, MaskedLogits]:
        """The run on its own canvases, with the logits of the compared steps."""
        outcome, rows = self._outcome, MOST_ROWS + 1
        kept = MaskedLogits(steps=fitting([outcome], self._model, outcome.steps, rows))
        return self._again(kept, None, 1), kept

    def _again(self, kept: MaskedLogits, changes: Sequence[Stacked] | None, copies: int) -> Generation:
        return repeat(
            self._spec, self._model, self._outcome, steps=max(kept.steps or [0]) + 1, extra=[kept], changes=changes,
            copies=copies, listeners=[self.stop],
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

    def _answers(self, heads: Sequence[LayerHead]) -> Iterator[dict[str, object]]:
        """``same``, ``changed``, ``text``, ``number`` and ``right`` of each head."""
        if self._spec.replay is not None:
            yield from [dict.fromkeys(("same", "changed", "text", "number", "right"))] * len(heads)
            return
        run = denoising(self._spec, self._model, record=False, changes=[self._ablations(heads)], copies=len(heads))
        run.carry_out([self.stop])
        changed = run.result()
        base = self._outcome.canvas[-1, self._outcome.prompt_length :]
        for answer, ids in zip(changed.answers, changed.canvas[:, -1, changed.prompt_length :].numpy(), strict=True):
            kept, task = ids[ids >= 0].tolist(), self._spec.task
            right = None if task is None else problems.right(*task, answer, kept, self._model.eos_token_ids)
            differs = (ids != base)[(ids >= 0) | (base >= 0)]
            same = answer.text == self._outcome.answer.text if answer.text is not None else not differs.any()
            yield {
                "same": bool(same), "changed": float(differs.mean()), "text": answer.text,
                "number": problems.stated_number(answer.text), "right": right,
            }  # fmt: skip


def begin_trial(session: "Session", run_id: str, body: Any) -> dict[str, Any]:
    """Begin the trial that a request asks for, instead of any earlier one of the run; returns its state.

    Its passes run in the model thread while nothing else waits there, so a run or a pattern that somebody waits for
    goes first. Every pass is an event, so all tabs show what was found so far. Trials are not kept on disk.

    Args:
        body: the request: ``by`` and, for the heads of one layer, ``layer``.

    Raises:
        Refused: no such run, layer or replacement, or the run has no finished step.
    """
    require(isinstance(body, dict) and not set(body) - {"by", "layer"}, "a trial of heads has by and layer.")
    by, layer = body.get("by", "zero"), body.get("layer")
    require(by in REPLACEMENTS, f"by must be one of {', '.join(REPLACEMENTS)}; got {by!r:.40}.")
    spec, outcome = session.outcome(run_id)
    run, model = session.run(run_id), session.model_of(run_id)
    layers = range(model.cfg.n_layers)
    known = layer is None or (type(layer) is int and layer in layers)
    require(known, f"layer must be a number from 0 to {len(layers) - 1}, or null for all; got {layer!r:.40}.")
    run.stop.requested = True
    run.stop = Stop()
    trial = HeadTrial(run_id, spec, outcome, model, by, layers if layer is None else [layer], run.stop)
    run.heads = trial.to_json()
    session.events.add("heads", **trial.news())
    session.thread.background(lambda: _proceed(session, run, trial))
    return run.heads


def _proceed(session: "Session", run: "LabRun", trial: HeadTrial) -> None:
    """Try the heads of a pass, and queue the next."""
    trial.proceed()
    if run.stop is trial.stop:
        run.heads = trial.to_json()
        session.events.add("heads", **trial.news())
    if trial.status == "running":
        session.thread.background(lambda: _proceed(session, run, trial))
