"""The weights of all layers under TransformerLens's names, and its circuits.

Stacked over layers, ``model.W_Q`` is [layer, head, d_model, d_head], ``model.W_K`` [layer, kv_head, d_model, d_head],
``model.W_in`` [layer, d_model, d_mlp]; weights.py has the shapes of a layer. Key/value heads stay grouped, as in
TransformerLens 4; `expand_kv_heads` repeats them to the query heads, and the circuits do so.

A rotary model has no single QK matrix: the score of a query at i and a key at j depends on i − j. `QK` leaves the
rotation out, as TransformerLens does.

Pitfall: layers may differ in shape (DiffusionGemma), or have experts instead of a dense MLP. A name that does not exist
in every layer is then an error; the weights of a single layer are at ``model.blocks[layer].attn`` and ``.mlp``.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge.composition_scores import CompositionScores
from transformer_lens.utilities import composition_scores

from sinklens.errors import require
from sinklens.hooks.offload import weight_of
from sinklens.hooks.spellings import refuse_gated
from sinklens.hooks.weights import AbsentError, Reader, SaysWhy, bias_of
from sinklens.utils.integers import as_integer


def _stacked(part: str, name: str) -> property:
    """The weights called `name` of all layers, stacked along a new first axis."""

    def stack(tree: Any) -> Float[Tensor, "layer *shape"]:
        # layers may be on several devices
        weights = [getattr(getattr(block, part), name).to(tree.cfg.device) for block in tree.blocks]
        shapes = {tuple(weight.shape): layer for layer, weight in reversed(list(enumerate(weights)))}
        found = ", ".join(f"{list(shape)} from layer {layer}" for shape, layer in reversed(shapes.items()))
        require(
            len(shapes) == 1,
            f"{name} cannot be stacked, because the layers of this model differ: {found}; read one layer's "
            f"as model.blocks[layer].{part}.{name}.",
            AbsentError,
        )
        return torch.stack(weights)

    return property(stack, doc=f"`{name}` of all layers, [layer, ...].")


class ModelWeights(SaysWhy):
    """Weights of the tree: stacked over layers, circuits, and directions of tokens in the stream."""

    cfg: Any
    hf: Any
    architecture: Any
    ln_final: Any
    blocks: Any
    to_single_token: Callable[[str], int]

    W_Q, W_K, W_V, W_O = (_stacked("attn", name) for name in ("W_Q", "W_K", "W_V", "W_O"))
    b_Q, b_K, b_V, b_O = (_stacked("attn", name) for name in ("b_Q", "b_K", "b_V", "b_O"))
    W_gate, W_in, W_out = (_stacked("mlp", name) for name in ("W_gate", "W_in", "W_out"))
    b_gate, b_in, b_out = (_stacked("mlp", name) for name in ("b_gate", "b_in", "b_out"))

    @property
    def embed(self) -> Reader:
        """The token embedding."""
        embedding = self.hf.get_submodule(f"{self.architecture.base}.{self.architecture.embed}")
        return Reader(embedding, W_E=weight_of(embedding))

    @property
    def unembed(self) -> Reader:
        """The language-model head."""
        head = self.hf.get_submodule(self.architecture.head)
        return Reader(head, W_U=weight_of(head).T, b_U=bias_of(head))

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding weights."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """Unembedding bias."""
        return self.unembed.b_U

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding weights."""
        return self.embed.W_E

    @property
    def W_pos(self) -> Float[Tensor, "pos d_model"]:
        """Learned embeddings of positions.

        Raises:
            AbsentError: the model has none.
        """
        require(
            self.architecture.positions,
            "this model rotates queries and keys by position; it has no learned positions.",
            AbsentError,
        )
        return weight_of(self.hf.get_submodule(f"{self.architecture.base}.{self.architecture.positions}"))

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_Kᵀ of every head, [layer, head, d_model, d_model]; grouped keys are repeated to the query heads."""
        return FactoredMatrix(self.W_Q, self.expand_kv_heads(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, [layer, head, d_model, d_model]; grouped values are repeated to the query heads."""
        return FactoredMatrix(self.expand_kv_heads(self.W_V), self.W_O)

    def expand_kv_heads(self, grouped: Float[Tensor, "layer kv_head *shape"]) -> Float[Tensor, "layer head *shape"]:
        """Stacked W_K, W_V, b_K or b_V with each key/value head repeated for the query heads that use it.

        Raises:
            SettingError: the second axis is not the key/value heads.
        """
        require(
            grouped.ndim >= 3 and grouped.shape[1] == self.cfg.n_key_value_heads,
            f"expand_kv_heads takes weights [layer, kv_head, ...] with {self.cfg.n_key_value_heads} key/value "
            f"heads, such as model.W_K; got {list(grouped.shape)}.",
        )
        return grouped.repeat_interleave(self.cfg.n_heads // grouped.shape[1], dim=1)

    def all_composition_scores(self, mode: str) -> CompositionScores:
        """How strongly each later head reads the output of each earlier head, [layer, head, layer, head].

        ‖OV · C‖ / (‖OV‖ ‖C‖) in Frobenius norms, where C is QK ("Q"), QKᵀ ("K") or OV ("V") of the later head; 0 where
        it is not later (Elhage et al., 2021, A Mathematical Framework for Transformer Circuits).

        Raises:
            SettingError: `mode` is not "Q", "K" or "V".
        """
        require(mode in ("Q", "K", "V"), f"mode must be one of 'Q', 'K' and 'V'; got {mode!r}.")
        read = self.OV if mode == "V" else self.QK if mode == "Q" else self.QK.T
        scores = composition_scores(self.OV, read, broadcast_dims=True)
        layer = torch.arange(self.cfg.n_layers, device=scores.device)
        later = layer[:, None, None, None] < layer[None, None, :, None]
        return CompositionScores(torch.where(later, scores, 0.0), layer.tolist(), self.all_head_labels)

    @property
    def all_head_labels(self) -> list[str]:
        """Labels of all heads: L0H0, L0H1, …"""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Float[Tensor, " d_model"]:
        """The sum of the biases written to the stream before `layer`; with `mlp_input` also that of its attention.

        Raises:
            SettingError: `mlp_input` after the last layer.
        """
        require(
            not mlp_input or layer < self.cfg.n_layers,
            f"layer {layer} has no MLP; mlp_input=True takes layers 0 to {self.cfg.n_layers - 1}.",
        )
        total = self.b_O[: layer + mlp_input].sum(0)
        return total + self.b_out[:layer].sum(0) if include_mlp_biases else total

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """``ln_final.w * W_U[:, token]`` for each of `tokens`: the final norm's weight is multiplied in.

        The dot product with the normalized stream, before the norm's weight, is the token's logit minus b_U.
        TransformerLens returns W_U[:, token], into which it folds the weight when it loads a model. Here W_U is the
        checkpoint's, so the result differs from W_U[:, token]: ``cache.logit_attrs`` of all components adds up
        to the logit minus b_U. One token, or a tensor with one element, gives one direction [d_model].

        Args:
            tokens: a text of one token, an id, or a tensor of ids.

        Raises:
            PromptError: a text that is not exactly one token, or the model has no tokenizer.
            SettingError: `tokens` is not a text, an id or a tensor of ids, or the noise level scales the stream.
        """
        if self.architecture.modulation:
            refuse_gated()
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        if isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens.item())
        require(
            as_integer(tokens) is not None or isinstance(tokens, Tensor),
            f"tokens must be a text, an id or a tensor of ids; got {type(tokens).__name__}.",
        )
        return self.W_U.T[tokens] * self.ln_final.w
