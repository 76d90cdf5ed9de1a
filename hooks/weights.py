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
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from sinklens.errors import SettingError, require
from sinklens.hooks.offload import class_forward, form_of, value_of, weight_of


class AbsentError(SettingError, AttributeError):
    """A weight or a part that a model does not have; `hasattr` is False."""


class SaysWhy:
    """A module whose missing weights say why they are missing.

    Where a property raises an `AttributeError`, Python calls ``__getattr__``, and that of PyTorch knows no reason. This
    one reads the property once more.
    """

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self), name, None)
        return found.__get__(self) if isinstance(found, property) else super().__getattr__(name)  # type: ignore[misc]


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


class Reader:
    """A module under TransformerLens's names: its weights as attributes, and its forward, without its hooks."""

    def __init__(self, module: nn.Module, **values: Any) -> None:
        self._read = module
        self.__dict__ |= values

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The output of the module."""
        return class_forward(self._read, x)


class AttentionWeights:
    """Weights of one attention layer, as properties of its group of points.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by letter, and the
    norms of queries and keys under ``_norms``.
    """

    def _norm(self, letter: str) -> Reader | None:
        """The norm of each head's queries or keys, weight · x / sqrt(mean(x²) + eps); None without one."""
        norm, eps = self.__dict__["_norms"].get(letter, (None, 0.0))
        return None if norm is None else Reader(norm, w=weight_of(norm), eps=eps)

    q_norm = property(partial(_norm, letter="q"), doc="The norm of the queries; None if they are not normalized.")
    k_norm = property(partial(_norm, letter="k"), doc="The norm of the keys; None if they are not normalized.")
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


def _of_mlp(name: str, make: Callable[[nn.Module], Tensor], meaning: str) -> property:
    """A property of `MlpWeights`: what `make` returns for one of its projections."""

    def read(points: Any) -> Tensor:
        projections = points.__dict__["_projections"]
        if not projections:
            raise AbsentError(
                f"the MLP of layer {points.hook_expert_out.layer()} is a mixture of experts, so it has no W_gate, "
                f"W_in, W_out, b_gate or b_in; the weights of its experts are parameters of model.tree.hf."
            )
        require(
            name in projections,
            "the MLP of this model has no gate, so it has no W_gate and b_gate; W_in precedes hook_pre.",
            AbsentError,
        )
        return make(projections[name])

    return property(read, doc=meaning)


class MlpWeights(SaysWhy):
    """Weights of one MLP, ``(act(x @ W_gate) * (x @ W_in)) @ W_out``, as properties of its group of points.

    Without a gate it computes ``act(x @ W_in + b_in) @ W_out``, and W_gate and b_gate raise an `AbsentError`. So do all
    but `b_out` in a layer that has only experts.

    The layer owns them; the group stores its projections under ``_projections`` in its ``__dict__``, by name, and the
    norm before it under ``_norm``.
    """

    W_gate = _of_mlp("gate", lambda linear: weight_of(linear).T, "Weights of the gate, whose output is ``hook_pre``.")
    W_in = _of_mlp("up", lambda linear: weight_of(linear).T, "Weights of the branch of ``hook_pre_linear``.")
    W_out = _of_mlp("down", lambda linear: weight_of(linear).T, "Output weights, [d_mlp, d_model].")
    b_gate = _of_mlp("gate", bias_of, "Bias of the gate.")
    b_in = _of_mlp("up", bias_of, "Bias of the linear branch.")

    @property
    def b_out(self) -> Float[Tensor, " d_model"]:
        """Output bias; zeros for experts, which have none."""
        down = self.__dict__["_projections"].get("down")
        return torch.zeros_like(weight_of(self.__dict__["_norm"])) if down is None else bias_of(down)
