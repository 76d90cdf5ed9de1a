"""The network of MDLM, BD3-LM, SEDD, Duo and GIDD: a DiT, a transformer whose blocks are modulated by a noise level.

The noise level of each row, its *time*, becomes one vector (`TimeEmbedding`). From it every block makes a shift, a
scale and a gate for its attention and for its MLP (adaptive layer norm, "adaLN"; Peebles & Xie 2023, arXiv 2212.09748):

    x = x + gate_1 · attention(LN_1(x) · (1 + scale_1) + shift_1)
    x = x + gate_2 · mlp(LN_2(x) · (1 + scale_2) + shift_2)

transformers has no class for it, so this one is registered with transformers under the ``model_type`` "adaln_dit", and
everything else treats it like a class of transformers.

The networks of SEDD, Duo and GIDD read the noise level. Those of MDLM and BD3-LM are untimed (``time_conditioning`` is
False): they ignore it, and all modulations are constants. The sampler of each family decides which number it passes as
the time, sigma or t, and sets it before each step. ``run.time`` records it, and further passes over the canvas of that
step use the same value. A pass of your own takes ``time=``: ``run.time[:, step]``, which is also ``of_step(run,
step).time``. An untimed network warns that its ``time=`` has no effect.

Attribution includes the modulation: `hook_result`, `PathPatch`, `edge_attribution`, `write_attribution` and
`read_attribution` carry the gate, receivers the scale, and both lenses shift and scale the stream at every layer as the
noise level of the step does:

    given = of_step(run, 3)
    attribution_patching(model, given.ids, other, metric, names, given.attention_mask, time=given.time)

TransformerLens's decompositions of a cache are refused, because they know no gate, shift and scale.

The prompt is on the canvas in every pass and never changes; the published samplers of Duo, GIDD and ReMDM have no
prompts. It may be empty, except with `bd3lm-owt`: ``sinklens.generate(model, "", gen_length=64)``, or ids of shape
[rows, 0]. ``hooks=[Suffix(text=...)]`` fixes text after the answer. ``denoise.hook_confidence`` is the model's
probability of the token that a position gets, and 0 for a mask; these samplers draw without it, so it cannot be edited.
Cache policies are for untimed networks.

With `mdlm`, `sedd` and `bd3lm-owt`, a run ends once no position is masked; the published code goes through its
remaining steps. While nothing is watched, a step skips its pass if neither the canvas nor the noise level that the
network reads has changed since the last one.

Pitfall: a new network has the initial weights of transformers' classes, so its gates are small random numbers. The
authors start training with gates and logits of zero.
"""

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from sinklens.errors import SettingError, require
from sinklens.families.modulated import DIT_IGNORED
from sinklens.hooks.modulation import Time, modulated

FREQUENCIES = 256  # sinusoids of the time embedding, fixed in all published checkpoints


@strict
class DitConfig(PreTrainedConfig):
    """Sizes of the network, under transformers' names.

    Attributes:
        cond_dim: width of the vector that the modulations are made from.
        time_conditioning: whether the network reads its time; if not, it sees time 0.
        scale_by_sigma: SEDD: the scores are divided by expm1(sigma) · (vocab_size - 1).
        p_uniform: GIDD: share of uniform noise.
        t_eps: GIDD: distance of the first and last time from 0 and 1.
    """

    model_type = "adaln_dit"
    attention_bias: ClassVar = False
    attention_dropout: ClassVar = 0.0

    vocab_size: int = 50258
    hidden_size: int = 768
    cond_dim: int = 128
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None  # four times the width
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 1024
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    time_conditioning: bool = True
    scale_by_sigma: bool = False
    p_uniform: float | int | None = None
    t_eps: float | None = None
    tie_word_embeddings: bool = False
    use_cache: bool = False
    rope_parameters: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check that the width divides into heads of an even width.

        Raises:
            ValueError: it does not.
        """
        require(
            0 <= (self.p_uniform or 0) < 1 and 0 <= (self.t_eps or 0) < 0.5,
            f"p_uniform = {self.p_uniform} and t_eps = {self.t_eps} must be shares, t_eps below 0.5",
            ValueError,
        )
        require(
            not self.hidden_size % (2 * self.num_attention_heads),
            f"the width {self.hidden_size} does not divide into {self.num_attention_heads} heads of an even width",
            ValueError,
        )


class TimeEmbedding(nn.Module):
    """The vector that all modulations are made from: silu(W_2 silu(W_1 [cos(s f), sin(s f)] + b_1) + b_2).

    s is the time, f_k = 10000^(-k / 128) for k = 0 … 127.
    """

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.in_proj = nn.Linear(FREQUENCIES, config.cond_dim)
        self.out_proj = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, time: Float[Tensor, " batch"]) -> Float[Tensor, "batch d_cond"]:
        half = FREQUENCIES // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=time.device) / half)
        angles = time.float()[:, None] * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.in_proj.bias.dtype)  # of a quantized layer, too
        return nn.functional.silu(self.out_proj(nn.functional.silu(self.in_proj(waves))))


class DitNorm(nn.Module):
    """LayerNorm without bias, computed in float32: weight · (x - mean(x)) / sqrt(var(x) + eps)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.weight * nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class Modulate(nn.Module):
    """`modulated` as a module, so that its output can be watched."""

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        shift: Float[Tensor, "batch d_model"],
        scale: Float[Tensor, "batch d_model"],
    ) -> Float[Tensor, "batch pos d_model"]:
        return modulated(x, shift, scale)


