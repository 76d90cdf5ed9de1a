"""The result of a run. Nothing about an answer is hidden: whether it ended, whether it is empty, and how many positions
are still masked is in `Generation.answers`.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import PromptError, SettingError
from sinklens.model import Model
from sinklens.sampling import AnySettings
from sinklens.sinks.track import SinkTrack


@runtime_checkable
class Replayable(Protocol):
    """An earlier run: a `Generation`, or a trace after its block."""

    @property
    def canvas(self) -> Int[Tensor, "batch step pos"]:
        """Ids as each step worked on them, and as the last left them."""


def canvases_of(replay: Replayable | Tensor, tokens: range) -> Int[Tensor, "batch step pos"]:
    """The canvases that a run is to replay, given as an earlier run or as themselves.

    Args:
        tokens: ids that may stand on a canvas.

    Raises:
        SettingError: neither of the two, or canvases of another shape, type or vocabulary.
    """
    canvas = replay if isinstance(replay, Tensor) else getattr(replay, "canvas", None)
    if not isinstance(canvas, Tensor) or canvas.ndim != 3 or canvas.dtype not in (torch.int32, torch.int64):
        told = f"{canvas.dtype} {list(canvas.shape)}" if isinstance(canvas, Tensor) else type(replay).__name__
        raise SettingError(
            f"replay= takes an earlier run, or canvases as integers [batch, steps + 1, pos], as run.canvas holds them; "
            f"got {told}."
        )
    low, high = (int(end) for end in canvas.aminmax()) if canvas.numel() else (tokens[0], tokens[-1])
    if low not in tokens or high not in tokens:
        raise SettingError(f"replay holds token ids from {low} to {high}; they may be {tokens[0]} to {tokens[-1]}.")
    return canvas.long()


@dataclass(frozen=True)
class Answer:
    """One row's answer.

    Attributes:
        text: the answer up to its end, without the end token; leftover masks are spelled out. None without a tokenizer.
        ended: an end-of-sequence token was generated.
        tokens: tokens before the end.
        masks: positions that are still masked.
    """

    text: str | None
    ended: bool
    tokens: int
    masks: int

    @property
    def empty(self) -> bool:
        """Whether nothing but the end, or white space, was generated."""
        return self.tokens == 0 or (self.text is not None and not self.text.strip())


@dataclass(frozen=True)
class Generation:
    """What is left of a run.

    Attributes:
        canvas: ids as each step worked on them, and as the last left them, [batch, steps + 1, pos]; undecided positions
            hold the mask token (-1 in an autoregressive run).
        unmask_step: step that gave each position its token, [batch, pos]; -1 for prompt and padding, the number of
            steps where none did.
        real: False on left padding, [batch, pos].
        prompt_length: positions before the answers, padding included.
        answers: one per row.
        settings: as used, defaults filled in.
        seed: as used.
        sinks: sink scores of every step, layer and head; None if they were not recorded or no step ended.
        single: the prompt was one string, so `text` is one string.
        model: the model that ran.
        patterns: attention patterns that were asked for by `Record.patterns`, [batch, head, query, key] by
            (step, layer).
    """

    canvas: Int[Tensor, "batch step pos"]
    unmask_step: Int[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    prompt_length: int
    answers: tuple[Answer, ...]
    settings: AnySettings
    seed: int
    sinks: SinkTrack | None
    single: bool
    model: Model = field(repr=False)
    patterns: dict[tuple[int, int], Float[Tensor, "batch head query key"]] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Prompt and answer as the run left them."""
        return self.canvas[:, -1]

    @property
    def steps_run(self) -> int:
        """Steps that ran; fewer than `settings.steps` where the run ended early."""
        return self.canvas.shape[1] - 1

    @property
    def text(self) -> Any:
        """The answer of a single prompt, else a list of answers.

        Raises:
            PromptError: the model has no tokenizer.
        """
        texts = [answer.text for answer in self.answers]
        if any(text is None for text in texts):
            raise PromptError("the model has no tokenizer, so there is no text; read .tokens instead.")
        return texts[0] if self.single else texts

    def __repr__(self) -> str:
        masks, empty = sum(a.masks for a in self.answers), sum(a.empty for a in self.answers)
        return (
            f"Generation({len(self.answers)} answers, {self.steps_run} of {self.settings.steps} steps, "
            f"{sum(a.ended for a in self.answers)} ended, {empty} empty, {masks} positions still masked)"
        )
