"""Evaluate a sinklens model, with interventions, in EleutherAI's lm-evaluation-harness (`lm_eval`).

    lm_eval.simple_evaluate(SinklensLM("tiny-llada", MaskSinks(top_k=1)), tasks=["gsm8k"])
    sinklens lm-eval --model sinklens --model_args pretrained=tiny-llada,mask_sinks=1 --tasks gsm8k

The harness has no plugin mechanism, so the second command registers the model and then calls the harness's own command
line. The harness builds prompts and judges answers; this module encodes the prompts, generates the answers and cuts
them at the task's stop texts. Tasks that score given answers get likelihoods (sinklens/experiments/nll), which are
exact for an autoregressive model; for a masked diffusion model they are bounds, estimated as in LLaDA's evaluation
script.

Sampler settings come from, in order of precedence: the model's arguments, the task
(``max_gen_toks`` is `gen_length`), the checkpoint, the sampler's defaults.

Known failure: the harness's response cache (``use_cache``) is keyed by the prompt but not by the intervention, so a
masked run would be served the unmasked run's answers. It is refused. The cache of built prompts (``cache_requests``)
holds no answers and is harmless.

Source: https://github.com/EleutherAI/lm-evaluation-harness, version 0.4.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from sinklens.errors import PromptError, SettingError, require
from sinklens.experiments.nll.estimate import check_pair, likelihoods, longest, refuse_cache
from sinklens.experiments.nll.noise import DrawRule, Masking
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.families.samplers import settings_for
from sinklens.interventions import MaskSinks
from sinklens.interventions.controls import Pick
from sinklens.interventions.places import Reach
from sinklens.model import load
from sinklens.model.templates import render
from sinklens.runs import generate
from sinklens.runs.policies import check_policy
from sinklens.runs.request import hook_list
from sinklens.sampling import Policy
from sinklens.sampling.policies import as_policy
from sinklens.tasks.base import cut
from sinklens.utils.arguments import Seed, as_tuple, read_as

try:
    import lm_eval.models  # noqa: F401  the harness's own models, which it no longer loads once ours is registered
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise SettingError(f"this needs lm-evaluation-harness ({error}): pip install 'sinklens[lm-eval]'.") from error

LENGTHS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # synonyms; the first one given counts
AT_ONCE = 64  # requests whose losses are in memory together
RANDOMNESS = ("temperature", "top_p", "top_k")  # ignored if a task sets do_sample: false


@register_model("sinklens")
class SinklensLM(TemplateLM):
    """A model that the harness can evaluate.

    Args:
        pretrained: what `sinklens.load` takes.
        hooks: as in `sinklens.generate`; applied in every run.
        mask_sinks: short for ``hooks=MaskSinks(top_k=mask_sinks)``, for the command line; 0 masks nothing.
        mask_pick, mask_queries, mask_same_step: `pick`, `queries` and `same_step` of that
            `MaskSinks`. Likelihoods of diffusion models need ``mask_same_step=True``.
        batch_size: prompts per run; answers do not depend on it. Likelihoods find the rows of a pass by themselves.
        seed: for sampling, and for the random keys of `mask_sinks`. Repeats of a request use seed, seed + 1, ….
        cache: a cache policy or its name, such as "dual" or "keep-sinks:4"; None computes every position. It is not
            the harness's response cache.
        mc_num, mc_batch, mc_masking: `mc_num`, `draws_per_start` and `masking` of the likelihood of a diffusion
            model; see `sinklens.experiments.nll.noise.DrawRule`. Its guidance is the setting ``cfg_scale``.
        revision, dtype, device: as in `sinklens.load`. "cuda:0", the default of the harness's command line, is
            ignored on a machine without a GPU.
        settings: sampler settings; they override the task's.

    Raises:
        SettingError: both `hooks` and `mask_sinks` are given, `batch_size` is not a number, the model's sampler does
            not have a setting, or `cache` is not a policy that the model can run under.
    """

    def __init__(
        self,
        pretrained: Any,
        hooks: Any = (),
        *,
        mask_sinks: int | None = None,
        mask_pick: Pick = "strongest",
        mask_queries: Reach = "newest",
        mask_same_step: bool = False,
        batch_size: int | str = 8,
        seed: int = 0,
        cache: Policy | str | None = None,
        mc_num: int = 128,
        mc_batch: int = 16,
        mc_masking: Masking = "count",
        revision: str | None = None,
        dtype: Any = "auto",
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.seed = read_as(Seed, "seed", seed)  # before the model is loaded
        require(
            str(batch_size).isdigit() and int(batch_size) >= 1,
            f"batch_size must be a number of at least 1, and not 'auto'; got {batch_size!r}.",
        )
        self.batch_size, self.settings = int(batch_size), settings
        self.hooks = hook_list(hooks)
        require(
            mask_sinks is None or not self.hooks,
            f"give hooks or mask_sinks, not both; got {self.hooks} and {mask_sinks}.",
        )
        if mask_sinks:
            self.hooks = [
                MaskSinks(
                    top_k=mask_sinks, pick=mask_pick, queries=mask_queries, seed=seed,
                    same_step=mask_same_step,
                )
            ]  # fmt: skip
        self.rule = DrawRule(mc_num, mc_batch, mc_masking, seed=self.seed)
        default = device == "cuda:0" and not torch.cuda.is_available()  # of the harness's command line
        loading: dict[str, Any] = {
            "revision": revision, "device": None if default else device, "dtype": None if dtype == "auto" else dtype,
        }  # fmt: skip
        self.model = load(pretrained, **{name: value for name, value in loading.items() if value is not None})
        self._device = self.model.cfg.device
        self.cache = as_policy(cache)
        self._settings({})
        if self.cache is not None:
            check_policy(self.model, settings_for(self.model, self.settings), self.cache)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, which the harness describes in its results.

        Raises:
            PromptError: the model has no tokenizer.
        """
        require(
            self.model.tokenizer is not None,
            f"{self.model.name} came without a tokenizer, and the harness sends text; pass a checkpoint with one.",
            PromptError,
        )
        return self.model.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """A name that distinguishes prompts built with different chat templates."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The chat template in use, for the results; "" without one."""
        return str(self.tokenizer.chat_template or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format chat turns as the text of a prompt, with the tokenizer's chat template.

        Raises:
            PromptError: the tokenizer has no chat template.
        """
        require(
            self.tokenizer.chat_template is not None,
            f"the tokenizer of {self.model.name} has no chat template; drop --apply_chat_template.",
            PromptError,
        )
        render(self.tokenizer, chat_history, None, f" of {self.model.name}", add_generation_prompt)  # has limits
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    @property
    def eot_token_id(self) -> int:
        """An end token."""
        return int(self.model.eos_token_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the start token, or else an end token."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Token ids from `Model.encode`; a text that begins with a start token gets no second one, as in the
        harness."""
        start = self.tokenizer.bos_token
        if add_special_tokens is False or (start and string.startswith(start)):
            return list(self.tokenizer(string, add_special_tokens=False).input_ids)
        return self.model.encode(string)[0][0].tolist()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to (prompt, settings) requests, each cut at the first of its stop texts.

        Raises:
            SettingError: a task needs a setting that the model's sampler does not have.
            PromptError: a prompt does not fit the model.
        """
        from tqdm import tqdm

        answers: list[str] = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for seed, request_settings, places in self._batches(requests):
                prompts = [self.tok_encode(requests[place].args[0]) for place in places]
                run = generate(
                    self.model, prompts, hooks=self.hooks, seed=seed, record_sinks=False, progress=False,
                    cache=self.cache, **self._settings(request_settings),
                )  # fmt: skip
                for place, answer in zip(places, run.answers, strict=True):
                    answers[place] = cut(answer.text or "", filter(None, as_tuple(request_settings.get("until") or ())))
                bar.update(len(places))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods or bounds of complete texts, split into windows as in the harness's own models.

        A window also sees the tokens before it that fit into the context; the bound of a text is the sum over its
        windows.
        """
        most = longest(self.model) - 1
        windows = [
            [
                PromptAnswer(tuple(before), tuple(after))
                for before, after in map(
                    make_disjoint_window,
                    get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, most, 1),
                )
            ]
            for request in requests
        ]
        found = iter(self._scored([pair for several in windows for pair in several], disable_tqdm))
        return [sum(next(found)[0] for _ in several) for several in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood or bound of each continuation, in nats, and whether greedy decoding writes it.

        A pair longer than the context of the model loses its first tokens, as in the harness's own models.

        Raises:
            PromptError: a continuation is empty or longer than the context.
            SettingError: the model has no likelihood, a hook needs an earlier step, or a cache policy is set.
        """
        most = longest(self.model)
        return self._scored(
            [PromptAnswer(tuple(before[-max(most - len(after), 1) :]), tuple(after)) for _, before, after in requests],
            disable_tqdm,
        )

    def _scored(self, pairs: Sequence[PromptAnswer], disable_tqdm: bool) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        refuse_cache(self.cache)
        for number, pair in enumerate(pairs):
            check_pair(self.model, pair, number)
        cfg_scale = float(self.settings.get("cfg_scale", 0.0))
        found = []
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for start in range(0, len(pairs), AT_ONCE):
                scored = likelihoods(
                    self.model, pairs[start : start + AT_ONCE], self.rule, hooks=self.hooks, cfg_scale=cfg_scale
                )
                found += [(one.value, one.greedy) for one in scored]
                bar.update(len(scored))
        return found

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:
        """Not supported: the harness calls this to cache responses."""
        raise SettingError(
            "the harness's response cache (use_cache) finds answers by the prompt alone and ignores the intervention, "
            "so one run would be served another's answers; drop use_cache. cache_requests, the cache of built prompts, "
            "is safe. To resume after an interruption, use `sinklens evaluate`."
        )

    def get_model_info(self) -> dict[str, Any]:
        """The model, its weights and its interventions, which the harness writes into its results."""
        return {
            "sinklens_model": self.model.name,
            "family": self.model.family,
            "revision": self.model.checkpoint.revision or "",
            "weights": self.model.fingerprint,
            "dtype": str(self.model.cfg.dtype).removeprefix("torch."),
            "hooks": [repr(hook) for hook in self.hooks],
            "cache": repr(self.cache) if self.cache else "",
            "settings": asdict(settings_for(self.model, self.settings)),
            "likelihood": asdict(self.rule),
            "seed": self.seed,
        }

    def _settings(self, requested: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that the harness's task requests, overridden by the model's arguments."""
        wanted = {name: value for name, value in requested.items() if name not in ("until", "do_sample", *LENGTHS)}
        if not requested.get("do_sample", requested.get("temperature")):
            wanted = {name: value for name, value in wanted.items() if name not in RANDOMNESS}
            wanted |= {"temperature": 0.0} if requested.keys() & {"do_sample", "temperature"} else {}
        length = next((requested[name] for name in LENGTHS if requested.get(name) is not None), None)
        wanted |= {} if length is None else {"gen_length": int(length)}
        chosen = wanted | self.settings
        try:
            settings_for(self.model, chosen)
        except SettingError as error:
            if not wanted:
                raise
            raise SettingError(
                f"{error} The task sets {wanted}; settings given with the model (model_args) override these."
            ) from error
        return chosen

    def _batches(self, requests: Sequence[Instance]) -> Iterator[tuple[int, dict[str, Any], list[int]]]:
        """The seed, the settings and the indices in `requests` of prompts that run together."""
        groups: dict[tuple[int, str], list[int]] = {}
        repeats: dict[int, int] = {}  # the harness repeats a request as the same object
        for place, request in enumerate(requests):
            repeat = repeats[id(request)] = repeats.get(id(request), -1) + 1
            groups.setdefault((repeat, json.dumps(request.args[1], sort_keys=True)), []).append(place)
        for (repeat, settings), places in groups.items():
            ordered = sorted(places, key=lambda place: len(requests[place].args[0]))
            for start in range(0, len(ordered), self.batch_size):
                yield self.seed + repeat, json.loads(settings), ordered[start : start + self.batch_size]
