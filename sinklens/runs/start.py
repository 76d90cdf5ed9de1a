"""The state that a run starts from: the canvas with the prompt and the undecided answer, and each row's random numbers.

Prompts are padded on the left. Interventions may lengthen them or append tokens after the answer, and a sampler may add
padding before them, answer positions that fill its last block, or a closing token.

Pitfall: rows may need unequal numbers of answer positions, so the canvas can also have padding after the answer.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.errors import PromptError, require
from sinklens.families.samplers import settings_for
from sinklens.hooks.forward_pass import PassKind
from sinklens.model import Model
from sinklens.runs.intervention import HookSource
from sinklens.runs.request import RunRequest
from sinklens.sampling import Sampler
from sinklens.sampling.decisions import RowNoise
from sinklens.sampling.state import State


def start(model: Model, request: RunRequest) -> tuple[Sampler, State]:
    """Encode the prompts and build the settings, with defaults filled in, and the initial state.

    Raises:
        PromptError: a prompt contains the mask token, or does not fit into the context with its answer.
        SettingError: a setting is unknown or out of range, the model lacks the token that one of them needs, or the
            sampler does not decode this model.
    """
    settings = settings_for(model, request.settings)
    ids, real = model.encode(request.prompts, request.chat_template)
    ids, real = ids.repeat(request.copies, 1), real.repeat(request.copies, 1)
    if not settings.marks_undecided:
        mask = model.mask_token_id
        if mask is not None and bool(((ids == mask) & real).any()):
            row, position = [int(n) for n in ((ids == mask) & real).nonzero()[0]]
            raise PromptError(
                f"prompt {row} contains the mask token ({mask}) at position {position}; it would be treated as an "
                f"answer position. Remove it from the text or the ids."
            )
    prompts = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
    noise = RowNoise(request.seed, prompts[: len(prompts) // request.copies], request.copies)
    appended, before = ids[:, :0], ids.shape[1]
    for entry in request.hooks:
        if isinstance(entry, HookSource):
            ids, real, more = entry.extend(model, ids, real)
            appended = torch.cat([appended, more], dim=1)
    added = ids.shape[1] - before
    lead = (settings.lead(ids.shape[1]), 0)
    ids, real = pad(ids, lead, value=model.reader.pad), pad(real, lead, value=False)
    if (closing := _closing_token(model, settings)) is not None:
        appended = torch.cat([appended, ids.new_full((len(ids), 1), closing)], dim=1)
    lengths = real.sum(dim=1).tolist()
    settings = settings.fitted(lengths)
    spare = [settings.spare(n) for n in lengths]
    longest, extra = max(lengths) + appended.shape[1], added + appended.shape[1]
    _check_room(model, settings, longest, extra, max(spare), request.allow_longer)
    return settings, _state(model, settings, ids, real, appended, spare, noise)


def _state(
    model: Model,
    settings: Sampler,
    ids: Int[Tensor, "batch prompt"],
    real: Bool[Tensor, "batch prompt"],
    appended: Int[Tensor, "batch appended"],
    spare: list[int],
    noise: RowNoise,
) -> State:
    """The state with the canvas: prompts, undecided answer and `spare` positions, and what is appended."""
    eot = model.family_record.eot_token_id
    mask = -1 if model.mask_token_id is None or settings.left_to_right else model.mask_token_id
    length = settings.gen_length
    blank = torch.full((ids.shape[0], length + max(spare)), mask, dtype=ids.dtype, device=ids.device)
    ends = length + torch.tensor(spare, device=ids.device)[:, None]
    needed = torch.arange(blank.shape[1], device=ids.device) < ends
    blank = blank.masked_fill(~needed, model.reader.pad)
    return State(
        tree=model.tree,
        canvas=torch.cat([ids, blank, appended], dim=1),
        real=torch.cat([real, needed, torch.ones_like(appended, dtype=torch.bool)], dim=1),
        prompt_length=ids.shape[1],
        mask_id=mask,
        eos_ids=model.eos_token_ids,
        eot_id=eot if eot is not None and eot < model.cfg.d_vocab else None,
        noise=noise,
        shift=model.family_record.shift,
        kind=PassKind("causal", ()) if model.tree.changes_attention and settings.left_to_right else None,
    )


def _check_room(model: Model, settings: Sampler, longest: int, extra: int, spare: int, allow_longer: bool) -> None:
    """Check that the longest row, with `extra` tokens from interventions and sampler, fits into the context."""
    if settings.slides:
        return
    needed = longest + settings.gen_length + spare
    over, added = needed - model.cfg.n_ctx, f", {extra} of them added to it," if extra else ""
    most = settings.gen_length - over
    advice = f"shorten one of them (gen_length to at most {most})" if most > 0 else f"shorten the prompt by {over}"
    said = f"The prompt has {longest} tokens{added} and gen_length is {settings.gen_length}: {advice}"
    model.check_length(needed, said, allow_longer)


def _closing_token(model: Model, settings: Sampler) -> int | None:
    """The token that the sampler puts at the end of the canvas, if its settings name one."""
    closing, config = settings.closing_token, model.config
    if closing == "none":
        return None
    if closing == "pad":
        return model.reader.pad if config.pad_token_id is None else int(config.pad_token_id)
    require(model.eos_token_ids, f"{model.name} has no end-of-sequence token; pass closing='pad' or 'none'.")
    return model.eos_token_ids[0]
