"""The weights under TransformerLens's names and in its shapes.

Matrices multiply from the right, ``x @ W``, so each is the transpose of the transformers parameter. Per layer, and
stacked over layers on the tree:

    W_Q                [head, d_model, d_head]      b_Q         [head, d_head]
    W_K, W_V           [kv_head, d_model, d_head]   b_K, b_V    [kv_head, d_head]
    W_O                [head, d_head, d_model]      b_O         [d_model]
    W_gate, W_in       [d_model, d_mlp]             b_gate, b_in  [d_mlp]
    W_out              [d_mlp, d_model]             b_out       [d_model]
    W_E [vocab, d_model], W_U [d_model, vocab]      b_U         [vocab]

A bias that the checkpoint does not have is zeros. Weights are those of the checkpoint: nothing is folded or centred, so
the norms keep their weights (``ln1.w``, ``ln2.w``, ``ln_final.w``).

Pitfall: these properties return views of the parameters. Do not write to them; change the parameters of
``model.tree.hf`` instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.model_bridge.composition_scores import CompositionScores
from transformer_lens.utilities import composition_scores

from sinklens.errors import PromptError, SettingError
from sinklens.hooks.offload import value_of, weight_of


def per_head(linear: nn.Linear, d_head: int) -> Float[Tensor, "head d_model d_head"]:
    """The weights of a projection into heads."""
    return weight_of(linear).unflatten(0, (-1, d_head)).transpose(-1, -2)


def bias_of(linear: nn.Linear) -> Float[Tensor, " out"]:
    """The bias of a projection; zeros if it has none."""
    bias: Tensor | None = value_of(linear, "bias")
    return weight_of(linear).new_zeros(linear.out_features) if bias is None else bias


class AttentionWeights:
    """Weights of one attention layer, as properties of its group of points.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by letter.
    """

    def _project(self, letter: str) -> tuple[nn.Linear, int]:
        projections, d_head = self.__dict__["_projections"]
        return projections[letter], d_head

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """Query weights."""
        return per_head(*self._project("q"))

    @property
    def W_K(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """Key weights."""
        return per_head(*self._project("k"))

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """Value weights."""
        return per_head(*self._project("v"))

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output weights."""
        linear, d_head = self._project("o")
        return weight_of(linear).T.unflatten(0, (-1, d_head))

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:
        """Query biases."""
        linear, d_head = self._project("q")
        return bias_of(linear).unflatten(0, (-1, d_head))

    @property
    def b_K(self) -> Float[Tensor, "kv_head d_head"]:
        """Key biases."""
        linear, d_head = self._project("k")
        return bias_of(linear).unflatten(0, (-1, d_head))

    @property
    def b_V(self) -> Float[Tensor, "kv_head d_head"]:
        """Value biases."""
        linear, d_head = self._project("v")
        return bias_of(linear).unflatten(0, (-1, d_head))

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias, shared by all heads."""
        return bias_of(self._project("o")[0])


class MlpWeights:
    """Weights of one gated MLP, ``(act(x @ W_gate) * (x @ W_in)) @ W_out``, as properties of its group of points.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by name.
    """

    def _linear(self, name: str) -> nn.Linear:
        return self.__dict__["_projections"][name]

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        """Weights of the gate, whose output is ``hook_pre``."""
        return weight_of(self._linear("gate")).T

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """Weights of the linear branch, whose output is ``hook_pre_linear``."""
        return weight_of(self._linear("up")).T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """Output weights."""
        return weight_of(self._linear("down")).T

    @property
    def b_gate(self) -> Float[Tensor, " d_mlp"]:
        """Bias of the gate."""
        return bias_of(self._linear("gate"))

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"]:
        """Bias of the linear branch."""
        return bias_of(self._linear("up"))

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output bias."""
        return bias_of(self._linear("down"))


class ExpertWeights:
    """The weights of an MLP for a layer with experts: only a zero output bias.

    The group stores its layer's number and the norm before it under ``_place`` in its ``__dict__``.
    """

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Zeros: experts have no output bias."""
        return torch.zeros_like(weight_of(self.__dict__["_place"][1]))

    def _refuse(self) -> Tensor:
        raise SettingError(
            f"the MLP of layer {self.__dict__['_place'][0]} is a mixture of experts, so it has no W_gate, W_in, W_out, "
            f"b_gate or b_in; the weights of its experts are parameters of model.tree.hf."
        )

    W_gate = W_in = W_out = b_gate = b_in = property(_refuse, doc="Raises a `SettingError`.")


class Embed:
    """The token embedding under TransformerLens's names."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding

    @property
    def W_E(self) -> Float[Tensor, "vocab d_model"]:
        """Embedding weights."""
        return weight_of(self._embedding)

    def __call__(self, ids: Int[Tensor, "*batch pos"]) -> Float[Tensor, "*batch pos d_model"]:
        """Embeddings of token ids."""
        return self._embedding(ids)


class Unembed:
    """The language-model head under TransformerLens's names."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    @property
    def W_U(self) -> Float[Tensor, "d_model vocab"]:
        """Unembedding weights."""
        return weight_of(self._head).T

    @property
    def b_U(self) -> Float[Tensor, " vocab"]:
        """Unembedding bias."""
        return bias_of(self._head)

    def __call__(self, hidden: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of final-norm outputs."""
        return self._head(hidden)


