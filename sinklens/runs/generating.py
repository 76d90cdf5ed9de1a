"""`Model.generate`: a run with the arguments and results of TransformerLens, or with nnsight's as a block.

A call returns the prompt with its answer, as text for a text and as ids for ids. As a block,
``with model.generate(prompt, max_new_tokens=8) as tracer:`` is the run that `sinklens.trace` opens, in which
``tracer.result`` is the ids. ``max_new_tokens`` is the setting ``gen_length``; arguments that neither library has are
settings of the model's sampler.

Silent failure that is avoided: an argument of TransformerLens or transformers that a run does not have is an error, not
ignored. Unlike in TransformerLens, tokens are sampled only on request: ``do_sample=True`` or a ``temperature``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sinklens.errors import PromptError, require
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import sampler_name
from sinklens.hooks.interleaving import opens_block
from sinklens.hooks.padded import PaddedIds
from sinklens.model import Model
from sinklens.model.model import WRITTEN
from sinklens.model.passes import known_options
from sinklens.model.prompts import Encoded, Prompt
from sinklens.model.tokens import side_of
from sinklens.runs.request import Hooks, RunRequest
from sinklens.runs.result import Generation
from sinklens.runs.session import Trace, carried_out, denoising_of

RETURN_TYPES = ("input", "str", "tokens")
_LOGITS = "change the logits at the hook point denoise.hook_logits, with hooks="
_STOP = "end a run with t.stop() in a block of sinklens.trace"
OTHER = {  # arguments of TransformerLens's and transformers' generate: the value that turns them off, and what to use
    "stop_at_eos": (True, "a row ends at its end token"),
    "eos_token_id": (None, "the end tokens are the checkpoint's, model.eos_token_ids"),
    "freq_penalty": (0.0, _LOGITS),
    "repetition_penalty": (1.0, _LOGITS),
    "output_logits": (False, "read t['denoise.hook_logits'] in every step of a block of sinklens.trace"),
    "stop_strings": (None, _STOP),
    "stopping_criteria": (None, _STOP),
    "pixel_values": (None, "sinklens reads text only"),
    "num_beams": (1, "a run follows one sequence for each prompt"),
    "streamer": (None, "read t['denoise.hook_canvas'] in every step of a block of sinklens.trace"),
    "generation_config": (None, "pass its values as arguments"),
}


class Writing(Trace):
    """A run opened as nnsight opens one: its ``result`` is the ids of prompt and answer."""

    def values_at_end(self) -> dict[str, Any]:
        """The ids, for a block that waits for ``model.generator.output``."""
        return {WRITTEN: ids_of(self.generation)}

    def carry_out(self) -> Any:
        """Run all steps; returns the ids."""
        return ids_of(super().carry_out())


def generate_as(
    model: Model,
    given: Prompt | None,
    *,
    max_new_tokens: int | None = None,
    do_sample: bool | None = None,
    use_past_kv_cache: bool | None = None,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    attention_mask: Any = None,
    return_type: str = "input",
    return_cache: bool = False,
    return_input_tokens: bool = False,
    names_filter: Any = None,
    device: Any = None,
    verbose: bool | None = None,
    hooks: Hooks = (),
    seed: int = 0,
    **settings: Any,
) -> Any:
    require(
        return_type in RETURN_TYPES,
        f"return_type={return_type!r} is not one of {', '.join(map(repr, RETURN_TYPES))}.",
    )
    side_of(padding_side)  # a run pads on the left
    prompt = _prompt(model, given, prepend_bos, attention_mask)
    chosen = _settings(model, settings, max_new_tokens, do_sample, use_past_kv_cache)
    request = RunRequest(prompt, seed, hooks=hooks, record_sinks=False, progress=verbose, settings=chosen)
    denoising = denoising_of(model, request)
    if opens_block("generate"):
        return Writing(denoising)
    run = carried_out(denoising)
    tokens = ids_of(run)
    texts = isinstance(given, str) or (isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], str))
    results = [tokens if (return_type == "tokens" or (return_type == "input" and not texts)) else _texts(run)]
    if return_cache:
        results.append(model.run_with_cache(tokens, names_filter=names_filter, device=device)[1])
    if return_input_tokens:
        results.append(PaddedIds.of(*model.reader.encode(prompt), model.reader.pad))
    return results[0] if len(results) == 1 else tuple(results)


def ids_of(run: Generation) -> Any:
    """Ids of prompts and answers [batch, pos]; rows that ended early are filled with the end token, as in transformers.

    Left padding is carried along; see `hooks.padded`.
    """
    tokens, model = run.tokens, run.model
    written = (tokens >= 0).any(dim=0).nonzero().max() + 1
    tokens = torch.where(tokens < 0, next(iter(model.eos_token_ids), model.reader.pad), tokens)[:, :written]
    return PaddedIds.of(tokens, run.real[:, :written], model.reader.pad).to(model.cfg.device)


def _prompt(model: Model, given: Prompt | None, prepend_bos: bool | None, mask: Any) -> str | Encoded:
    """The prompt of the run; a single text stays one, so that the run's text is one, too."""
    if isinstance(given, str) and prepend_bos is None and mask is None:
        return given
    if given is None:
        raise PromptError("model.generate needs a prompt. It takes no invokes; for several prompts, pass a list.")
    if mask is not None:
        return model.reader.encode(model.reader.read(given, mask=mask))
    return model.reader.encode(given, prepend_bos=prepend_bos)


def _settings(
    model: Model, given: Mapping[str, Any], length: int | None, do_sample: bool | None, cached: bool | None
) -> dict[str, Any]:
    """The settings of the run.

    Raises:
        SettingError: an argument has no meaning in a run of this model.
    """
    names = find_sampler(sampler_name(model.family_record, given)).settings()
    chosen = {name: value for name, value in given.items() if name in names}
    chosen |= known_options({name: value for name, value in given.items() if name not in {*names, *OTHER}})
    for name, (off, advice) in OTHER.items():
        require(
            name in names or given.get(name, off) in (off, None),
            f"model.generate has no argument {name}= for this model: {advice}.",
        )
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if length is not None:
        require(
            "gen_length" not in chosen,
            "max_new_tokens and gen_length are the same setting; pass one of them.",
        )
        chosen["gen_length"] = length
    if do_sample is not None:
        require(
            "temperature" in names,
            "the sampler of this model has no temperature, so do_sample= has no meaning; omit it.",
        )
        greedy = {name: value for name, value in chosen.items() if name not in ("top_p", "top_k")} | {
            "temperature": 0.0
        }
        chosen = {"temperature": 1.0} | chosen if do_sample else greedy
    if cached is not None and "use_cache" in names:
        chosen["use_cache"] = cached
    return chosen


def _texts(run: Generation) -> str | list[str]:
    """Each prompt with its answer up to the end token, without special tokens; one text for one row."""
    if run.model.tokenizer is None:
        raise PromptError(f'{run.model.name} has no tokenizer, so there is no text; pass return_type="tokens".')
    texts = []
    for row, real, answer in zip(run.tokens, run.real, run.answers, strict=True):
        end = run.prompt_length + answer.tokens
        texts.append(str(run.model.tokenizer.decode(row[:end][real[:end]], skip_special_tokens=True)))
    return texts[0] if len(texts) == 1 else texts
