"""BD3-LM: block diffusion of a DiT.

The sampler of BD3-LM's authors: block after block, one token per step or as many as the time allows.

A block begins at time 1. With `first_hitting`, the time falls to t · u^(1/m) in every step, where m positions of the
block are masked and u is a uniform random number; then one of the m positions, drawn uniformly, gets a token. Without
it, the time falls in equal steps to 0. A step from t to s decides each masked position with probability 1 − s/t, and
the step at time 0 decides all that are left. The published code writes token 0 there, a defect that one stored run
shows; here, these positions draw their tokens like all others.

Rows are independent: each row's block has its own time, and a row whose block is finished waits for the others.
``denoise.hook_uniform`` holds the numbers that tokens are drawn with, ``denoise.hook_commit`` the position that
`first_hitting` drew, and ``hook_time`` the noise level; writing those of an earlier run there repeats it.

The text begins with the start token, which is part of the prompt. All prompts have the same length.

With `sliding`, the text may be longer than the context. The published code then caches the keys and values of finished
blocks, drops the oldest when the cache is full, and rotates the others again from position 0. A query therefore sees
the latest blocks that fit into the context, at their distances, and the keys of these blocks saw the blocks that fit
before them. Here every pass computes the complete text under this rule, with the same result: scores depend on
distances only; no keys are cached. In a network that reads the noise level (none is public), the two differ: cached
keys keep the level at which their block was finished.

With `var_length`, a row ends at its second end token (the start token counts where it is the same token), or when it
repeats itself: the entropy of its last 256 tokens is below 4 nats. Both are checked after each block, once the text is
longer than 256 tokens. Without `var_length`, the published code discards a text that repeats itself and starts again,
at most ten times; here the text is kept. The published code counts the end tokens of all rows of a batch together; here
each row has its own count.

Pitfall: a block's prediction is reused until one of its tokens changes, as in the published code. A network that reads
the noise level therefore gets the level at the time of that change.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import PromptError, require
from sinklens.families.modulated import DIT, DIT_NEEDED, DIT_REQUIRED
from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.sampling import decisions
from sinklens.sampling.noise_levels import LastPrediction
from sinklens.sampling.sampler import Sampler
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count

JUDGED, LEAST_ENTROPY = 256, 4.0  # the tokens that the stopping rule looks at, and their entropy in nats
LARGEST_TIME = 0.999  # its noise level, 6.9078, is the largest that the network reads


@dataclass(frozen=True)
class Bd3lmOwtSettings(Sampler):
    """BD3-LM's sampler (Arriola et al., 2503.09573, and its reference code).

    Attributes:
        gen_length: number of answer positions; the last block may be shorter than the others.
        block_length: positions per block; always the model's.
        first_hitting: decide one position per step. False decides each with the probability that its time has come.
        num_steps: largest number of steps per block, and without `first_hitting` the number of its times.
        nucleus_p: draw from the most likely tokens whose probabilities sum to at most this; 1 draws from all.
        sliding: let each block see the latest blocks that fit into the context, in a text that may be longer.
        var_length: end a row at its second end token, or 256 tokens before it was found to repeat itself. Positions
            after its end hold end tokens.
    """

    name: ClassVar = "bd3lm-owt"
    attention: ClassVar = ("block-causal",)
    sets_time: ClassVar = True
    block_length: Count = 16
    first_hitting: bool = True
    num_steps: Count = 5000
    nucleus_p: Annotated[float, Gt(0), Le(1)] = 1.0
    sliding: bool = False
    var_length: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.first_hitting or self.num_steps >= self.block_length,
            f"num_steps {self.num_steps} is less than block_length {self.block_length}, and first_hitting decides one "
            f"position per step; give at least {self.block_length}, or first_hitting=False.",
        )

    @property
    def steps(self) -> int:
        return (
            self.gen_length if self.first_hitting else self.num_steps * (-(-self.gen_length // self.block_length) + 1)
        )

    @property
    def slides(self) -> bool:
        return self.sliding

    @property
    def positions_per_block(self) -> int:
        return self.block_length

    def fitted(self, prompt_lengths: Sequence[int]) -> "Bd3lmOwtSettings":
        """These settings.

        Raises:
            PromptError: the prompts differ in length, so that their blocks would lie at different places.
        """
        require(
            len(set(prompt_lengths)) <= 1,
            f"the prompts have {min(prompt_lengths)} to {max(prompt_lengths)} tokens; blocks are counted from the "
            f"first column, so the {self.name} sampler takes prompts of one length. Run the others separately.",
            PromptError,
        )
        return self

    def denoise(self, state: State) -> Iterator[None]:
        if self.var_length:
            state.require_end_tokens()
        last, config, reach = LastPrediction(), state.tree.hf.config, self._reach(state)
        columns = torch.arange(state.canvas.shape[1], device=state.canvas.device)
        for start in range(0, len(columns), self.block_length):
            block = _Block(self, state, columns // self.block_length == start // self.block_length)
            for step in state.while_undecided(range(self.num_steps), (slice(None), block.columns)):
                yield
                with ruled_by(config, reach):
                    block.run(step, last)

    def _reach(self, state: State) -> Blocks | None:
        """The blocks that a query sees while the window slides; None without a window."""
        blocks = state.tree.attention_blocks
        if not self.sliding or blocks is None:
            return None
        return replace(blocks, reach=max(1, state.tree.cfg.n_ctx // self.block_length))


class TextEnd(NamedTuple):
    """Whether a text ends, and how many of its tokens are kept."""

    stops: bool
    kept: int


def stop(text: Int[Tensor, " pos"], eos_ids: Sequence[int], var_length: bool) -> TextEnd:
    """The published stopping rule for the text so far, after a block.

    The text stops if its last 256 tokens have an entropy below 4 nats. With `var_length`, these are then cut off, and
    the text also stops after its second end token.
    """
    size = len(text)
    if size <= JUDGED:
        return TextEnd(False, size)
    counts = text[-JUDGED:].unique(return_counts=True)[1].double() / JUDGED
    repeats = bool(torch.special.entr(counts).sum() < LEAST_ENTROPY)
    if repeats or not var_length:
        return TextEnd(repeats, size - JUDGED if repeats and var_length else size)
    ends = decisions.among(text, eos_ids).nonzero()[:, 0]
    return TextEnd(True, int(ends[1]) + 1) if len(ends) > 1 else TextEnd(False, size)


class _Block:
    """One block of all rows while it is denoised."""

    def __init__(self, settings: Bd3lmOwtSettings, state: State, columns: Bool[Tensor, " pos"]) -> None:
        self._settings, self._state, self.columns = settings, state, columns
        rows, device = len(state.canvas), state.canvas.device
        self._time = torch.ones(rows, dtype=torch.float64, device=device)
        self._read = torch.zeros(rows, device=device)
        self._seen: Tensor | None = None

    def masked(self) -> Bool[Tensor, "batch pos"]:
        """The positions of the block that are masked."""
        return (self._state.canvas == self._state.mask_id) & self.columns

    def run(self, step: int, last: LastPrediction) -> None:
        """Run step `step` of the block."""
        state, settings = self._state, self._settings
        stays = self._pass_time(step, self.masked())
        state.time = self._noise_level(state.canvas)
        canvas = state.begin_step()
        where = (canvas == state.mask_id) & self.columns
        logits = last.logits(state, canvas, where)
        logits[:, state.mask_id] = -torch.inf
        probs = decisions.capped_nucleus(logits.log_softmax(dim=-1).double().exp(), settings.nucleus_p)
        weights = decisions.posterior_weights(probs, state.mask_id, stays)
        drawn = decisions.exponential_race(weights, state.uniform(where, weights.shape[-1], weights.dtype))
        proposed = state.propose_drawn(where, drawn, canvas, lambda: probs)
        chosen = where & (proposed != state.mask_id)
        chosen = state.through("hook_commit", self._one_of(chosen) if settings.first_hitting else chosen)
        after = torch.where(chosen, proposed, canvas)
        state.end_step(self._ended(after, (where & chosen).any(dim=1)) if settings.var_length else after)

    def _ended(self, canvas: Int[Tensor, "batch pos"], rows: Bool[Tensor, " batch"]) -> Int[Tensor, "batch pos"]:
        """The canvas, with end tokens after the end of those of `rows` whose text ends with this block."""
        found, size = canvas.clone(), int(self.columns.nonzero()[-1]) + 1
        finished = rows & ~((canvas == self._state.mask_id) & self.columns).any(dim=1)
        for row in finished.nonzero()[:, 0].tolist():
            if (stopped := stop(canvas[row, :size], self._state.eos_ids, var_length=True)).stops:
                found[row, stopped.kept :] = self._state.eos_ids[0]
        return found

    def _pass_time(self, step: int, where: Bool[Tensor, "batch pos"]) -> Float[Tensor, ""]:
        """Advance the rows' times; the probability with which a masked position stays masked."""
        if self._settings.first_hitting:
            waiting = where.sum(dim=1)
            drawn = self._state.noise.uniform(waiting[:, None] > 0, dtype=torch.float64)
            fall = torch.ones_like(self._time).masked_scatter(waiting > 0, drawn)
            self._time = self._time * fall ** (1 / waiting.clamp(min=1))
            return torch.zeros((), device=where.device)
        time = torch.linspace(1, 0, self._settings.num_steps, device=where.device)[step]
        self._time = time.double().expand(len(where))
        return (time - 1 / self._settings.num_steps) / time if time > 0 else time

    def _noise_level(self, canvas: Tensor) -> Float[Tensor, " batch"]:
        """What the network reads: σ of each row's time, as it was when the row's canvas last changed."""
        sigma = decisions.log_linear_sigma(self._time.clamp(max=LARGEST_TIME), eps=0.0).float()
        if self._seen is not None:
            sigma = torch.where((canvas == self._seen).all(dim=1), self._read, sigma)
        self._seen, self._read = canvas, sigma
        return sigma

    def _one_of(self, chosen: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
        """One position of each row of `chosen`, drawn uniformly."""
        counts, rows = chosen.sum(dim=1), chosen.any(dim=1, keepdim=True)
        drawn = torch.zeros_like(self._time).masked_scatter(
            rows[:, 0], self._state.noise.uniform(rows, dtype=torch.float64)
        )
        return chosen & (chosen.cumsum(dim=1) == (drawn * counts).long()[:, None] + 1)


FAMILIES = (
    replace(
        DIT,
        name="bd3lm-owt",
        bound="subs",
        model_types=("bd3lm",),
        sampler="bd3lm-owt",
        needed=(*DIT_NEEDED, "time_conditioning"),
        foreign=r"(?!backbone\.|sampling_eps_)",
        required={**DIT_REQUIRED, "cross_attn": (True,)},
        mask_is_last=True,
        block_causal=True,
        block_length_key="block_size",
        blocks_start="column",
        unconditional=False,
        own_classes=("BD3LM",),
        checkpoints="bd3lm-owt-block_size4, 8, 16 (the authors' BD3-LM)",
        parameters=(169_627_218, 424_477_010),
    ),
)
SAMPLERS = (Bd3lmOwtSettings,)
