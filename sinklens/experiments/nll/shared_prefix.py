"""One pass over the text that noisy answers of a block-causal model share: the complete blocks before their own.

A block sees earlier blocks and no later ones, so the keys and values of earlier blocks do not depend on it. They are
computed once for all draws and choices that have them, and only the block itself, with the part of the prompt inside
it, is computed for each row.

Limitation: hooks would see a part of the text in each of the two passes; under hooks or guidance every row is computed
completely.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinklens.experiments.nll.hooked_pass import HookedPass, blocks_of_text
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
    distinct = list(dict.fromkeys(prefixes))
    source = torch.tensor([distinct.index(prefix) for prefix in prefixes])
    found = hidden_after(model, _padded(model, distinct) if prefixes[0] else None, source, rest)
    hidden = one_later(*found) if model.family_record.shift else found.hidden
    return model.tree.head(hidden[where]).float()


class Continued(NamedTuple):
    """The outputs of a pass over tokens that continue prefixes.

    Attributes:
        hidden: the final-norm outputs of the tokens.
        real: False on padding before the prefix, which comes first.
        before: the output at the end of the prefix; None without one.
    """

    hidden: Float[Tensor, "row rest d_model"]
    real: Bool[Tensor, "row pos"]
    before: Float[Tensor, "row 1 d_model"] | None


def hidden_after(
    model: Model,
    prefixes: tuple[Int[Tensor, "prefix pos"], Bool[Tensor, "prefix pos"]] | None,
    source: Int[Tensor, " row"],
    rest: Int[Tensor, "row rest"],
) -> Continued:
    """One pass over distinct prefixes, and one over the tokens that continue them.

    A prefix is computed once, and its keys and values are copied to the rows that continue it. The cache of a run
    (key_cache.py) follows one canvas instead and has no rows that share their text.

    Args:
        prefixes: ids and which are real, padded on the left; None for none.
        source: the prefix of each row.
        rest: what follows it. Padding on the right needs no mask, as no real token sees it.
    """
    from transformers import DynamicCache

    cache, real, before = None, torch.ones_like(rest[:, :0], dtype=torch.bool), None
    if prefixes is not None:
        ids, real = prefixes
        cache, source = DynamicCache(config=model.tree.hf.config), source.to(ids.device)
        before = model.tree.hidden(ids, real, cache)[source, -1:]
        cache.batch_select_indices(source)
        real = real[source.to(real.device)]
    real = pad(real, (0, rest.shape[1]), value=True)
    return Continued(model.tree.hidden(rest, real, cache), real, before)


def _padded(model: Model, prefixes: Sequence[Ids]) -> tuple[Int[Tensor, "row pos"], Bool[Tensor, "row pos"]]:
    """The prefixes with padding before them, so that they end with a block."""
    ids, real = model.reader.padded([list(prefix) for prefix in prefixes])
    blocks = blocks_of_text(model)
    assert blocks is not None
    lead = (-ids.shape[1] % blocks.length, 0) if blocks.start == "column" else (0, 0)
    return pad(ids, lead, value=model.reader.pad), pad(real, lead, value=False)
