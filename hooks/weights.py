"""The weights of a layer under TransformerLens's names and in its shapes; model_weights.py stacks them over layers.

Matrices multiply from the right, ``x @ W``, so each is the transpose of the transformers parameter:

    W_Q                [head, d_model, d_head]      b_Q         [head, d_head]
    W_K, W_V           [kv_head, d_model, d_head]   b_K, b_V    [kv_head, d_head]
    W_O                [head, d_head, d_model]      b_O         [d_model]
    W_gate, W_in       [d_model, d_mlp]             b_gate, b_in  [d_mlp]
    W_out              [d_mlp, d_model]             b_out       [d_model]
    W_E [vocab, d_model], W_U [d_model, vocab]      b_U         [vocab]

A bias that the checkpoint does not have is zeros. Weights are those of the checkpoint: nothing is folded or centered,
so the norms keep their weights (``ln1.w``, ``ln2.w``, ``ln_final.w``, and ``attn.q_norm.w``, ``attn.k_norm.w`` [d_head]
where queries and keys are normalized).

Pitfall: these properties return views of the parameters. Do not write to them; change the parameters of
``model.tree.hf`` instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinklens.errors import SettingError
from sinklens.hooks.offload import class_forward, form_of, value_of, weight_of


def per_head(linear: nn.Module, d_head: int) -> Float[Tensor, "head d_model d_head"]:
    """The weights of a projection into heads."""
    return weight_of(linear).unflatten(0, (-1, d_head)).transpose(-1, -2)


def out_of_heads(linear: nn.Module, d_head: int) -> Float[Tensor, "head d_head d_model"]:
    """The weights of a projection of the heads' outputs."""
    return weight_of(linear).T.unflatten(0, (-1, d_head))


def bias_per_head(linear: nn.Module, d_head: int) -> Float[Tensor, "head d_head"]:
    """The bias of a projection into heads."""
    return bias_of(linear).unflatten(0, (-1, d_head))


def bias_of(linear: nn.Module) -> Float[Tensor, " out"]:
    """The bias of a projection; zeros if it has none."""
    bias: Tensor | None = value_of(linear, "bias")
    weight = weight_of(linear)
    return weight.new_zeros(len(weight)) if bias is None else bias


def _made(letter: str, make: Callable[[nn.Module, int], Tensor], meaning: str) -> property:
    """A property of `AttentionWeights`: what `make` returns for one of its projections and the width of heads."""

    def read(points: Any) -> Tensor:
        projections, d_head = points.__dict__["_projections"]
        return make(projections[letter], d_head)

    return property(read, doc=meaning)


class HeadNorm:
    """The norm of each head's queries or keys, before the rotation: weight · x / sqrt(mean(x²) + eps)."""

    def __init__(self, norm: nn.Module, eps: str) -> None:
        self._norm, self._eps = norm, eps

    @property
    def w(self) -> Float[Tensor, " d_head"]:
        """Learned weight, shared by all heads."""
        return weight_of(self._norm)

    @property
    def eps(self) -> float:
        """The number added to the mean square."""
        return float(getattr(self._norm, self._eps))

    def __call__(self, x: Float[Tensor, "*batch d_head"]) -> Float[Tensor, "*batch d_head"]:
        """The norm of `x`, including its learned weight."""
        return class_forward(self._norm, x)


class AttentionWeights:
    """Weights of one attention layer, as properties of its group of points.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by letter, and the
    norms of queries and keys under ``_norms``.
    """

    @property
    def q_norm(self) -> HeadNorm | None:
        """The norm of the queries; None if the layer does not normalize them."""
        return self.__dict__["_norms"].get("q")

    @property
    def k_norm(self) -> HeadNorm | None:
        """The norm of the keys; None if the layer does not normalize them."""
        return self.__dict__["_norms"].get("k")

    W_Q = _made("q", per_head, "Query weights, [head, d_model, d_head].")
    W_K = _made("k", per_head, "Key weights, [kv_head, d_model, d_head].")
    W_V = _made("v", per_head, "Value weights, [kv_head, d_model, d_head].")
    W_O = _made("o", out_of_heads, "Output weights, [head, d_head, d_model].")
    b_Q = _made("q", bias_per_head, "Query biases, [head, d_head].")
    b_K = _made("k", bias_per_head, "Key biases, [kv_head, d_head].")
    b_V = _made("v", bias_per_head, "Value biases, [kv_head, d_head].")

    def head_results(self, mixed: Float[Tensor, "batch pos heads"]) -> Float[Tensor, "batch pos head d_model"]:
        """What each head adds to the stream, before gates and the bias, from the input of the output projection.

        The weights of a quantized projection cannot be read; it is applied to each head alone.
        """
        projections, d_head = self.__dict__["_projections"]
        z = mixed.unflatten(-1, (-1, d_head))
        if form_of(projections["o"]) is None:
            return einsum(z, self.W_O, "batch pos head d_head, head d_head d_model -> batch pos head d_model")
        alone = einsum(z, torch.eye(z.shape[2]).to(z), "batch pos head d_head, head to -> batch pos head to d_head")
        written = class_forward(projections["o"], alone.reshape(-1, mixed.shape[-1]).contiguous())
        bias = value_of(projections["o"], "bias")
        return (written if bias is None else written - bias).unflatten(0, z.shape[:3])

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:
        """Output bias, shared by all heads."""
        return bias_of(self.__dict__["_projections"][0]["o"])


class MlpWeights:
    """Weights of one MLP, ``(act(x @ W_gate) * (x @ W_in)) @ W_out``, as properties of its group of points.

    Without a gate it computes ``act(x @ W_in + b_in) @ W_out``, and W_gate and b_gate raise a `SettingError`.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by name.
    """

    def _linear(self, name: str) -> nn.Module:
        projections = self.__dict__["_projections"]
        if name not in projections:
            raise SettingError(
                "the MLP of this model has no gate, so it has no W_gate and b_gate; W_in precedes hook_pre."
            )
        return projections[name]

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