def _stacked(part: str, name: str) -> property:
    """The weights called `name` of all layers, stacked along a new first axis."""

    def stack(tree: Any) -> Float[Tensor, "layer *shape"]:
        device = tree.cfg.device  # layers may be on several devices
        return torch.stack([getattr(getattr(block, part), name).to(device) for block in tree.blocks])

    return property(stack, doc=f"`{name}` of all layers, [layer, ...].")


class ModelWeights:
    """Weights of the tree: stacked over layers, circuits, and directions of tokens in the stream."""

    cfg: Any
    hf: Any
    architecture: Any
    ln_final: Any
    tokenizer_of: Callable[[], Any]

    W_Q, W_K, W_V, W_O = (_stacked("attn", name) for name in ("W_Q", "W_K", "W_V", "W_O"))
    b_Q, b_K, b_V, b_O = (_stacked("attn", name) for name in ("b_Q", "b_K", "b_V", "b_O"))
    W_gate, W_in, W_out = (_stacked("mlp", name) for name in ("W_gate", "W_in", "W_out"))
    b_gate, b_in, b_out = (_stacked("mlp", name) for name in ("b_gate", "b_in", "b_out"))

    @property
    def embed(self) -> Embed:
        """The token embedding."""
        return Embed(self.hf.get_submodule(f"{self.architecture.base}.{self.architecture.embed}"))

    @property
    def unembed(self) -> Unembed:
        """The language-model head."""
        return Unembed(self.hf.get_submodule(self.architecture.head))

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
    def QK(self) -> FactoredMatrix:
        """W_Q W_Kᵀ of every head, [layer, head, d_model, d_model]; grouped keys are repeated to the query heads."""
        return FactoredMatrix(self.W_Q, self._every_head(self.W_K).transpose(-2, -1))

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of every head, [layer, head, d_model, d_model]; grouped values are repeated to the query heads."""
        return FactoredMatrix(self._every_head(self.W_V), self.W_O)

    def _every_head(
        self, grouped: Float[Tensor, "layer kv_head d_model d_head"]
    ) -> Float[Tensor, "layer head d_model d_head"]:
        return grouped.repeat_interleave(self.cfg.n_heads // grouped.shape[1], dim=1)

    def QK_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers with attention (all of them) and `QK`."""
        return list(range(self.cfg.n_layers)), self.QK

    def OV_for_attn_layers(self) -> tuple[list[int], FactoredMatrix]:
        """The layers with attention (all of them) and `OV`."""
        return list(range(self.cfg.n_layers)), self.OV

    def all_composition_scores(self, mode: str) -> CompositionScores:
        """How strongly each later head reads the output of each earlier head, [layer, head, layer, head].

        ‖OV · C‖ / (‖OV‖ ‖C‖) in Frobenius norms, where C is QK ("Q"), QKᵀ ("K") or OV ("V") of the later head; 0 where
        it is not later (Elhage et al., 2021, A Mathematical Framework for Transformer Circuits).

        Raises:
            SettingError: `mode` is not "Q", "K" or "V".
        """
        if mode not in ("Q", "K", "V"):
            raise SettingError(f"mode must be one of 'Q', 'K' and 'V'; got {mode!r}.")
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
        if mlp_input and layer >= self.cfg.n_layers:
            raise SettingError(f"layer {layer} has no MLP; mlp_input=True takes layers 0 to {self.cfg.n_layers - 1}.")
        total = self.b_O[: layer + mlp_input].sum(0)
        return total + self.b_out[:layer].sum(0) if include_mlp_biases else total

    def to_single_token(self, text: str) -> int:
        """The id of a text that is exactly one token.

        Raises:
            PromptError: `text` is not exactly one token, or the model has no tokenizer.
        """
        tokenizer = self.tokenizer_of()
        if tokenizer is None:
            raise PromptError(f"{text!r} needs a tokenizer, and this model has none; give token ids.")
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) != 1:
            parts = [tokenizer.decode([token]) for token in ids]
            raise PromptError(f"{text!r} is {len(ids)} tokens, {parts}; give a text that is exactly one token.")
        return int(ids[0])

    def tokens_to_residual_directions(self, tokens: Any) -> Float[Tensor, "*shape d_model"]:
        """Directions in the normalized stream whose dot products with the stream are the logits of `tokens`.

        w ⊙ W_U[:, token], where w is the final norm's weight. TransformerLens folds w into W_U when it loads a model;
        here the weights are the checkpoint's, so w is multiplied in: ``cache.logit_attrs`` of all components adds up
        to the logit minus b_U. One token, or a tensor with one element, gives one direction [d_model].

        Raises:
            PromptError: a text that is not exactly one token.
            SettingError: `tokens` is not a text, an id or a tensor of ids.
        """
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        if isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens.item())
        if isinstance(tokens, bool) or not isinstance(tokens, int | Tensor):
            raise SettingError(f"tokens must be a text, an id or a tensor of ids; got {type(tokens).__name__}.")
        return self.W_U.T[tokens] * self.ln_final.w
