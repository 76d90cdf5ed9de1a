"""What the page can offer: models, sampler settings and kinds of chips, each with its meaning, as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sinklens.errors import SettingError
from sinklens.families import SAMPLERS, settings_for
from sinklens.families.samplers import fitting
from sinklens.live.chips import CHIPS
from sinklens.live.refusal import require
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.sampling import POLICIES
from sinklens.utils.arguments import Argument, arguments
from sinklens.views.html import visible

Form = dict[str, Any]


def of_model(name: str, model: "Model") -> Form:
    """A model's entry in the session."""
    return {
        "name": name,
        "family": model.family,
        "layers": model.cfg.n_layers,
        "heads": model.cfg.n_heads,
        "positions": model.cfg.n_ctx,
        "vocabulary": model.cfg.d_vocab,
        "tokenizer": model.tokenizer is not None,
        "causal": bool(model.config.is_causal),
        "chat_template": bool(getattr(model.tokenizer, "chat_template", None)),
        "mask_token": model.mask_token_id,
        "parameters": sum(parameter.numel() for parameter in model.tree.hf.parameters()),
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "device": str(model.cfg.device),
    }


def token_of(model: "Model", text: str) -> Form:
    """The token with this text: its id and the text a page shows; ``choices`` adds that of the text after a space.

    Raises:
        Refused: neither is one token, or the model has no tokenizer.
    """
    require(model.tokenizer is not None, "this model has no tokenizer; give the token as #id.")
    spellings = [text] if text.startswith(" ") else [text, f" {text}"]
    read = [model.tokenizer(one, add_special_tokens=False).input_ids for one in spellings]  # type: ignore[misc]
    choices = [{"id": int(ids[0]), "text": visible(str(model.tokenizer.decode(ids)))} for ids in read if len(ids) == 1]  # type: ignore[union-attr]
    require(
        bool(choices),
        f"{text!r:.80} is {len(read[0])} tokens of this model; give the text of one token, or #id.",
    )
    return choices[0] | {"choices": choices}


def of_settings(model: "Model") -> Form:
    """The samplers that fit a model, and the settings of each; ``modes`` names the sampler of each mode."""
    family, samplers = model.family_record, fitting(model)
    forms = {sampler: _settings(model, sampler) for sampler in samplers}
    of_run = [_cache()] if family.attention == "bidirectional" else []
    usual, modes = family.sampler, dict(family.modes)
    return {
        "sampler": usual, "samplers": samplers, "fields": forms[usual], "of": forms, "run": of_run, "modes": modes,
    }  # fmt: skip


def _cache() -> Form:
    """The cache policy of a run: a name, with a number where the policy takes one."""
    declared = arguments(generate)["cache"]
    words = f"Which keys and values a step reuses: {', '.join(POLICIES)}, or such as keep-sinks:4. Empty: none."
    return {"name": "cache", "type": "str", "default": declared.default, "help": words}


def _settings(model: "Model", sampler: str) -> list[Form]:
    """The settings of a sampler; the defaults are those that a run of the model would use."""
    defaults = _defaults(model, sampler)
    return [
        {"name": name, **_type(argument), "default": defaults.get(name), "help": argument.meaning}
        for name, argument in SAMPLERS[sampler].settings().items()
    ]


def _defaults(model: "Model", sampler: str) -> Mapping[str, Any]:
    """The settings of a run for which none is given; where those do not fit together, the sampler's own."""
    try:
        return asdict(settings_for(model, {"sampler": sampler}))
    except SettingError:
        return {name: argument.default for name, argument in SAMPLERS[sampler].settings().items()}


def _type(argument: Argument) -> Form:
    """The type of a setting, and the words that it may be."""
    if argument.choices:
        return {"type": "str", "choices": list(argument.choices)}
    return {"type": argument.type.__name__ if argument.type in (int, float, bool) else "str"}


def of_chips() -> list[Form]:
    """The kinds of chips."""
    return [
        {"kind": kind, "label": chip.label, "help": chip.help, "fields": [asdict(entry) for entry in chip.fields]}
        for kind, chip in CHIPS.items()
    ]
