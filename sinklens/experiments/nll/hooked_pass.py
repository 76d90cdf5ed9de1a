"""The passes of likelihoods: over prompts and noisy answers under hooks, and after prefixes that rows share.

Under hooks, a pass is a run of one step that decides nothing. Interventions get the context of such a run, step 0. The
pass goes through ``denoise.hook_canvas``, all points of the model, and ``denoise.hook_logits``; under guidance, hooks
see the conditional rows.

A block sees earlier blocks and no later ones, so the keys and values of earlier blocks do not depend on it. Without
hooks and guidance they are computed once for all draws and choices that have them, and only the block itself, with the
part of the prompt inside it, is computed for each row. The prompt of an autoregressive model is shared in the same way.

Limitation: interventions that need an earlier step or a sampler's decision are refused. `refuse_earlier` names what to
use instead.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.errors import DeviceMemoryError, HookNameError, SettingError, require
from sinklens.hooks import names
from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.hooks.hook_functions import takes_hook
from sinklens.interventions.patterns import Hold
from sinklens.interventions.places import AtPositions
from sinklens.interventions.rules import Where
from sinklens.model import Model
from sinklens.runs.attached import attached
from sinklens.runs.control_keys import ControlLog
from sinklens.runs.intervention import HookFunction, HookSource, RunContext, all_applied, refuse_off_canvas, row_key
from sinklens.runs.request import HOOKS
from sinklens.sampling.decisions import RowNoise
from sinklens.sampling.key_cache import one_later
from sinklens.sampling.state import State
from sinklens.utils.memory import explained

Ids = tuple[int, ...]
Row = TypeVar("Row")
POSITIONS = 16384  # of a first batch: 128 draws of 128 tokens
PASSED = ("denoise.hook_canvas", "denoise.hook_logits")
INSTEAD = "pass same_step=True for the keys of the pass itself, where= a state, token kind or array, or positions="


def in_batches(
    rows: Sequence[Row], length: Callable[[Row], int], work: Callable[[Sequence[Row]], None], most: int | None
) -> int | None:
    """Call `work` on consecutive batches of `rows`; when memory runs out, the batch is halved and the work goes on.

    Args:
        length: the number of positions that a row needs.
        most: largest number of rows in a batch; None for as many as make `POSITIONS` positions.

    Returns:
        `most`, or the number of rows that fit if memory ran out.

    Raises:
        DeviceMemoryError: a single row does not fit.
    """
    start = 0
    while start < len(rows):
        sizes = [length(row) for row in rows[start : start + (most or POSITIONS)]]
        while most is None and len(sizes) > 1 and max(sizes) * len(sizes) > POSITIONS:
            sizes.pop()
        batch = rows[start : start + len(sizes)]
        try:
            with explained(partial("A likelihood pass of {} rows ran out of memory.".format, len(batch))):
                work(batch)
        except DeviceMemoryError:
            if len(batch) == 1:
                raise
            most = len(batch) // 2
        else:
            start += len(batch)
    return most


@dataclass(frozen=True)
class HookedPass:
    """Runs passes of a masked diffusion model under `hooks`.

    Attributes:
        model: the model.
        hooks: (name or predicate, function) pairs and interventions.
        cfg_scale: strength of classifier-free guidance; 0 for none.
        seed: of random keys.
        controls: counts the keys of controls.
    """

    model: Model
    hooks: tuple[Any, ...]
    cfg_scale: float
    seed: int
    controls: ControlLog

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows can share their prefix; networks with a noise level keep no keys."""
        model = self.model
        alone = not (self.hooks or self.cfg_scale or model.tree.is_watched)
        return alone and model.checkpoint.blocks is not None and not model.tree.architecture.time

    @torch.no_grad()
    def logits(
        self,
        prompts: Int[Tensor, "row prompt"],
        real: Bool[Tensor, "row prompt"],
        answers: Int[Tensor, "row pos"],
        counted: Bool[Tensor, "row pos"],
        levels: Float[Tensor, " row"] | None,
    ) -> Float[Tensor, "counted vocab"]:
        """Logits, in float32, of the counted tokens of noisy answers of one length, row by row.

        Args:
            prompts, real: left-padded.
            answers, counted: the noisy tokens, and those whose loss counts.
            levels: what the network reads of the time; None if it reads none.

        Raises:
            SettingError: an intervention changed the tokens of the answer.
            PromptError: interventions made the text longer than the context.
        """
        model, after = self.model, prompts[:, :0]
        for entry in self.hooks:
            if isinstance(entry, HookSource):
                prompts, real, more = entry.extend(model, prompts, real)
                after = torch.cat([after, more], dim=1)
        prompts, real = padded_to_block(model, prompts, real)
        sides = prompts.shape[1], after.shape[1]
        canvas, real = (
            torch.cat([prompts, answers, after], dim=1),
            pad(real, (0, answers.shape[1] + sides[1]), value=True),
        )
        where = pad(counted, sides)
        model.check_length(int(real.sum(dim=1).max()), "With the tokens that interventions add, shorten the prompt")
        state, blocks = self._state(canvas, real, sides[0], where), blocks_of_text(model)
        same = blocks is None or blocks == model.checkpoint.blocks
        rule = nullcontext() if same else ruled_by(model.tree.hf.config, blocks)
        with (
            all_applied(self.hooks, model),
            rule,
            attached(model.tree, self._pairs(state), len(canvas), self.cfg_scale > 0),
        ):
            state.announce(0)
            if levels is not None:
                state.time = levels.to(canvas.device)
            seen = state.begin_step()
            require(
                torch.equal(seen[:, sides[0] : sides[0] + answers.shape[1]], answers),
                "an intervention changed answer tokens of a likelihood, whose masks are drawn; restrict it to the "
                "prompt, or change activations.",
            )
            return state.logits(seen, where, self.cfg_scale)

    def _state(self, canvas: Tensor, real: Tensor, prompt_length: int, counted: Tensor) -> State:
        model, mask_id = self.model, self.model.mask_token_id
        marked = mask_id is None or model.mask_is_text
        return State(
            tree=model.tree, canvas=canvas, real=real, prompt_length=prompt_length, eos_ids=model.eos_token_ids,
            eot_id=None, noise=RowNoise(self.seed, []), shift=model.family_record.shift,
            mask_id=-1 if mask_id is None else mask_id, undecided=counted if marked else None,
        )  # fmt: skip

    def _context(self, state: State) -> RunContext:
        """The context of the one step; random keys of a row depend on its canvas."""
        rows, tokenizer = zip(state.canvas, state.real, strict=True), self.model.tokenizer
        return RunContext(
            tree=self.model.tree,
            real=state.real,
            prompt_length=state.prompt_length,
            steps=1,
            mask_id=state.mask_id,
            seed=self.seed,
            row_keys=tuple(row_key(row[keep].tolist()) for row, keep in rows),
            vocabulary=lambda ids: {one: str(tokenizer.decode([one])) for one in ids if tokenizer and one >= 0},
            special=self.model.special_tokens,
            controls=self.controls,
        )

    def _pairs(self, state: State) -> list[tuple[str, HookFunction]]:
        """The (point, function) pairs of one pass.

        Raises:
            HookNameError: an entry is neither an intervention nor a pair, or names no point.
            SettingError: it acts at a point that the pass does not reach.
        """
        model, found = self.model, []
        for entry in self.hooks:
            if isinstance(entry, HookSource):
                pairs = entry.hooks_for(model, self._context(state))
            elif isinstance(entry, tuple) and len(entry) == 2 and callable(entry[1]) and takes_hook(entry[1]):
                pairs = [(name, entry[1]) for name in names.select(entry[0], model.hook_names(), model.cfg.n_layers)]
            else:
                raise HookNameError(f"{HOOKS}; got {entry!r}.")
            if beyond := [name for name, _ in pairs if name.startswith("denoise.") and name not in PASSED]:
                raise SettingError(
                    f"{_named(entry)} acts at {beyond[0]}, but a likelihood decides no token, so its passes do not "
                    f"reach that point; they reach {', '.join(PASSED)} and the points of the model."
                )
            found += pairs
        return found


