"""`likelihood`: log p of an answer given its prompt, or a bound of it, under hooks or without.

Autoregressive models give it exactly. Masked diffusion models give a lower bound, estimated from random masks of the
answer (draws.py) or computed from all of them. MDLM, BD3-LM, SEDD, Duo and GIDD give their published bounds, estimated
from random times and noise (noise.py). DiffusionGemma gives neither: its canvas holds random tokens, its passes are
conditioned on the logits of the step before, and no procedure has been published.

Pitfall: a pass over a masked answer has no previous step. Interventions that need one are refused, because they would
fail silently.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sinklens.errors import SettingError
from sinklens.experiments.nll.autoregressive import score_exactly, score_forced
from sinklens.experiments.nll.batches import Batches
from sinklens.experiments.nll.diffusion import bounds
from sinklens.experiments.nll.draws import DrawRule, Masking
from sinklens.experiments.nll.greedy import writes
from sinklens.experiments.nll.hooked_pass import HookedPass, refuse_earlier
from sinklens.experiments.nll.noise import noise_of
from sinklens.experiments.nll.pairs import PromptAnswer, is_several, pairs_of
from sinklens.experiments.nll.result import Likelihood
from sinklens.model import Model
from sinklens.model.prompts import Prompt
from sinklens.runs.control_keys import ControlLog
from sinklens.runs.request import Hooks, hook_list
from sinklens.sampling import Policy
from sinklens.sampling.policies import as_policy
from sinklens.utils.arguments import Count, NonNegative, check_arguments


@dataclass(frozen=True, kw_only=True)
class LikelihoodRequest:
    """How likelihoods are computed.

    Attributes:
        rule: which masks are drawn, in a diffusion model.
        cfg_scale: strength of classifier-free guidance; 0 for none.
        hooks: (name or predicate, function) pairs and interventions.
        rows: most rows in a pass; None for as many as have 16,384 positions.

    Raises:
        SettingError: a value is out of range.
    """

    rule: DrawRule = field(default_factory=DrawRule)
    cfg_scale: NonNegative = 0.0
    hooks: Hooks = ()
    rows: Count | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        object.__setattr__(self, "hooks", tuple(hook_list(self.hooks)))


def likelihood(
    model: Model,
    prompt: Prompt,
    answer: Prompt,
    *,
    hooks: Hooks = (),
    mc_num: int = 128,
    batch: int = 16,
    masking: Masking = "count",
    exact: bool = False,
    cfg_scale: float = 0.0,
    seed: int = 0,
    chat_template: bool | str = False,
    rows: int | None = None,
    cache: Policy | str | None = None,
) -> Likelihood | list[Likelihood]:
    """Log-likelihood of an answer, or a lower bound of it, in nats, with its standard error.

        model.likelihood("Question: ...\\nAnswer:", " 7")                             # one answer
        model.likelihood(question, [" 7", " 8"], hooks=MaskSinks(top_k=1, same_step=True))    # choices

    Args:
        prompt: text or token ids; several need as many answers.
        answer: text or token ids; several answers may share one prompt.
        hooks: as in `sinklens.generate`. In a diffusion model they act in each pass, which is step 0 of a run of one
            step; in an autoregressive model, in a run that is forced to write the answer.
        mc_num, batch, masking, exact, seed: which masks; see `DrawRule`. Autoregressive models ignore all but `seed`.
        cfg_scale: classifier-free guidance, as in LLaDA's sampler: the prompt is masked in the unconditional rows.
        chat_template: as in `sinklens.generate`, for text prompts.
        rows: most rows in a pass; by default as many as have 16,384 positions, and fewer once memory runs out.
        cache: not available, since a cache policy reuses keys of earlier steps; None or "none".

    Returns:
        The result for one answer, or one for each.

    Raises:
        PromptError: a prompt or answer is empty, too long, or contains the mask token.
        SettingError: a setting is out of range; the model has no likelihood; an intervention needs an earlier step.
        DeviceMemoryError: a single row does not fit into memory.
    """
    refuse_cache(cache)
    request = LikelihoodRequest(
        rule=DrawRule(mc_num, batch, masking, exact, seed), cfg_scale=cfg_scale, hooks=hooks, rows=rows
    )
    found = likelihoods(model, pairs_of(model, prompt, answer, chat_template), request)
    return found if is_several(prompt) or is_several(answer) else found[0]


def refuse_cache(cache: Policy | str | None) -> None:
    """Refuse a cache policy.

    Raises:
        SettingError: there is one.
    """
    policy = as_policy(cache)
    if policy is not None:
        raise SettingError(
            f"{policy!r} reuses keys of earlier steps, and a likelihood is one pass without any; leave cache= out, or "
            f"measure the policy on answers that are generated, with sinklens evaluate --cache."
        )


@dataclass(frozen=True)
class ScoredAnswers:
    """Likelihoods of some pairs.

    Attributes:
        likelihoods: one for each pair.
        greedy: whether greedy decoding writes the answer; None if not asked, in a diffusion model.
    """

    likelihoods: list[Likelihood]
    greedy: list[bool] | None


def likelihoods(model: Model, pairs: Sequence[PromptAnswer], request: LikelihoodRequest) -> list[Likelihood]:
    """The likelihood of each pair; see `likelihood`."""
    return scores(model, pairs, request, Batches(request.rows)).likelihoods


def scores(
    model: Model, pairs: Sequence[PromptAnswer], request: LikelihoodRequest, batches: Batches, greedy: bool = False
) -> ScoredAnswers:
    """The likelihood of each pair, and whether greedy decoding writes the answer; see `likelihood`."""
    model.tree.refuse_unusable()
    hooks = tuple(hook_list(request.hooks))
    if model.causal:
        if request.cfg_scale:
            raise SettingError(
                f"{model.name} is autoregressive and has no mask token to guide with; leave cfg_scale out."
            )
        seed = request.rule.seed
        scored = score_forced(model, pairs, hooks, seed, batches) if hooks else score_exactly(model, pairs, batches)
        return ScoredAnswers([scored.result(number, pair) for number, pair in enumerate(pairs)], scored.greedy)
    if model.tree.changes_attention:
        raise SettingError(
            f"{model.name} has one likelihood for each of its modes, and none of them is estimated here. Its logits in "
            f"a mode are those of model(ids, mode=...)."
        )
    noise = noise_of(model)
    if model.tree.architecture.time and (request.cfg_scale or greedy):
        raise SettingError(
            f"{'cfg_scale' if request.cfg_scale else 'check_greedy'} is for models without a noise schedule; no such "
            f"procedure is published for {model.family} models. Leave it out."
        )
    refuse_earlier(hooks, model, noise.only_masks)
    passes = HookedPass(model, hooks, request.cfg_scale, request.rule.seed, ControlLog())
    found = bounds(passes, noise, pairs, request.rule, batches)
    passes.controls.report()
    return ScoredAnswers(found, writes(passes, pairs, batches) if greedy else None)
