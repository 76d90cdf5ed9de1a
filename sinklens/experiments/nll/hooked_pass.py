"""One pass over prompts and partly masked answers, under hooks: a run of one step that decides nothing.

Interventions get the context of a run with one step, step 0. The pass goes through ``denoise.hook_canvas``, all points
of the model, and ``denoise.hook_logits``; under guidance, hooks see the conditional rows.

Limitation: interventions that need an earlier step or a sampler's decision are refused. `refuse_earlier` names what to
use instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.errors import HookNameError, PromptError, SettingError
from sinklens.experiments.nll.plans import planned
from sinklens.hooks import names
from sinklens.hooks.attention.blocks import Blocks, ruled_by
from sinklens.hooks.forward_pass import ForwardPass
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
from sinklens.sampling.state import State

PASSED = ("denoise.hook_canvas", "denoise.hook_logits")
INSTEAD = (
    "pass same_step=True for the keys of the pass itself, where= a state, token kind or array, positions=, or "
    "source= with same_step=True"
)


@dataclass(frozen=True)
class MaskedRows:
    """Rows of prompts and answers of equal length.

    Attributes:
        prompts: left-padded.
        real: False on padding of the prompts.
        answers: with masks, or other noise.
        masked: tokens of the answers whose loss counts.
        levels: what the network reads of the time; None if it reads none.
    """

    prompts: Int[Tensor, "row prompt"]
    real: Bool[Tensor, "row prompt"]
    answers: Int[Tensor, "row pos"]
    masked: Bool[Tensor, "row pos"]
    levels: Float[Tensor, " row"] | None = None


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

    @torch.no_grad()
    def logits(self, given: MaskedRows) -> Float[Tensor, "masked vocab"]:
        """Logits, in float32, of the masked tokens, row by row.

        Raises:
            SettingError: an intervention changed which tokens of the answer are masked.
            PromptError: interventions made the text longer than the context.
        """
        prompts, real, appended = self._extended(given)
        hooks = [planned(entry, prompts, real, given.masked) for entry in self.hooks]
        answer = slice(prompts.shape[1], prompts.shape[1] + given.answers.shape[1])
        beyond = torch.zeros_like(appended, dtype=torch.bool)
        canvas = torch.cat([prompts, given.answers, appended], dim=1)
        real = torch.cat([real, torch.ones_like(given.masked), ~beyond], dim=1)
        where = torch.cat([torch.zeros_like(prompts, dtype=torch.bool), given.masked, beyond], dim=1)
        self._check_length(int(real.sum(dim=1).max()))
        state = self._state(canvas, real, prompts.shape[1], where)
        with self._hooked(hooks, state), self._ruled():
            if given.levels is not None:
                state.time = given.levels.to(canvas.device)
            seen = state.begin_step()
            if not torch.equal(seen[:, answer], given.answers):
                raise SettingError(
                    "an intervention changed answer tokens of a likelihood, whose masks are drawn; restrict it to the "
                    "prompt, or change activations."
                )
            return state.logits(seen, where, self.cfg_scale)

    def _check_length(self, positions: int) -> None:
        if positions > self.model.cfg.n_ctx:
            raise PromptError(
                f"with the tokens that interventions add, a pass would need {positions} positions; {self.model.name} "
                f"has {self.model.cfg.n_ctx}. Shorten the prompt."
            )

    def _extended(self, given: MaskedRows) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, which are real, and what follows the answers, as interventions and blocks need them."""
        prompts, real, appended = given.prompts, given.real, given.prompts[:, :0]
        for entry in self.hooks:
            if isinstance(entry, HookSource):
                prompts, real, more = entry.extend(self.model, prompts, real)
                appended = torch.cat([appended, more], dim=1)
        blocks = blocks_of_text(self.model)
        if blocks is not None and blocks.start == "column":
            lead = (-prompts.shape[1] % blocks.length, 0)
            prompts, real = pad(prompts, lead, value=self.model.reader.pad), pad(real, lead, value=False)
        return prompts, real, appended

    def _ruled(self) -> AbstractContextManager[None]:
        """The attention rule of the pass, where it is not that of the config."""
        blocks = blocks_of_text(self.model)
        if blocks is None or blocks == self.model.checkpoint.blocks:
            return nullcontext()
        return ruled_by(self.model.tree.hf.config, blocks)

    def _state(self, canvas: Tensor, real: Tensor, prompt_length: int, counted: Tensor) -> State:
        model, mask_id = self.model, self.model.mask_token_id
        return State(
            tree=model.tree, canvas=canvas, real=real, prompt_length=prompt_length, eos_ids=model.eos_token_ids,
            eot_id=None, noise=RowNoise(self.seed, []), shift=model.family_record.shift,
            mask_id=-1 if mask_id is None else mask_id, undecided=counted if mask_id is None else None,
        )  # fmt: skip

    def _context(self, state: State) -> RunContext:
        """The context of the one step; random keys of a row depend on its canvas."""
        rows = zip(state.canvas, state.real, strict=True)
        return RunContext(
            tree=self.model.tree,
            real=state.real,
            prompt_length=state.prompt_length,
            steps=1,
            mask_id=state.mask_id,
            seed=self.seed,
            row_keys=tuple(row_key(row[keep].tolist()) for row, keep in rows),
            vocabulary=self._texts,
            special=self.model.special_tokens,
            controls=self.controls,
        )

    def _texts(self, tokens: Sequence[int]) -> dict[int, str]:
        tokenizer = self.model.tokenizer
        return {} if tokenizer is None else {token: str(tokenizer.decode([token])) for token in tokens if token >= 0}

    @contextmanager
    def _hooked(self, hooks: Sequence[Any], state: State) -> Iterator[None]:
        tree = self.model.tree
        try:
            state.announce(0)
            with (
                all_applied(hooks, self.model),
                attached(tree, self._pairs(hooks, state), len(state.canvas), self.cfg_scale > 0),
            ):
                yield
        finally:
            tree.watch.forward_pass = ForwardPass()

    def _pairs(self, hooks: Sequence[Any], state: State) -> list[tuple[str, HookFunction]]:
        """The (point, function) pairs of one pass.

        Raises:
            HookNameError: an entry is neither an intervention nor a pair, or names no point.
            SettingError: it acts at a point that the pass does not reach.
        """
        model, found = self.model, []
        for entry in hooks:
            if isinstance(entry, HookSource):
                pairs = entry.hooks_for(model, self._context(state))
            elif isinstance(entry, tuple) and len(entry) == 2 and callable(entry[1]) and takes_hook(entry[1]):
                pairs = [(name, entry[1]) for name in names.select(entry[0], model.hook_names(), model.cfg.n_layers)]
            else:
                raise HookNameError(f"{HOOKS}; got {entry!r}.")
            for name, _ in pairs:
                if name.startswith("denoise.") and name not in PASSED:
                    raise SettingError(
                        f"{_named(entry)} acts at {name}, but a likelihood decides no token, so its passes do not "
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


def refuse_earlier(hooks: Sequence[Any], model: Model, only_masks: bool = True) -> None:
    """Refuse interventions that need a step before the pass, or complete passes where a model has none.

    Args:
        only_masks: whether masks are the noise of an answer, so that their number finds the step of a recorded run.

    Raises:
        SettingError: naming what to use instead.
    """
    for entry in hooks:
        refuse_off_canvas(entry, model)
        rule = entry.rule if isinstance(entry, AtPositions) else None
        wheres = [leaf for leaf in ([] if rule is None else rule.leaves()) if isinstance(leaf, Where)]
        if any(not leaf.same_step for leaf in wheres):
            raise SettingError(
                f"{_named(entry)} acts on the sinks of the previous step, and a likelihood is one pass without one: "
                f"{INSTEAD}."
            )
        if not only_masks and any(leaf.track is not None for leaf in wheres):
            raise SettingError(
                f"{_named(entry)} takes the sinks of a recorded run, whose step is found by the number of masks, and "
                f"{model.family} models add random tokens; pass same_step=True without source=."
            )
        if isinstance(entry, Hold):
            raise SettingError(
                f"{_named(entry)} repeats attention of an earlier step, and a likelihood is one pass without one; use "
                f"it in sinklens.generate."
            )


def _named(entry: Any) -> str:
    return type(entry).__name__ if isinstance(entry, HookSource) else f"a hook function at {entry[0]!r}"