def blocks_of_text(model: Model) -> Blocks | None:
    """The blocks of a prompt with its answer; None unless the model is block-causal.

    Those of a network with a noise level begin with the text, as in its published code, which has no padding.
    """
    blocks = model.checkpoint.blocks
    return replace(blocks, start="token") if blocks is not None and model.tree.architecture.time else blocks


def refuse_earlier(hooks: Sequence[Any], model: Model) -> None:
    """Refuse interventions that need a step before the pass, or complete passes where a model has none.

    Raises:
        SettingError: there is one; the message says what to use instead.
    """
    for entry in hooks:
        refuse_off_canvas(entry, model)
        rule = entry.rule if isinstance(entry, AtPositions) else None
        wheres = [leaf for leaf in ([] if rule is None else rule.leaves()) if isinstance(leaf, Where)]
        require(
            not any(leaf.track is not None or not leaf.same_step for leaf in wheres),
            f"{_named(entry)} acts on the sinks of the previous step or of another run, and a likelihood is one "
            f"pass of its own: {INSTEAD}.",
        )
        require(
            not isinstance(entry, Hold),
            f"{_named(entry)} repeats attention of an earlier step, and a likelihood is one pass without one; use "
            f"it in sinklens.generate.",
        )


def _named(entry: Any) -> str:
    return type(entry).__name__ if isinstance(entry, HookSource) else f"a hook function at {entry[0]!r}"


