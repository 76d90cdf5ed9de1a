"""A Llama whose matrices are frozen and changed by low-rank factors: what the continuations of SmolLM2-135M train.

Each matrix of a layer computes W x + B A x, with A random and B zero at the start. The norms are trained in full, and
so is the embedding of the mask token, which starts as the mean of all embeddings. A model with a mask token attends in
both directions, one without it causally. The head is the base's embedding.

On a graphics card, training computes in bfloat16. Attention is measured in float32 everywhere, with the base's own
weights: in bfloat16, the strongest of several similar keys would be a matter of rounding.

Pitfall: the class knows plain Llama only. Biases, scaled rotations and an untied head are refused.
"""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from sinklens.errors import CheckpointError, require
from sinklens.utils.documents import read_json

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
               "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
MASK_ROW = "model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBEDDING = "model.embed_tokens.weight"


class LowRankLlama:
    """A base model and what is trained of it.

    Attributes:
        config: the base's config.json.
        mask_id: the mask token; None for a causal model.
        trained: the trained tensors in float32, under peft's names without its prefix.
    """

    def __init__(
        self, folder: Path, *, rank: int, seed: int, mask_id: int | None, device: str = "cpu", compiled: bool = False
    ) -> None:
        """Read the base from `folder`; draw the factors A from `seed`.

        Raises:
            CheckpointError: the folder does not hold a Llama of this kind.
        """
        self.config, self.mask_id, self.device = read_json(folder / "config.json"), mask_id, device
        plain = self.config.get("model_type") == "llama" and self.config.get("tie_word_embeddings")
        scaled = self.config.get("rope_scaling") or self.config.get("attention_bias") or self.config.get("mlp_bias")
        require(
            plain and not scaled and (folder / "model.safetensors").is_file(),
            f"{folder} does not hold a plain Llama with a tied head in model.safetensors. Run `sinklens fetch "
            f"smollm2-135m`, and pass the folder in the user's cache.",
            CheckpointError,
        )
        exact = {name: value.float() for name, value in load_file(folder / "model.safetensors", device=device).items()}
        self.trained: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(seed)
        for name, value in exact.items():
            path = name.removesuffix(".weight")
            if path.endswith(PROJECTIONS):
                drawn = torch.randn(rank, value.shape[1], generator=generator) / math.sqrt(value.shape[1])
                self.trained[f"{path}.lora_A.weight"] = drawn.to(device)
                self.trained[f"{path}.lora_B.weight"] = torch.zeros(value.shape[0], rank, device=device)
            elif path.endswith("norm"):
                self.trained[name] = value.clone()
        if mask_id is not None:
            self.trained[MASK_ROW] = exact[EMBEDDING].mean(dim=0, keepdim=True)
        for value in self.trained.values():
            value.requires_grad_()
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._weights = {torch.float32: exact}
        self._weights.setdefault(self.dtype, {name: value.to(self.dtype) for name, value in exact.items()})
        self._layers = {dtype: self._by_layer(weights) for dtype, weights in self._weights.items()}
        self._block = torch.compile(self._compute, dynamic=False) if compiled else self._compute

    def _by_layer(self, weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of each layer, under the same names in all of them, so that one compiled block serves all."""
        prefixes = [f"model.layers.{number}." for number in range(self.config["num_hidden_layers"])]
        together = (weights | self.trained).items()
        return [{name.removeprefix(one): v for name, v in together if name.startswith(one)} for one in prefixes]

    def __call__(
        self, ids: Int[Tensor, "batch pos"], queries: Float[Tensor, "batch sum pos"] | None = None
    ) -> tuple[Float[Tensor, "batch pos d_model"], Float[Tensor, "layer batch sum head pos"] | None]:
        """The stream after the last norm and, if `queries` are given, column sums of the attention.

        Args:
            queries: weight of each query in each sum; then everything is computed in float32.
        """
        dtype = self.dtype if queries is None else torch.float32
        x = F.embedding(ids, self._weights[dtype][EMBEDDING])
        if self.mask_id is not None:
            x = torch.where((ids == self.mask_id)[..., None], self.trained[MASK_ROW].to(dtype), x)
        x.requires_grad_(torch.is_grad_enabled())  # in a causal arm, too, or its first layer would be compiled twice
        half = self._d_head // 2
        speeds = self.config["rope_theta"] ** (-torch.arange(half, device=self.device).float() / half)
        angles = torch.outer(torch.arange(ids.shape[1], device=self.device).float(), speeds).repeat(1, 2)
        sums = []
        for layer in self._layers[dtype]:
            if queries is None:
                x, _ = self._block(x, layer, angles.cos().to(dtype), angles.sin().to(dtype), None)
            else:
                x, found = self._compute(x, layer, angles.cos(), angles.sin(), queries)
                sums.append(found)
        return self._norm(x, self.trained["model.norm.weight"]), torch.stack(sums) if sums else None

    def logits(self, x: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place vocab"]:
        """The head's float32 logits."""
        return F.linear(x, self._weights[x.dtype][EMBEDDING]).float()

    @property
    def _d_head(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self.config["rms_norm_eps"])

    def _compute(
        self, x: Tensor, layer: dict[str, Tensor], cos: Tensor, sin: Tensor, queries: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One layer, and its column sums."""

        def linear(x: Tensor, name: str) -> Tensor:
            a, b = (layer[f"{name}.lora_{letter}.weight"].to(x.dtype) for letter in "AB")
            base = F.linear(x, layer[f"{name}.weight"])
            return torch.addmm(base.flatten(0, 1), F.linear(x, a).flatten(0, 1), b.mT).view_as(base)

        def heads(name: str) -> Tensor:
            return linear(h, f"self_attn.{name}_proj").unflatten(-1, (-1, self._d_head)).transpose(1, 2)

        def rotated(x: Tensor) -> Tensor:
            one, two = x.chunk(2, dim=-1)
            return x * cos + torch.cat([-two, one], dim=-1) * sin

        h, causal, sums = self._norm(x, layer["input_layernorm.weight"]), self.mask_id is None, None
        q, k, v = rotated(heads("q")), rotated(heads("k")), heads("v")
        if queries is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        else:
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
            scores = q @ k.mT / math.sqrt(self._d_head)
            hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1) & causal
            pattern = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            sums, mixed = torch.einsum("bsq,bhqk->bshk", queries, pattern), pattern @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), "self_attn.o_proj")
        h = self._norm(x, layer["post_attention_layernorm.weight"])
        return x + linear(F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj"), sums
