"""Runs made again with another prompt.

A run of a corrupted prompt soon works on another canvas, because it decides other tokens. Its activations then carry
the tokens that it has already decided, and a patch from it transfers these besides the cause under study. `corrupted`
changes the prompt and keeps the canvases, so that only the prompt differs, at every step.

Pitfall: the answer of a corrupted run is that of the earlier run, by construction; compare logits, not texts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinklens.errors import PromptError, require
from sinklens.runs import generate
from sinklens.runs.request import Hooks
from sinklens.runs.result import Generation
from sinklens.utils.arguments import Unread, checked


@checked
def corrupted(
    base: Generation, changes: Annotated[Mapping[str, str], Unread], *, hooks: Hooks = (), **options: Any
) -> Generation:
    """Run the prompts of `base`, with some of their text replaced, on the canvases of `base`.

        kept = Activations(names=["blocks.0.attn.hook_z"])
        other = corrupted(base, {" 6": " 8"}, hooks=kept)
        run = sinklens.generate(model, prompt, replay=base, hooks=PatchHooks(source=kept.caches))

    Args:
        base: a run.
        changes: old text -> new text, with as many tokens each. Every occurrence of the old tokens in a prompt is
            replaced; in a batch, prompts that lack them stay the same.
        hooks: as in `sinklens.generate`.
        **options: further keyword arguments of `sinklens.generate`, such as ``record_sinks``.

    Returns:
        The run. Its settings and seed are those of `base`, and ``text`` is a string if that of `base` is one.

    Raises:
        PromptError: `changes` is empty, or an old text occurs in no prompt or has another number of tokens than its
            new text.
        SettingError: `base` is not a run.
    """
    ids = replaced_prompts(base.canvas[:, 0, : base.prompt_length], base, changes)
    prompts = [row[keep].tolist() for row, keep in zip(ids, base.real[:, : base.prompt_length], strict=True)]
    chosen = base.settings  # the run fills in the other fields
    settings = {"sampler": chosen.name, "cache": base.cache, "seed": base.seed}
    settings |= {name: getattr(chosen, name) for name in chosen.settings()}
    return replace(generate(base.model, prompts, replay=base, hooks=hooks, **settings | options), single=base.single)


def replaced_prompts(
    ids: Int[Tensor, "batch pos"], base: Generation, changes: Mapping[str, str]
) -> Int[Tensor, "batch pos"]:
    """`ids`, prompts or canvases of `base`, with texts of the prompt replaced, as in `corrupted`.

    Raises:
        PromptError: see `corrupted`.
    """
    require(
        isinstance(changes, Mapping) and changes,
        f"changes must be a dict of the texts to replace, such as {{' 6': ' 8'}}; got {changes!r:.80}.",
        PromptError,
    )
    model, prompts = base.model, ids[:, : base.prompt_length].cpu()
    for old, new in changes.items():
        before, after = (model.to_tokens(text, prepend_bos=False)[0].cpu() for text in (old, new))
        require(
            len(before) == len(after),
            f"{old!r} has {len(before)} tokens ({model.to_str_tokens(before)}) and {new!r} has {len(after)} "
            f"({model.to_str_tokens(after)}); positions stay aligned only if both have the same number of tokens.",
            PromptError,
        )
        fits = len(before) <= prompts.shape[1]
        found = (prompts.unfold(1, len(before), 1) == before).all(dim=-1).nonzero().tolist() if fits else []
        require(
            found,
            f"{old!r} occurs in no prompt as the tokens {model.to_str_tokens(before)}; a leading space may be "
            f"part of a token (see model.to_str_tokens).",
            PromptError,
        )
        prompts = prompts.clone()
        for row, start in found:
            prompts[row, start : start + len(after)] = after
    return torch.cat([prompts.to(ids.device), ids[:, base.prompt_length :]], dim=1)