def prefix_length(model: Model, before: int) -> int:
    """How many of the `before` tokens that precede a block's noisy ones lie in complete blocks."""
    blocks = blocks_of_text(model)
    assert blocks is not None
    return before - before % blocks.length if blocks.start == "token" else before


@torch.no_grad()
def logits_after(
    model: Model, prefixes: Sequence[Ids], rest: Int[Tensor, "row pos"], where: Bool[Tensor, "row pos"]
) -> Float[Tensor, "token vocab"]:
    """Logits, in float32, of the tokens of `rest` at `where`, row by row; either all prefixes are empty or none is."""
    distinct = list(dict.fromkeys(prefixes))
    found = hidden_after(model, distinct, torch.tensor([distinct.index(prefix) for prefix in prefixes]), rest)
    hidden = one_later(*found) if model.family_record.shift else found.hidden
    return model.tree.head(hidden[where]).float()


class Continued(NamedTuple):
    """The outputs of a pass over tokens that continue prefixes.

    Attributes:
        hidden: the final-norm outputs of the tokens.
        real: False on padding before the prefix, which comes first.
        before: the output at the end of the prefix; None without one.
    """

    hidden: Float[Tensor, "row rest d_model"]
    real: Bool[Tensor, "row pos"]
    before: Float[Tensor, "row 1 d_model"] | None


def hidden_after(
    model: Model, prefixes: Sequence[Ids], source: Int[Tensor, " row"], rest: Int[Tensor, "row rest"]
) -> Continued:
    """One pass over distinct prefixes, and one over the tokens that continue them.

    A prefix is computed once, and its keys and values are copied to the rows that continue it. The cache of a run
    (key_cache.py) follows one canvas instead and has no rows that share their text.

    Args:
        prefixes: either all are empty or none is.
        source: the prefix of each row.
        rest: what follows it. Padding on the right needs no mask, as no real token sees it.
    """
    from transformers import DynamicCache

    cache, real, before = None, torch.ones_like(rest[:, :0], dtype=torch.bool), None
    if prefixes[0]:
        ids, real = padded_to_block(model, *model.reader.padded([list(prefix) for prefix in prefixes]))
        cache, source = DynamicCache(config=model.tree.hf.config), source.to(ids.device)
        before = model.tree.hidden(ids, real, cache)[source, -1:]
        cache.batch_select_indices(source)
        real = real[source.to(real.device)]
    real = pad(real, (0, rest.shape[1]), value=True)
    return Continued(model.tree.hidden(rest, real, cache), real, before)


def padded_to_block(
    model: Model, ids: Int[Tensor, "row pos"], real: Bool[Tensor, "row pos"]
) -> tuple[Int[Tensor, "row padded"], Bool[Tensor, "row padded"]]:
    """The rows with padding before them, so that they end with a block where blocks are those of the canvas."""
    blocks = blocks_of_text(model)
    lead = -ids.shape[1] % blocks.length if blocks is not None and blocks.start == "column" else 0
    return pad(ids, (lead, 0), value=model.reader.pad), pad(real, (lead, 0), value=False)
