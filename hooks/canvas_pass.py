"""Passes of a model whose encoder reads the text before a canvas, and whose decoder reads the canvas.

The *encoder* is causal. It reads the text once and writes keys and values to a cache, in which a layer with a sliding
window keeps only the last ones. The *decoder* has the same layers; it works on the canvas, whose queries see the cached
keys and all keys of the canvas, in both directions, and it does not change the cache. It also reads the logits of the
step before (*self-conditioning*). Positions are counted over the complete text, padding included, as in transformers.

Edits of ``hook_rot_k`` in the encoder change the stored keys, and with them what the decoder reads; this relies on the
cache of transformers keeping the tensor that attention gets.

Limitation: the cache holds no padding mask; pass the mask of the complete text to every pass.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from sinklens.errors import PromptError, require
from sinklens.hooks.architectures import Architecture
from sinklens.hooks.points import Watch

Real = Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None


class CanvasPass:
    """The two passes of one model."""

    def __init__(self, hf: Any, architecture: Architecture, watch: Watch) -> None:
        self._hf, self._architecture, self._watch = hf, architecture, watch

    def encode(self, ids: Int[Tensor, "batch new"], real: Real, cache: Cache) -> Float[Tensor, "batch new d_model"]:
        """The final-norm output of the encoder on `ids`, which follow the text in `cache`; extends the cache.

        Args:
            real: False on padding, for the text in the cache and the new positions; None without padding.
        """
        encoder = self._hf.get_submodule(self._architecture.encoder)
        before = self._watch.forward_pass
        self._cover(cache, ids)
        self._watch.describe(mode="encode")
        try:
            return encoder(input_ids=ids, attention_mask=_mask(real), past_key_values=cache).last_hidden_state
        finally:
            self._watch.forward_pass = before

    def decode(
        self,
        canvas: Int[Tensor, "batch canvas"],
        real: Real,
        cache: Cache,
        self_conditioning: Float[Tensor, "batch canvas vocab"] | None = None,
    ) -> Float[Tensor, "batch canvas d_model"]:
        """The final-norm output of the decoder on `canvas`, which follows the text in `cache`.

        Args:
            real: False on padding, for the text in the cache and the canvas; None without padding.
            self_conditioning: the logits of the step before; None for the first step.
        """
        decoder = self._hf.get_submodule(self._architecture.base)
        self._cover(cache, canvas)
        return decoder(
            decoder_input_ids=canvas,
            past_key_values=cache,
            self_conditioning_logits=self_conditioning,
            decoder_attention_mask=_mask(real),
        ).last_hidden_state

    def hidden(
        self, ids: Int[Tensor, "batch pos"], real: Real, self_conditioning: Tensor | None
    ) -> Float[Tensor, "batch canvas d_model"]:
        """The output of `decode` on the last ``canvas_length`` positions, after `encode` on those before.

        Raises:
            PromptError: there is no text before the canvas.
        """
        length = self._hf.config.canvas_length
        start = ids.shape[1] - length
        require(
            start >= 1,
            f"the last {length} tokens of a pass are the canvas, and the encoder needs at least one token before "
            f"it; got {ids.shape[1]} tokens.",
            PromptError,
        )
        cache = DynamicCache(config=self._hf.config)
        self.encode(ids[:, :start], None if real is None else real[:, :start], cache)
        return self.decode(ids[:, start:], real, cache, self_conditioning)

    def _cover(self, cache: Cache, ids: Tensor) -> None:
        """Describe the pass over `ids`, which follow the text in `cache`."""
        self._watch.settle()
        start, stop = cache.get_seq_length(), cache.get_seq_length() + ids.shape[1]
        self._watch.describe(queries=range(start, stop), keys=range(stop))


def _mask(real: Real) -> Tensor | None:
    """The mask that transformers takes; None if nothing is hidden."""
    return None if real is None or bool(real.bool().all()) else real.to(torch.bool)
