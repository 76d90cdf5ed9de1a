"""A sinklens model, with interventions, under EleutherAI's lm-evaluation-harness (`lm_eval`).

    lm_eval.simple_evaluate(SinklensLM("tiny-llada", MaskSinks(top_k=1)), tasks=["gsm8k"])
    python -m sinklens.evaluation.harness --model sinklens --model_args pretrained=tiny-llada,mask_sinks=1 --tasks gsm8k

The harness has no plugins, so the command line is its own, called after the model is registered. It asks, cuts at the
task's stop texts and judges; here prompts are encoded and answers generated. Tasks that generate are served. Those that
score given answers by likelihood are refused: a diffusion model gives no likelihood of a text, only bounds that depend
on how they are sampled.

Settings of the sampler come from, in this order: the model's arguments, the task (``max_gen_toks`` is `gen_length`),
the checkpoint, the sampler.

One way this fails: the harness's response cache (``use_cache``) knows a prompt and not what was done to the model, so a
masked run would be served the unmasked run's answers. It is refused. Its cache of built prompts (``cache_requests``)
holds no answers and does no harm.

Source: https://github.com/EleutherAI/lm-evaluation-harness, version 0.4.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

from sinklens.errors import PromptError, SettingError, SinklensError
from sinklens.interventions import Intervention, MaskSinks
from sinklens.interventions.masking import Reach
from sinklens.interventions.selection import Pick, Scope
from sinklens.model import load
from sinklens.sampling import settings_for
from sinklens.tasks.base import cut
from sinklens.tracing import generate

try:
    import lm_eval.models  # noqa: F401  its own list, which it would not read any more once ours is registered
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise SettingError(f"this needs lm-evaluation-harness ({error}): pip install 'sinklens[lm-eval]'.") from error

LENGTHS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # one thing; the first that is given
RANDOMNESS = ("temperature", "top_p", "top_k")  # they mean nothing where a task says do_sample: false


class NotServed(SinklensError, NotImplementedError):
    """The harness asked for something that a diffusion model does not have."""


@register_model("sinklens")
class SinklensLM(LM):
    """A model that the harness can evaluate.

    Args:
        pretrained: what `sinklens.load` takes.
        hooks: as in `sinklens.generate`, in every run.
        mask_sinks: short for ``hooks=MaskSinks(top_k=mask_sinks)``, for the command line; 0 masks nothing.
        mask_pick, mask_scope, mask_queries: `pick`, `scope` and `queries` of that `MaskSinks`.
        batch_size: prompts per run; answers do not depend on it.
        seed: of sampling, and of random keys of `mask_sinks`. Repeats of one request have seed, seed + 1, ….
        revision, dtype, device: of `sinklens.load`; "cuda:0", which the command line names by itself, is none where
            there is no GPU.
        settings: of the sampler; they win over the task's.

    Raises:
        SettingError: hooks twice, a batch size that is no number, or a setting that the model's sampler does not have.
    """

    def __init__(
        self,
        pretrained: Any,
        hooks: Any = (),
        *,
        mask_sinks: int | None = None,
        mask_pick: Pick = "strongest",
        mask_scope: Scope = "head",
        mask_queries: Reach = "newest",
        batch_size: int | str = 8,
        seed: int = 0,
        revision: str | None = None,
        dtype: Any = "auto",
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise SettingError(f"batch_size is a number of at least 1 (there is no automatic one); got {batch_size!r}.")
        self.hooks = [hooks] if isinstance(hooks, Intervention) else list(hooks)
        if mask_sinks is not None and self.hooks:
            raise SettingError(f"give hooks or mask_sinks, not both; got {self.hooks} and {mask_sinks}.")
        if mask_sinks:
            self.hooks = [
                MaskSinks(top_k=mask_sinks, pick=mask_pick, scope=mask_scope, queries=mask_queries, seed=seed)
            ]
        given: dict[str, Any] = {
            "revision": revision,
            "device": _there(device),
            "dtype": None if dtype == "auto" else dtype,
        }
        self.model = load(pretrained, **{name: value for name, value in given.items() if value is not None})
        self.batch_size, self.seed, self.settings = int(batch_size), seed, settings
        self._device = self.model.cfg.device
        self._settings({})

    @property
    def tokenizer(self) -> Any:
        """The model's; the harness writes about it into its results.

        Raises:
            PromptError: it has none.
        """
        if self.model.tokenizer is None:
            raise PromptError(f"{self.model.name} came without a tokenizer, and the harness asks in text.")
        return self.model.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Tells apart prompts that were built with another chat template."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template in use, for the results; "" where there is none."""
        return str(self.tokenizer.chat_template or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Turns as the text of a prompt, through the tokenizer's own template.

        Raises:
            PromptError: it has none.
        """
        if self.tokenizer.chat_template is None:
            raise PromptError(f"the tokenizer of {self.model.name} has no chat template; leave --apply_chat_template.")
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def encode(self, text: str) -> list[int]:
        """Token ids as the harness has them: `Model.encode`, but no second start token before a text that has one."""
        start = self.tokenizer.bos_token
        if not (start and text.startswith(start)):
            return self.model.encode(text)[0][0].tolist()
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers to (prompt, settings) requests, each up to the first of its stop texts.

        Raises:
            SettingError: a task wants what the model's sampler does not have.
            PromptError: a prompt does not fit the model.
        """
        from tqdm import tqdm

        answers: list[str] = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for seed, asked, places in self._batches(requests):
                prompts = [self.encode(requests[place].args[0]) for place in places]
                run = generate(
                    self.model, prompts, hooks=self.hooks, seed=seed, record_sinks=False, progress=False,
                    **self._settings(asked),
                )  # fmt: skip
                for place, answer in zip(places, run.answers, strict=True):
                    answers[place] = cut(answer.text or "", _stops(asked))
                bar.update(len(places))
        return answers

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refused, see above."""
        raise NotServed(
            "only tasks that generate (output_type: generate_until) are served; this one compares likelihoods of given "
            "answers, which a diffusion model does not have. Take a generating variant, e.g. gsm8k or humaneval; for "
            "an autoregressive model the harness's own --model hf."
        )

    def loglikelihood_rolling(self, requests: list[Instance]) -> NoReturn:
        """Refused, see above."""
        self.loglikelihood(requests)

    def set_cache_hook(self, cache_hook: Any) -> NoReturn:
        """Refused: what the harness calls when it is to cache responses."""
        raise SettingError(
            "the harness's response cache (use_cache) finds an answer by its prompt alone and does not know the "
            "intervention, so one run would be served another's answers; leave use_cache away. cache_requests, the "
            "cache of built prompts, may stay. To go on after a kill, use `sinklens evaluate`."
        )

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results: the model, its weights, and what was done to it."""
        return {
            "sinklens_model": self.model.name,
            "family": self.model.family,
            "revision": self.model.checkpoint.revision or "",
            "weights": self.model.fingerprint,
            "dtype": str(self.model.cfg.dtype).removeprefix("torch."),
            "hooks": [repr(hook) for hook in self.hooks],
            "settings": asdict(settings_for(self.model, self.settings)),
            "seed": self.seed,
        }

    def _settings(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The model's arguments, and what a task asks for beside them."""
        wanted = {name: value for name, value in asked.items() if name not in ("until", "do_sample", *LENGTHS)}
        if not asked.get("do_sample", asked.get("temperature")):
            wanted = {name: value for name, value in wanted.items() if name not in RANDOMNESS}
            wanted |= {"temperature": 0.0} if asked.keys() & {"do_sample", "temperature"} else {}
        length = next((asked[name] for name in LENGTHS if asked.get(name) is not None), None)
        wanted |= {} if length is None else {"gen_length": int(length)}
        chosen = wanted | self.settings
        try:
            settings_for(self.model, chosen)
        except SettingError as error:
            if not wanted:
                raise
            raise SettingError(
                f"{error} The task asks for {wanted}; what is given with the model (model_args) wins over it."
            ) from error
        return chosen

    def _batches(self, requests: Sequence[Instance]) -> Iterator[tuple[int, dict[str, Any], list[int]]]:
        """Seed, settings and places in `requests` of prompts that run together."""
        groups: dict[tuple[int, str], list[int]] = {}
        repeats: dict[int, int] = {}  # the harness repeats a request as the same object
        for place, request in enumerate(requests):
            repeat = repeats[id(request)] = repeats.get(id(request), -1) + 1
            groups.setdefault((repeat, json.dumps(request.args[1], sort_keys=True)), []).append(place)
        for (repeat, asked), places in groups.items():
            ordered = sorted(places, key=lambda place: len(requests[place].args[0]))
            for start in range(0, len(ordered), self.batch_size):
                yield self.seed + repeat, json.loads(asked), ordered[start : start + self.batch_size]


def _stops(asked: Mapping[str, Any]) -> list[str]:
    """Texts that end an answer."""
    until = asked.get("until") or []
    return [text for text in ([until] if isinstance(until, str) else until) if text]


def _there(device: str | None) -> str | None:
    """`device`, but None where it is the GPU that the harness's command line names by default and there is none."""
    import torch

    return None if device == "cuda:0" and not torch.cuda.is_available() else device


def main() -> None:
    """The harness's command line, with ``--model sinklens``."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except SinklensError as error:
        raise SystemExit(f"sinklens: {error}") from None


if __name__ == "__main__":
    main()
