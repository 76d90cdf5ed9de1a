"""The result of a run.

`Generation.answers` records whether each answer ended, whether it is empty, and how many positions are still masked.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import PromptError, SettingError, require
from sinklens.hooks.detached import without_model
from sinklens.hooks.forward_pass import Mode, PassKind
from sinklens.model import Model
from sinklens.runs.choices import Choice
from sinklens.runs.control_keys import ControlKeys
from sinklens.sampling import Sampler
from sinklens.sampling.key_cache import Policy
from sinklens.sampling.loop import Trajectory
from sinklens.sinks.track import SinkTrack


@runtime_checkable
class Replayable(Protocol):
    """An earlier run: a `Generation`, or a trace after its block."""

    @property
    def canvas(self) -> Int[Tensor, "batch step pos"]:
        """The input ids of each step, and the ids after the last."""


def canvases_of(replay: Replayable | Tensor, tokens: range) -> Int[Tensor, "batch step pos"]:
    """The canvases to replay, from an earlier run or from a tensor of canvases.

    Args:
        tokens: valid token ids.

    Raises:
        SettingError: `replay` is neither, or the canvases have another shape, dtype or vocabulary.
    """
    canvas = replay if isinstance(replay, Tensor) else getattr(replay, "canvas", None)
    if not isinstance(canvas, Tensor) or canvas.ndim != 3 or canvas.dtype not in (torch.int32, torch.int64):
        given = f"{canvas.dtype} {list(canvas.shape)}" if isinstance(canvas, Tensor) else type(replay).__name__
        raise SettingError(
            f"replay= takes an earlier run, or canvases as integers [batch, steps + 1, pos] like run.canvas; "
            f"got {given}."
        )
    low, high = (int(end) for end in canvas.aminmax()) if canvas.numel() else (tokens[0], tokens[-1])
    require(
        low in tokens and high in tokens,
        f"replay has token ids from {low} to {high}; allowed are {tokens[0]} to {tokens[-1]}.",
    )
    return canvas.long()


def with_prompts(
    canvas: Int[Tensor, "batch step pos"], earlier: "Generation", start: Int[Tensor, "batch pos"]
) -> Int[Tensor, "batch step pos"]:
    """`canvas` of the run `earlier`, with the prompts of `start` in place of its own.

    Prompt tokens that the earlier run changed on the way stay as it changed them.

    Args:
        start: the canvas that the replaying run begins with; its prompts have as many tokens as those of `earlier`.
    """
    length = earlier.prompt_length
    prompt = canvas[:, :, :length]
    replaced = torch.where(prompt == prompt[:, :1], start[:, None, :length].to(canvas.device), prompt)
    return torch.cat([replaced, canvas[:, :, length:]], dim=2)


def undecided_of(replay: Replayable | Tensor, canvas: Tensor) -> Bool[Tensor, "batch step pos"] | None:
    """The undecided positions of the canvases to replay; None if only canvases were given."""
    found = None if isinstance(replay, Tensor) else getattr(replay, "undecided", None)
    return found if isinstance(found, Tensor) and found.shape == canvas.shape else None


@dataclass(frozen=True)
class Answer:
    """One row's answer.

    Attributes:
        text: the answer up to its end token, excluding it; remaining masks are spelled out. None without a tokenizer.
        ended: whether an end-of-sequence token was generated.
        tokens: number of tokens before the end.
        masks: number of positions that are still undecided.
    """

    text: str | None
    ended: bool
    tokens: int
    masks: int

    @property
    def empty(self) -> bool:
        """Whether only an end token or whitespace was generated."""
        return self.tokens == 0 or (self.text is not None and not self.text.strip())


@dataclass(frozen=True)
class Generation(Trajectory):
    """A finished run: its answers, canvases, decisions, settings and sinks.

    Attributes:
        canvas: the input ids of each step, and the ids after the last, [batch, steps + 1, pos]; undecided positions
            contain the mask token (-1 in an autoregressive run).
        undecided: the undecided positions of each canvas, [batch, steps + 1, pos].
        unmask_step: the step that decided each position, [batch, pos]; -1 for prompt and padding, the number of steps
            for positions that were never decided.
        active: the rows that each step worked on, [batch, step]; the others had finished their block, their canvas or
            their answer and waited for the rest of the batch.
        real: False on padding, [batch, pos].
        prompt_length: number of positions before the answers, including padding.
        answers: one per row.
        settings: the settings used, with defaults filled in.
        seed: the seed used.
        sinks: sink scores of every step, layer and head; None if they were not recorded or no step finished.
        single: whether the prompt was one string; `text` is then one string.
        model: the model that ran; a pickled run leaves it out (hooks/detached.py).
        control_keys: the numbers of keys that controls (``pick=``) picked, and of keys that they control for; None if
            the run has no control.
        cache: the cache policy; None for an exact run.
        chosen: where those interventions acted whose places follow the run; none if sinks were not recorded.
        time: the noise level of each step, [batch, step]; None if its sampler sets none. An untimed network does not
            read it.
        ties: how many positions each step chose although another one, equally confident, was left, [batch, step];
            another order of these would have been equally valid. None in runs of the lab.
        kinds: the kind of each step's pass, with the segments of its attention rule, in a model that changes its
            attention.
        patterns: attention patterns requested by `Record.patterns`, [batch, head, query, key] by (step, layer).
    """

    ARGUMENT: ClassVar[str] = "a run (from sinklens.generate, or a trace after its block)"

    real: Bool[Tensor, "batch pos"]
    prompt_length: int
    answers: tuple[Answer, ...]
    settings: Sampler
    seed: int
    sinks: SinkTrack | None
    single: bool
    model: Model = field(repr=False)
    patterns: dict[tuple[int, int], Float[Tensor, "batch head query key"]] = field(default_factory=dict, repr=False)
    control_keys: ControlKeys | None = field(default=None, repr=False)
    cache: Policy | None = None
    chosen: tuple[Choice, ...] = field(default=(), repr=False)

    __getstate__ = without_model

    def __copy__(self) -> "Generation":
        return replace(self)

    if not TYPE_CHECKING:  # type checkers would take it for every attribute

        def __getattr__(self, name: str) -> NoReturn:
            of_sinks = hasattr(self.__dict__.get("sinks"), name)  # a function of a track was given a run
            raise AttributeError(f"a run has no attribute {name!r}{', but run.sinks has; pass it' * of_sinks}.")

    @property
    def modes(self) -> tuple[Mode | None, ...]:
        """The kind of each step's pass, as in `ForwardPass.mode`."""
        return tuple(kind.mode for kind in self.kinds)

    @property
    def step_blocks(self) -> tuple[range | None, ...]:
        """The columns of the block that each step filled, in a model that changes its attention; None in others."""
        return tuple(kind.block for kind in self.kinds)

    def kind_at(self, step: int) -> PassKind | None:
        """The kind of a step's pass, for another pass over its canvas; None if the model has only one kind."""
        return self.kinds[step] if self.kinds and self.model.tree.changes_attention else None

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Prompt and answer after the last step."""
        return self.canvas[:, -1]

    @property
    def causal(self) -> bool:
        """Whether the run decoded from left to right."""
        return self.settings.left_to_right

    def time_at(self, step: int) -> Float[Tensor, " batch"] | None:
        """The noise level of each row in a step, for another pass over its canvas; None if the network reads none."""
        return self.time[:, step] if self.time is not None and self.model.tree.timed else None

    @property
    def key_reuse(self) -> str:
        """The argument with which steps read keys that earlier steps computed on other canvases; "" if none do."""
        if self.cache is not None:
            return f"cache={self.cache!r}"
        return "use_block_cache=True" if self.settings.reuses_keys else ""

    @property
    def text(self) -> Any:
        """The answer to a single prompt, otherwise a list of answers.

        Raises:
            PromptError: the model has no tokenizer.
        """
        texts = [answer.text for answer in self.answers]
        require(
            None not in texts,
            "the model has no tokenizer, so there is no text; use .tokens instead.",
            PromptError,
        )
        return texts[0] if self.single else texts

    def __repr__(self) -> str:
        masks, empty = sum(a.masks for a in self.answers), sum(a.empty for a in self.answers)
        ties = 0 if self.ties is None else int(self.ties.sum())
        tied = f", {ties} chosen among equal confidences" * bool(ties)
        return (
            f"Generation({len(self.answers)} answers, {self.steps_run} of {self.settings.most_steps} steps, "
            f"{sum(a.ended for a in self.answers)} ended, {empty} empty, {masks} positions still masked{tied})"
        )