class DitMlp(nn.Module):
    """W_2 gelu(W_1 x + b_1) + b_2."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        width = config.intermediate_size or 4 * config.hidden_size
        self.up_proj = nn.Linear(config.hidden_size, width)
        self.down_proj = nn.Linear(width, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        return self.down_proj(self.act_fn(self.up_proj(x)))


class DitBlock(nn.Module):
    """One block; its modulation holds shift, scale and gate of attention, then those of the MLP."""

    def __init__(self, config: DitConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = DitNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = LlamaAttention(config, layer_idx)
        self.self_attn.is_causal = False
        self.post_attention_layernorm = DitNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = DitMlp(config)
        self.modulation = nn.Linear(config.cond_dim, 6 * config.hidden_size)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        condition: Float[Tensor, "batch d_cond"],
        **kwargs: Any,
    ) -> Float[Tensor, "batch pos d_model"]:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).chunk(6, dim=-1)
        mixed, _ = self.self_attn(
            hidden_states=modulated(self.input_layernorm(hidden_states), shift_1, scale_1), **kwargs
        )
        hidden_states = hidden_states + gate_1[:, None] * mixed
        read = modulated(self.post_attention_layernorm(hidden_states), shift_2, scale_2)
        return hidden_states + gate_2[:, None] * self.mlp(read)


class DitPreTrainedModel(PreTrainedModel):
    """What transformers asks of both classes below."""

    config_class = DitConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar = ["DitBlock"]
    _keys_to_ignore_on_load_unexpected: ClassVar = [DIT_IGNORED]
    _supports_sdpa = True
    _supports_attention_backend = True


class DitModel(DitPreTrainedModel):
    """Embedding, blocks, final norm and its modulation."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.time_embed = TimeEmbedding(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.layers = nn.ModuleList(DitBlock(config, number) for number in range(config.num_hidden_layers))
        self.norm = DitNorm(config.hidden_size, config.layer_norm_eps)
        self.modulation = nn.Linear(config.cond_dim, 2 * config.hidden_size)
        self.modulate = Modulate()
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        time: Time = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        inputs_embeds: Float[Tensor, "batch pos d_model"] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """The modulated output of the final norm.

        Args:
            time: the noise level of each row; [1] for all rows. An untimed network does not need it.

        Raises:
            SettingError: a timed network gets no time, or there is one for another number of rows.
        """
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(stream.shape[1], device=stream.device)[None]
        mask = create_causal_mask(self.config, stream, attention_mask, past_key_values, position_ids=position_ids)
        condition = self.time_embed(self.time_of(time, len(stream), stream.device))
        rotation = self.rotary_emb(stream, position_ids=position_ids)
        for layer in self.layers:
            stream = layer(
                stream, condition=condition, attention_mask=mask, position_embeddings=rotation,
                past_key_values=past_key_values, **kwargs,
            )  # fmt: skip
        shift, scale = self.modulation(condition.expand(len(stream), -1)).chunk(2, dim=-1)
        return BaseModelOutput(last_hidden_state=self.modulate(self.norm(stream), shift, scale))

    def time_of(self, time: Time, rows: int, device: torch.device) -> Float[Tensor, " batch"]:
        """The time of each row as the network reads it: zeros for an untimed network.

        Raises:
            SettingError: see `forward`.
        """
        if not self.config.time_conditioning:
            return torch.zeros(rows, device=device)
        require(
            time is not None,
            "this network reads the noise level of its canvas; pass time=, a number or one number for each row. "
            "run.time[:, step] holds the noise levels of a step of a run.",
        )
        times = torch.as_tensor(time, dtype=torch.float32, device=device).reshape(-1)
        require(
            len(times) in (1, rows),
            f"time= has {len(times)} numbers, but the batch has {rows} rows; pass "
            f"{'one' if rows == 1 else f'one, or {rows}'}.",
        )
        if not bool((times >= 0).all()) or bool(times.isinf().any()):
            raise SettingError(f"time= must be finite numbers of at least 0; got {times.tolist()}.")
        return times.expand(rows)


class DitForMaskedLM(DitPreTrainedModel):
    """`DitModel` with a language-model head; position i predicts token i."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__(config)
        self.model = DitModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self, input_ids: Int[Tensor, "batch pos"] | None = None, time: Time = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Raw logits; see `DitModel.forward`."""
        hidden = self.model(input_ids=input_ids, time=time, **kwargs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden))


AutoConfig.register(DitConfig.model_type, DitConfig, exist_ok=True)
AutoModelForCausalLM.register(DitConfig, DitForMaskedLM, exist_ok=True)
