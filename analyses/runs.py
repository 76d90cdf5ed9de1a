"""Runs in which every row keeps its own steps alone.

In a batch, a row that is through with its block or its answer waits for the others: it is passed through the model
again, and nothing of it changes. Alone it would not have these steps. A study measures prompts, and what it measures of
one must not depend on what else is in its batch, so waiting steps are taken out: `own_run` tells which steps are a
row's own, and `active_steps` moves those to the front of a track.

One way this fails: copies of one prompt in a batch are drawn different random numbers, in two batches the same ones; at
a temperature above 0 give each prompt once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from sinklens.sinks import Record, SinkTrack
from sinklens.sinks.active import active_steps, holds_end
from sinklens.tracing import generate

if TYPE_CHECKING:
    from torch import Tensor

    from sinklens.model import Model
    from sinklens.runs.result import Generation

__all__ = ["OwnRun", "active_steps", "own_run"]


@dataclass(frozen=True)
class OwnRun:
    """A run, and which of its steps are whose.

    Attributes:
        run: as it was.
        own: [batch, step], False where a row waited for others.
    """

    run: "Generation"
    own: Bool[np.ndarray, "batch step"]

    @property
    def track(self) -> SinkTrack:
        """The sink track of own steps."""
        assert self.run.sinks is not None, "the run recorded no sinks"
        return active_steps(self.run.sinks, self.own)


def own_run(
    model: "Model",
    prompts: Sequence[Any],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    chat_template: bool | str = False,
    record_sinks: bool | Record = True,
    hooks: Sequence[Any] = (),
    replay: "Generation | None" = None,
) -> OwnRun:
    """`sinklens.generate`, keeping account of which rows work at which step.

    A row of a diffusion model works where a position of it is up for decision (its confidence is above −∞), one of an
    autoregressive model until its end token is there.
    """
    working: list[np.ndarray] = []

    def note(confidence: "Tensor", hook: Any) -> None:
        working.append((confidence > -np.inf).any(dim=1).cpu().numpy())

    run = generate(
        model, list(prompts), seed=seed, chat_template=chat_template, record_sinks=record_sinks, progress=False,
        hooks=[*hooks, ("denoise.hook_confidence", note)], replay=replay, **settings,
    )  # fmt: skip
    own = np.stack(working, axis=1)
    return OwnRun(run, own & ~_ended(run) if model.config.is_causal else own)


def _ended(run: "Generation") -> Bool[np.ndarray, "batch step"]:
    """Whether a row of an autoregressive run had its end token before the step."""
    return holds_end(run.canvas[:, :-1, run.prompt_length :].numpy(), run.model.eos_token_ids)
