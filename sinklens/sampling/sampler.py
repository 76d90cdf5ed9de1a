"""The base class of all samplers: a frozen dataclass of settings, with the denoising steps that they determine.

A sampler is written in one file. Each setting is a field, declared once with its type and range
(sinklens/utils/arguments.py) and documented once under ``Attributes:``; parts that several samplers share are base
classes (parts.py, blocks.py).
What a run, a policy or a study has to know about a sampler is a property that the class declares.

Pitfall: a default such as ``steps = 0`` may mean "follows from the other settings". `derived` replaces it, so only the
class attribute holds it, never an instance.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from textwrap import fill
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.sampling.state import State
from sinklens.utils.arguments import Argument, Count, arguments, meanings, plainly_shown


@plainly_shown
@dataclass(frozen=True)
class Sampler(ABC):
    """Base class of samplers; an instance holds the settings of a run, which are checked when it is made.

    Attributes:
        gen_length: number of answer positions; in a diffusion model all are undecided at the start.
    """

    name: ClassVar[str]
    """Its name, for `Family.sampler` and ``sampler=``."""

    attention: ClassVar[tuple[str, ...]] = ("bidirectional",)
    """Attention of the families that it fits: "bidirectional", "causal", "block-causal" or "encoder-decoder"."""

    masked: ClassVar[bool] = True
    """Whether undecided positions hold the mask token, as in `Family.masked`."""

    left_to_right: ClassVar[bool] = False
    """Whether a step decodes the next token, as an autoregressive model does."""

    sets_time: ClassVar[bool] = False
    """Whether it sets `State.time`, for networks that read a noise level."""

    level: ClassVar[str] = "sigma"
    """What it sets as `State.time`: "sigma", the noise level, or "time", which networks of GIDD read."""

    draws_canvas: ClassVar[bool] = False
    """Whether it begins with drawn or given tokens instead of masks."""

    marks_undecided: ClassVar[bool] = False
    """Whether it keeps the undecided positions itself, so a prompt may contain the mask token, as text."""

    blocks_by: ClassVar[str] = ""
    """The sampler that follows the same rule block by block, where this one has no `block_length`; "" for none."""

    judges_all: ClassVar[bool] = False
    """Whether every step judges every answer position, decided ones too, whatever its settings."""

    later_points: ClassVar[tuple[str, ...]] = ()
    """Points of the sampler that it passes, but not in its first step."""

    gen_length: Count = 128

    def __init_subclass__(cls, **more: Any) -> None:
        """Complete the docstring by the settings that are inherited, so that `help` lists all of them."""
        super().__init_subclass__(**more)
        own, text = meanings(cls.__doc__), inspect.cleandoc(cls.__doc__ or cls.__name__)
        bases = [meanings(base.__doc__).items() for base in reversed(cls.__mro__[1:])]
        inherited = {name: f"{name}: {meaning}" for base in bases for name, meaning in base if name not in own}
        lines = [fill(one, 112, initial_indent=" " * 4, subsequent_indent=" " * 8) for one in inherited.values()]
        cls.__doc__ = "\n".join([text, *(() if own else ("", "Attributes:")), *lines])

    def __post_init__(self) -> None:
        """Check every setting by its declaration and fill in what is `derived`; subclasses check them together.

        Raises:
            SettingError: a setting has another type or is out of range.
        """
        for argument in arguments(type(self)).values():
            if (given := getattr(self, argument.name)) is not argument.default:
                object.__setattr__(self, argument.name, argument.read(given))
        for name, value in self.derived().items():
            object.__setattr__(self, name, value)

    @abstractmethod
    def denoise(self, state: State) -> Iterator[None]:
        """Yield before each step; when resumed, run the step on `state.canvas`."""

    def rehearse(self, logits: Float[Tensor, "masked vocab"]) -> None:
        """What a step computes from its logits that takes most memory, for plans; its results are dropped.

        By default a softmax in float64.
        """
        logits.softmax(dim=-1, dtype=torch.float64)

    def derived(self) -> dict[str, Any]:
        """Settings that follow from others where they are left out: name -> value."""
        return {}

    @property
    def steps(self) -> int:
        """Denoising steps of a run; a setting of many samplers."""
        return self.gen_length

    @property
    def most_steps(self) -> int:
        """Largest number of steps of a run, with any that the sampler adds."""
        return self.steps

    @property
    def positions_per_block(self) -> int:
        """Positions that are decided together before later ones."""
        return 1 if self.left_to_right else self.gen_length

    @property
    def guided(self) -> bool:
        """Whether a pass has unconditional rows after the conditional ones."""
        return False

    @property
    def caches_keys(self) -> bool:
        """Whether a step reads keys and values of finished positions from an exact cache."""
        return False

    @property
    def reuses_keys(self) -> bool:
        """Whether the sampler itself computes some positions of a step and reads the keys of others as they were."""
        return False

    @property
    def slides(self) -> bool:
        """Whether its passes see a window that slides over the text, which may then be longer than the context."""
        return False

    @property
    def leaves_masks(self) -> bool:
        """Whether a block may end with masked positions that a later step decides."""
        return False

    @property
    def judges_all_by(self) -> str:
        """The setting with which every step judges every answer position, decided ones too; empty if none does."""
        return f"sampler={self.name!r}" if self.judges_all else ""

    @property
    def closing_token(self) -> str:
        """The token that follows the answer on the canvas: "pad", "eos" or "none"."""
        return "none"

    def fitted(self, prompt_lengths: Sequence[int]) -> "Sampler":
        """The settings of a run of these prompts, for samplers whose number of steps depends on them."""
        return self

    def lead(self, columns: int) -> int:
        """Columns of padding to add before prompts of `columns` columns."""
        return 0

    def spare(self, prompt_length: int) -> int:
        """Positions after the answer that the sampler also decides, to fill the last block."""
        return 0

    @classmethod
    def settings(cls) -> dict[str, Argument]:
        """The declarations of its settings by name, without fields that a run fills in."""
        filled = {entry.name for entry in fields(cls) if not entry.metadata.get("setting", True)}
        return {name: one for name, one in arguments(cls).items() if name not in filled}


FILLED_IN = {"setting": False}
"""Metadata of a field that the run fills in."""
