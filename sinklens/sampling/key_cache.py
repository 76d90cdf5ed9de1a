"""Keys and values that the steps of a run read from earlier steps: exactly, or as a policy decides.

`KeyCache` is exact. It keeps the entries of the columns before the active block: the text before the next token of an
autoregressive model, the finished blocks of block diffusion, and the text that an encoder reads before a canvas. Their
tokens are final, and no later column changes their entries, so a step computes only what follows them and decides the
same tokens as without a cache. Edited tokens empty it.

`PolicyCache` follows a policy, which approximates. Before each step a `Policy` sees the `History` of the run and says
of every key whether the step computes it (`FRESH`), reuses it (`STALE`) or hides it (`GONE`). The step then computes
one window of columns: from the first position that is fresh in any row or layer to the last. Only positions that are
fresh can be decided in the step.

Some positions are computed whatever the policy says, because their entries cannot be used. These are the ones that were
never computed, those whose token a hook or a replay replaced, and those whose stale key or value a hook changed in the
step before. Where logits predict the next position, the position before a fresh undecided one is computed too, but only
to predict that one: an undecided position that is computed for its successor alone cannot be decided in the step.

Pitfall: under the exact cache, points show only the computed positions, and attention has a row for each of these; see
`Point.key_positions`. Under a policy the window is contiguous: fresh positions that lie far apart cost as much as all
positions between them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.hooks.tree import HookTree
from sinklens.hooks.window_cache import WindowCache
from sinklens.utils.arguments import check_arguments


class Keys(IntEnum):
    """What a step does with a key and its value.

    Attributes:
        GONE: no query sees it.
        STALE: the entry of an earlier step is used.
        FRESH: it is computed.
    """

    GONE = 0
    STALE = 1
    FRESH = 2


@dataclass(frozen=True)
class History:
    """What a policy knows when it plans a step.

    Attributes:
        step: the step to plan.
        step_in_block: steps that its block has had before.
        block: columns of the active block; of samplers without blocks, the answer.
        canvas: token ids that the step works on.
        undecided: its undecided positions.
        real: False on padding.
        age: steps since each entry was computed, at least 1; -1 without a usable entry.
        gone: keys that the plan of the step before hid.
        decided: steps since each position's token was written or changed, at least 1; -1 while it is undecided. The
            prompt's tokens were there before step 0.
        scores: sink scores of the step before; None in step 0, and unless `Policy.reads_scores`.
        shift: whether logits at i predict the token at i + 1.
    """

    step: int
    step_in_block: int
    block: slice
    canvas: Int[Tensor, "batch pos"]
    undecided: Bool[Tensor, "batch pos"]
    real: Bool[Tensor, "batch pos"]
    age: Int[Tensor, "batch layer pos"]
    gone: Bool[Tensor, "batch layer pos"]
    decided: Int[Tensor, "batch pos"]
    scores: Float[Tensor, "batch layer head pos"] | None
    shift: bool

    @property
    def in_block(self) -> Bool[Tensor, " pos"]:
        """True at the columns of the active block."""
        columns = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        return (columns >= self.block.start) & (columns < self.block.stop)

    @property
    def complete(self) -> Bool[Tensor, "batch layer"]:
        """Whether the step before computed every key of a layer; False in step 0."""
        return ~(((self.age > 1) | self.gone) & self.real[:, None]).any(dim=2) & (self.step > 0)


class Policy(ABC):
    """Decides before each step which keys are computed, reused or hidden; see `sinklens.sampling`.

    The attributes of one that is a dataclass are checked by their declared types.

    Attributes:
        reads_scores: whether `plan` uses `History.scores`, which cost time.
    """

    reads_scores: bool = False

    def __post_init__(self) -> None:
        check_arguments(self)

    @abstractmethod
    def plan(self, history: History) -> Tensor:
        """What the next step does with each key.

        Returns:
            Numbers of `Keys`, or booleans (True for fresh, False for stale), that broadcast to [batch, layer, pos]. Two
            axes are [batch, pos], the same in every layer; one is [pos].
        """


class KeyCache:
    """The keys and values of one run in the columns before the active block.

    Args:
        read: the pass that computes the columns and extends the store; by default that of the tree.

    Attributes:
        tree: the model.
        store: the transformers cache that holds them.
        window: the columns that the current step computes.
        before: the output at the column before the window; None if the window begins with the first column.
        decidable: positions that the step can decide; None for all.
    """

    decidable: Bool[Tensor, "batch pos"] | None = None

    def __init__(self, tree: HookTree, read: Callable[..., Tensor] | None = None) -> None:
        self.tree, self._read = tree, read or tree.hidden
        self.window = self._block = slice(0, 0)
        self._empty()

    def _empty(self) -> None:
        from transformers import DynamicCache

        self.store: Any = DynamicCache(config=self.tree.hf.config)
        self._text: Int[Tensor, "batch kept"] | None = None
        self._rows: Int[Tensor, " running"] | None = None
        self._last: Float[Tensor, "batch 1 d_model"] | None = None  # output at the last column that is kept
        self.before: Float[Tensor, "batch 1 d_model"] | None = None

    def plan(
        self,
        canvas: Int[Tensor, "batch pos"],
        undecided: Bool[Tensor, "batch pos"],
        edited: Bool[Tensor, "batch pos"],
        block: slice | None,
    ) -> None:
        """Plan the next step.

        Args:
            edited: positions whose token a hook changed before the step.
            block: columns of the active block; None if the step may change any position, so that nothing is kept.
        """
        if block is None:
            self._empty()
        self._block = slice(0, canvas.shape[1]) if block is None else block

    def forget(self, keep: int) -> None:
        """Remove the entries from column `keep` on, of tokens that the run takes back."""
        if self._text is not None and keep < self._text.shape[1]:
            self.store.crop(keep - self._text.shape[1])
            self._text, self._last = self._text[:, :keep], None

    def first(self, text: Int[Tensor, "batch pos"], rows: Int[Tensor, " running"] | None = None) -> int:
        """The first column of `text` that a pass must compute; empties the cache if kept tokens have changed."""
        if self._text is not None and not (self._has(rows) and torch.equal(text[:, : self._text.shape[1]], self._text)):
            self._empty()
        return self.store.get_seq_length()

    def _has(self, rows: Int[Tensor, " running"] | None) -> bool:
        """Whether there are entries of these rows; drops those of others."""
        if rows is None or self._rows is None:
            return rows is self._rows
        if not bool(torch.isin(rows, self._rows).all()):
            return False
        if len(rows) < len(self._rows):
            self.store.batch_select_indices(torch.isin(self._rows, rows).nonzero()[:, 0])
        return True

    def hidden(
        self,
        text: Int[Tensor, "batch pos"],
        real: Bool[Tensor, "batch pos"],
        rows: Int[Tensor, " running"] | None = None,
    ) -> Float[Tensor, "running window d_model"]:
        """The final-norm outputs of the window's columns; logits that predict the next position are not shifted.

        Args:
            rows: indices of the rows that the pass has; None for all.
        """
        first, block = self.first(text, rows), self._block
        self.window = slice(first, block.stop)
        new, real = text[:, self.window], real[:, : block.stop]
        hidden = self._read(*((new, real) if rows is None else (new[rows], real[rows])), self.store)
        if block.stop > block.start:
            self.store.crop(block.start - block.stop)
        self._text, self._rows, self.before = text[:, : block.start].clone(), rows, self._last
        if block.start > first:
            self._last = hidden[:, [block.start - first - 1]]
        return hidden


class PolicyCache(KeyCache):
    """The cached keys and values of one run under a policy.

    Args:
        answer: columns of the answer, which count as the block of a sampler without blocks.

    Attributes:
        policy: the policy.
        layers: number of layers.
        block: columns of the active block.
        fresh, gone: the plan of the current step.
        decidable: positions that the plan computes together with the position that predicts them.
    """

    def __init__(
        self,
        tree: HookTree,
        policy: Policy,
        real: Bool[Tensor, "batch pos"],
        answer: slice,
        mask_id: int,
        shift: bool,
    ) -> None:
        super().__init__(tree)
        self.policy, self.layers = policy, tree.cfg.n_layers
        self._real, self._answer, self._mask, self._shift = real, answer, mask_id, shift
        self.store = WindowCache(tree, real)
        shape = (real.shape[0], self.layers, real.shape[1])
        self._computed = torch.full(shape, -1, dtype=torch.long, device=real.device)  # step of each entry
        self._written = torch.full(real.shape, -1, dtype=torch.long, device=real.device)
        self._canvas: Tensor | None = None  # of the step before
        self._step, self._step_in_block, self.block = -1, 0, slice(0, 0)
        self.fresh = self.gone = self._hidden = torch.zeros(shape, dtype=torch.bool, device=real.device)
        self._scores: Tensor | None = None  # of the current step

    @property
    def computed(self) -> Bool[Tensor, "batch pos"]:
        """Positions whose stream the current step computes."""
        return self.fresh.any(dim=1) & self._real

    def plan(
        self,
        canvas: Int[Tensor, "batch pos"],
        undecided: Bool[Tensor, "batch pos"],
        edited: Bool[Tensor, "batch pos"],
        block: slice | None,
    ) -> None:
        """Plan the next step.

        Raises:
            SettingError: the policy returned something else than `Policy.plan` describes, or nothing fresh.
        """
        block = block or self._answer
        self._step += 1
        self._step_in_block = self._step_in_block + 1 if block == self.block else 0
        self.block = block
        self._forget(canvas, edited)
        plan = self._checked(self.policy.plan(self._history(canvas, undecided)))
        self.gone = self._hidden = (plan == Keys.GONE) & self._real[:, None]
        self.fresh = ((plan == Keys.FRESH) | ((self._computed < 0) & ~self.gone)) & self._real[:, None]
        self.decidable = self.computed
        if self._shift:
            self._add_predecessors(undecided, self.decidable)
        columns = self.computed.any(dim=0).nonzero()[:, 0]
        require(
            len(columns),
            f"{type(self.policy).__name__}.plan left nothing to compute in step {self._step}; return Keys.FRESH "
            f"at least at the undecided positions of history.block.",
        )
        self.window = slice(int(columns[0]), int(columns[-1]) + 1)

    def _add_predecessors(self, undecided: Bool[Tensor, "batch pos"], decidable: Bool[Tensor, "batch pos"]) -> None:
        """Compute the position before each undecided one that is computed; only with it can a position be decided."""
        self.fresh[:, :, :-1] |= ((self.computed & undecided)[:, 1:] & self._real[:, :-1])[:, None]
        self.gone = self.gone & ~self.fresh
        decidable[:, 1:] &= self.computed[:, :-1] | ~self._real[:, :-1]

    def _forget(self, canvas: Tensor, edited: Tensor) -> None:
        """Drop entries that a hook changed, or whose token was replaced by other than the sampler's decision."""
        last = canvas if self._canvas is None else self._canvas
        self._written = torch.where((canvas != last), self._step - 1, self._written)
        self._canvas = canvas.clone()
        replaced = edited | ((last != canvas) & (last != self._mask)) | self.store.edited
        self._computed.masked_fill_(replaced[:, None], -1)

    def _history(self, canvas: Tensor, undecided: Tensor) -> History:
        age = torch.where(self._computed >= 0, self._step - self._computed, -1)
        return History(
            self._step, self._step_in_block, self.block, canvas, undecided, self._real, age, self._hidden,
            torch.where(undecided, -1, self._step - self._written), self._scores, self._shift,
        )  # fmt: skip

    def _checked(self, plan: object) -> Int[Tensor, "batch layer pos"]:
        """The plan as numbers of `Keys` at every position."""
        shape, name = tuple(self.fresh.shape), type(self.policy).__name__
        if not isinstance(plan, Tensor) or plan.is_floating_point():
            raise SettingError(f"{name}.plan must return a tensor of Keys or booleans; got {plan!r}.")
        by_row = plan[:, None] if plan.ndim == 2 else plan
        try:
            plan = by_row.to(self._real.device).expand(shape)
        except RuntimeError as error:
            raise SettingError(
                f"{name}.plan returned shape {list(plan.shape)}, which does not broadcast to [batch, layer, pos] = "
                f"{list(shape)}. Two axes are [batch, pos]; return a plan by layer as plan[None]."
            ) from error
        numbers = torch.where(plan, int(Keys.FRESH), int(Keys.STALE)) if plan.dtype is torch.bool else plan
        require(
            bool(torch.isin(numbers, torch.tensor(list(map(int, Keys)), device=plan.device)).all()),
            f"{name}.plan returned numbers other than those of Keys, 0, 1 and 2.",
        )
        return numbers

    def hidden(
        self,
        text: Int[Tensor, "batch pos"],
        real: Bool[Tensor, "batch pos"],
        rows: Int[Tensor, " running"] | None = None,
    ) -> Float[Tensor, "batch window d_model"]:
        """As in `KeyCache`; always of all rows."""
        self.tree.watch.describe(decidable=self.decidable)
        hidden = self.store.hidden(text, self.window, self.fresh, self.gone)
        self._computed.masked_fill_(self.fresh, self._step)
        return hidden

    def see(self, layer: int, scores: Float[Tensor, "batch head pos"]) -> None:
        """Keep the sink scores of a layer in the current step."""
        if self._scores is None:
            self._scores = scores.new_zeros(len(scores), self.layers, *scores.shape[1:])
        self._scores[:, layer] = scores

    def staleness(self) -> Int[Tensor, "batch layer pos"]:
        """Steps since each used key was computed, 0 for fresh ones; -1 for hidden keys and padding."""
        age = torch.where(self.fresh, 0, self._step - self._computed)
        return torch.where(self.gone | ~self._real[:, None] | (age > self._step), -1, age)


def one_later(
    hidden: Float[Tensor, "batch new d_model"],
    real: Bool[Tensor, "batch pos"],
    before: Float[Tensor, "batch 1 d_model"] | None = None,
) -> Float[Tensor, "batch new d_model"]:
    """`hidden`, the outputs of the last positions of `real`, one position later; a row's first token keeps its own.

    Args:
        before: the output before the first position; by default this position keeps its own.
    """
    later = torch.cat([hidden[:, :1] if before is None else before, hidden[:, :-1]], dim=1)
    if bool(real[:, 0].all()):
        return later
    first = (real & (real.cumsum(dim=1) == 1))[:, -hidden.shape[1] :].to(hidden.device)
    return torch.where(first[..., None], hidden, later)
