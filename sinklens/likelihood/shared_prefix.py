"""One pass over the text that noisy answers of a block-causal model share: the complete blocks before their own.

A block sees earlier blocks and no later ones, so the keys and values of earlier blocks do not depend on it. They are
computed once for all draws and choices that have them, and only the block itself, with the part of the prompt inside
it, is computed for each row.

Limitation: hooks would see a part of the text in each of the two passes; under hooks or guidance every row is computed
completely.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.likelihood.hooked_pass import HookedPass, blocks_of_text
from sinklens.model import Model
from sinklens.sampling.key_cache import one_later

Ids = tuple[int, ...]


def shares_prefixes(passes: HookedPass) -> bool:
    """Whether rows can share their prefix; networks with a noise level keep no keys."""
    model = passes.model
    alone = not (passes.hooks or passes.cfg_scale or model.tree.is_watched)
    return alone and model.checkpoint.blocks is not None and not model.tree.architecture.time


def prefix_length(model: Model, before: int) -> int:
    """How many of the `before` tokens before a block's noisy ones lie in complete blocks."""
    blocks = blocks_of_text(model)
    assert blocks is not None
    return before - before % blocks.length if blocks.start == "token" else before


@torch.no_grad()
def logits_after(
    model: Model, prefixes: Sequence[Ids], rest: Int[Tensor, "row pos"], where: Bool[Tensor, "row pos"]
) -> Float[Tensor, "token vocab"]:
    """Logits, in float32, of the tokens of `rest` at `where`, row by row; either all prefixes are empty or none is."""
    from transformers import DynamicCache

    cache, real, before = None, torch.ones_like(rest[:, :0], dtype=torch.bool), None
    if prefixes[0]:
        distinct = list(dict.fromkeys(prefixes))
        source = torch.tensor([distinct.index(prefix) for prefix in prefixes], device=rest.device)
        ids, real = _padded(model, distinct)
        cache = DynamicCache(config=model.tree.hf.config)
        before = model.tree.hidden(ids, real, cache)[source, -1:]
        cache.batch_select_indices(source)
        real = real[source.to(real.device)]
    real = pad(real, (0, rest.shape[1]), value=True)
    hidden = model.tree.hidden(rest, real, cache)
    if model.family_record.shift:
        hidden = one_later(hidden, real, before)
    return model.tree.head(hidden[where]).float()


def _padded(model: Model, prefixes: Sequence[Ids]) -> tuple[Int[Tensor, "row pos"], Bool[Tensor, "row pos"]]:
    """The prefixes with padding before them, so that they end with a block."""
    ids, real = model.reader.padded([list(prefix) for prefix in prefixes])
    blocks = blocks_of_text(model)
    assert blocks is not None
    lead = (-ids.shape[1] % blocks.length, 0) if blocks.start == "column" else (0, 0)
    return pad(ids, lead, value=model.reader.pad), pad(real, lead, value=False)
