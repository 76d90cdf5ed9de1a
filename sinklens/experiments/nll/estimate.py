"""`likelihood`: log p of an answer given its prompt, or a bound on it, with or without hooks.

For autoregressive models it is exact. Masked diffusion models give a lower bound, estimated from random masks of the
answer or computed from all of them. MDLM, BD3-LM, SEDD, Duo and GIDD give their published bounds, estimated from random
times and noise (noise.py). DiffusionGemma gives neither: its canvas holds random tokens, its passes are conditioned on
the logits of the step before, and no procedure has been published.

A text pair is tokenized together and then divided, as in lm-evaluation-harness: spaces at the end of the prompt belong
to the answer. The prompt keeps the number of tokens that it has alone; the rest are the answer's. If prompt and answer
share a token, the division falls before or after it, and the prompt differs from the one that a run would get.

Pitfall: a pass over a masked answer has no previous step. Interventions that need one are refused, because they would
fail silently.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sinklens.errors import PromptError, require
from sinklens.experiments.nll.autoregressive import score_exactly, score_forced
from sinklens.experiments.nll.diffusion import bounds
from sinklens.experiments.nll.hooked_pass import HookedPass, refuse_earlier
from sinklens.experiments.nll.noise import DrawRule, Masking, noise_of
from sinklens.experiments.nll.result import Likelihood, PromptAnswer
from sinklens.hooks.turn import in_turn
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs.control_keys import ControlLog
from sinklens.runs.request import Hooks, hook_list
from sinklens.sampling import Policy
from sinklens.sampling.policies import as_policy
from sinklens.utils.arguments import Count, NonNegative, Seed, checked


@checked
def likelihood(
    model: Model,
    prompts: Prompt,
    answers: Prompt,
    *,
    hooks: Hooks = (),
    mc_num: int = 128,
    draws_per_start: int = 16,
    masking: Masking = "count",
    exact: bool = False,
    cfg_scale: float = 0.0,
    seed: Seed = 0,
    chat_template: bool | str = False,
    batch_size: int | None = None,
    cache: Policy | str | None = None,
) -> Likelihood | list[Likelihood]:
    """Log-likelihood of an answer, or a lower bound on it, in nats, with its standard error.

        model.likelihood("Question: ...\\nAnswer:", " 7")                             # one answer
        model.likelihood(question, [" 7", " 8"], hooks=MaskSinks(top_k=1, same_step=True))    # choices

    Args:
        prompts: text or token ids; several need as many answers.
        answers: text or token ids; several answers may share one prompt.
        hooks: as in `sinklens.generate`. In a diffusion model they act in each pass, which is step 0 of a run of one
            step; in an autoregressive model, in a run that is forced to write the answer.
        mc_num, draws_per_start, masking, exact, seed: which masks; see `DrawRule`. Autoregressive models ignore
            all but `seed`.
        cfg_scale: classifier-free guidance, as in LLaDA's sampler: the prompt is masked in the unconditional rows.
        chat_template: as in `sinklens.generate`, for text prompts.
        batch_size: largest number of rows in a pass; by default as many as make 16,384 positions, fewer once memory
            runs out.
        cache: not available, since a cache policy reuses keys of earlier steps; None or "none".

    Returns:
        One result, or one for each of several answers.

    Raises:
        PromptError: a prompt or answer is empty, too long, or contains the mask token.
        SettingError: a setting is out of range; the model has no likelihood; an intervention needs an earlier step.
        DeviceMemoryError: a single row does not fit into memory.
    """
    refuse_cache(cache)
    rule, pairs = (
        DrawRule(mc_num, draws_per_start, masking, exact, seed),
        pairs_of(model, prompts, answers, chat_template),
    )
    found = likelihoods(model, pairs, rule, hooks=hooks, cfg_scale=cfg_scale, batch_size=batch_size)
    return found if is_several(prompts) or is_several(answers) else found[0]


def refuse_cache(cache: Policy | str | None) -> None:
    """Refuse a cache policy.

    Raises:
        SettingError: there is one.
    """
    policy = as_policy(cache)
    require(
        policy is None,
        f"{policy!r} reuses keys of earlier steps, and a likelihood is one pass without any; leave cache= out, or "
        f"measure the policy on answers that are generated, with sinklens evaluate --cache.",
    )


@checked
@in_turn
def likelihoods(
    model: Model,
    pairs: Sequence[PromptAnswer],
    rule: DrawRule,
    *,
    hooks: Hooks = (),
    cfg_scale: NonNegative = 0.0,
    batch_size: Count | None = None,
) -> list[Likelihood]:
    """The likelihood of each pair; see `likelihood`."""
    model.tree.refuse_unusable()
    entries = tuple(hook_list(hooks))
    if model.causal:
        require(
            not cfg_scale, f"{model.name} is autoregressive and has no mask token to guide with; leave cfg_scale out."
        )
        if entries:
            return score_forced(model, pairs, entries, rule.seed, batch_size)
        return score_exactly(model, pairs, batch_size)
    require(
        not model.tree.changes_attention,
        f"{model.name} has one likelihood for each of its modes, and none of them is estimated here. Its logits in "
        f"a mode are those of model(ids, mode=...).",
    )
    noise = noise_of(model)
    require(
        not model.tree.architecture.time or not cfg_scale,
        f"cfg_scale is for models without a noise schedule; no such procedure is published for {model.family} "
        f"models. Leave it out.",
    )
    refuse_earlier(entries, model)
    passes = HookedPass(model, entries, cfg_scale, rule.seed, ControlLog())
    found = bounds(passes, noise, pairs, rule, batch_size)
    passes.controls.report()
    return found


def divided(prompt: str, answer: str, encode: Callable[[str], list[int]]) -> PromptAnswer:
    """The pair of two texts, tokenized together by `encode`; the prompt is not empty."""
    if spaces := len(prompt) - len(prompt.rstrip()):
        prompt, answer = prompt[:-spaces], prompt[-spaces:] + answer
    before = encode(prompt)
    return PromptAnswer(tuple(before), tuple(encode(prompt + answer)[len(before) :]))


def pairs_of(model: Model, prompts: Any, answers: Any, chat_template: bool | str) -> list[PromptAnswer]:
    """The pairs of a prompt and an answer, of lists of both, or of one prompt and several answers.

    Raises:
        PromptError: one is empty, invalid or too long, contains the mask token, or the lists differ in length.
    """
    answers = list(answers) if is_several(answers) else [answers]
    prompts = list(prompts) if is_several(prompts) else [prompts] * len(answers)
    require(
        len(prompts) == len(answers),
        f"got {len(prompts)} prompts and {len(answers)} answers; give one answer for each prompt, or one prompt.",
        PromptError,
    )
    found = [_pair(model, *texts, chat_template) for texts in zip(prompts, answers, strict=True)]
    for number, pair in enumerate(found):
        check_pair(model, pair, number)
    return found


def is_several(given: Any) -> bool:
    """Whether `given` is a list of texts or of rows of ids, rather than one text or one row.

    Raises:
        PromptError: it is something else.
    """
    require(
        isinstance(given, str | Sequence | Tensor | np.ndarray),
        f"prompts and answers are texts, token ids or lists of these; got {given!r:.60}.",
        PromptError,
    )
    if isinstance(given, Tensor | np.ndarray):
        return given.ndim > 1
    return not isinstance(given, str) and len(given) > 0 and not isinstance(given[0], int | np.integer)


def _pair(model: Model, prompt: Any, answer: Any, chat_template: bool | str) -> PromptAnswer:
    if isinstance(prompt, str) and isinstance(answer, str) and chat_template is False and prompt.strip():
        return divided(prompt, answer, lambda text: _ids(model, text))
    before = _ids(model, prompt, chat_template) if len(prompt) else []
    return PromptAnswer(tuple(before), tuple(_ids(model, answer, prepend_bos=False)))


def _ids(model: Model, given: Any, chat_template: bool | str = False, prepend_bos: bool | None = None) -> list[int]:
    """Ids of one text, or of one row of ids."""
    if not isinstance(given, str):
        chat_template, prepend_bos = False, None
    elif chat_template is not False:
        prepend_bos = None
    return model.reader.read(given, chat_template, prepend_bos).ids[0].tolist() if len(given) else []


def check_pair(model: Model, pair: PromptAnswer, number: int) -> None:
    """Refuse a pair that has no likelihood.

    Raises:
        PromptError: see `pairs_of`.
    """
    require(
        pair.answer, f"answer {number} is empty; a likelihood needs at least one token after the prompt.", PromptError
    )
    require(
        not model.causal or pair.prompt,
        f"prompt {number} is empty, and {model.name} is autoregressive: its first token needs one before it. Pass "
        f"a start token as the prompt.",
        PromptError,
    )
    require(
        model.mask_is_text or model.mask_token_id not in (*pair.prompt, *pair.answer),
        f"pair {number} contains the mask token ({model.mask_token_id}); pass the text without masks, which a "
        f"likelihood draws itself.",
        PromptError,
    )
    length = len(pair.prompt) + len(pair.answer)
    require(
        length <= longest(model),
        f"pair {number} has {length} tokens, and {model.name} takes at most {longest(model)}. Shorten the prompt.",
        PromptError,
    )


def longest(model: Model) -> int:
    """The most tokens that a pair may have; an autoregressive model does not read the last one."""
    return model.cfg.n_ctx + model.causal
