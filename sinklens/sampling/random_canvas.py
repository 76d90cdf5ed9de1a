"""A canvas that begins as random tokens, for models without a mask token.

A replay takes the canvases of the earlier run, and ``start_canvas`` sets the first one; otherwise each token is drawn
uniformly from the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RandomCanvas(Sampler):
    """A canvas that begins as random tokens.

    Attributes:
        start_canvas: token ids of the first canvas, [batch, pos] or one row for all; None draws them. Kept as rows of
            numbers.
    """

    draws_canvas: ClassVar[bool] = True
    start_canvas: Any = field(default=None, kw_only=True)

    def derived(self) -> dict[str, Any]:
        given = {} if self.start_canvas is None else {"start_canvas": self._rows(self.start_canvas)}
        return super().derived() | given

    def _rows(self, given: Any) -> Rows:
        """`given`, an array or nested lists, as rows of token ids."""
        listed = given.tolist() if hasattr(given, "tolist") else given
        rows = [listed] if isinstance(listed, Sequence) and listed and isinstance(listed[0], int) else listed
        try:
            found = tuple(tuple(int(token) for token in row) for row in rows)
        except (TypeError, ValueError):
            found = ()
        length = self.positions_per_block
        if not found or any(len(row) != length for row in found):
            raise SettingError(
                f"start_canvas must be token ids [batch, {length}], or one row of {length}; got {given!r:.80}."
            )
        return found

    def check_start(self, state: State) -> None:
        """Check that ``start_canvas`` fits the run.

        Raises:
            SettingError: it has another number of rows, or ids outside the vocabulary.
        """
        given, rows = self.start_canvas, len(state.canvas)
        if given is None:
            return
        require(
            len(given) in (1, rows),
            f"start_canvas has {len(given)} rows, but there are {rows} prompts; give one row, or {rows}.",
        )
        size = state.tree.cfg.d_vocab
        if outside := [token for row in given for token in row if not 0 <= token < size]:
            raise SettingError(f"start_canvas has the token id {outside[0]}; the vocabulary is 0 to {size - 1}.")

    def begun(self, state: State, start: int) -> Int[Tensor, "batch pos"]:
        """The text with the first tokens of the canvas at `start`: drawn, or those of a replay or ``start_canvas``."""
        canvas, place = state.canvas.clone(), slice(start, start + self.positions_per_block)
        drawn = random_tokens(state, torch.ones_like(canvas[:, place], dtype=torch.bool)).view_as(canvas[:, place])
        if self.start_canvas is not None and start == state.prompt_length:
            drawn = torch.tensor(self.start_canvas, device=canvas.device).expand_as(drawn)
        replay = state.replay
        if replay is not None and replay.shape[::2] == canvas.shape and state.steps_done < replay.shape[1]:
            drawn = replay[:, state.steps_done, place].to(canvas.device)
        canvas[:, place] = drawn
        return canvas


def random_tokens(state: State, where: Bool[Tensor, "batch pos"]) -> Int[Tensor, " drawn"]:
    """A token id, uniform over the vocabulary, for every True of `where`."""
    size = state.tree.cfg.d_vocab
    return (state.noise.uniform(where, dtype=torch.float64) * size).long().clamp(max=size - 1)
