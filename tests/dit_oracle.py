"""A pass of a published DiT checkpoint in plain torch, from its file and its noise levels, without sinklens.

Values have the names of hook points, and an edit replaces the value of its point on the way. Rows are not padded.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from building import PlainPass
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

PARTS = [f"hook_{part}_{what}" for part in ("attn", "mlp") for what in ("shift", "scale", "gate")]


class PlainDit:
    """The network in a folder; calling it is one pass."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        config = json.loads((folder / "config.json").read_text())
        config = config.get("model", config)
        self.weights = {
            name.removeprefix("backbone."): value.to(dtype) if value.is_floating_point() else value
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self.heads = next(config[key] for key in ("n_heads", "num_attention_heads") if key in config)
        self.timed = config.get("time_conditioning", folder.name not in ("mdlm", "bd3lm-owt"))
        self.layers = sum(name.endswith("norm1.weight") for name in self.weights)

    def __call__(
        self,
        ids: Tensor,
        time: float | Tensor = 0.0,
        edits: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        mask: Tensor | None = None,
    ) -> PlainPass:
        """Logits and values; `mask` is added to all attention scores."""
        w, values = self.weights, {}

        def point(name: str, value: Tensor) -> Tensor:
            values[name] = value if edits is None or name not in edits else edits[name](value)
            return values[name]

        def linear(name: str, x: Tensor) -> Tensor:
            y = x @ w[f"{name}.weight"].T
            return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

        def norm(at: str, name: str, x: Tensor) -> Tensor:
            centered = x - x.mean(-1, keepdim=True)
            scale = point(f"{at}.hook_scale", (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt())
            return point(f"{at}.hook_normalized", centered / scale) * w[f"{name}.weight"]

        stream = point("hook_embed", w["vocab_embed.embedding"][ids])
        cond = point("hook_cond", self.condition(point("hook_time", self.times(time, len(ids)))))
        for number in range(self.layers):
            at, name = f"blocks.{number}", f"blocks.{number}"
            stream = point(f"{at}.hook_resid_pre", stream)
            made = linear(f"{name}.adaLN_modulation", cond).chunk(6, dim=-1)
            shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
                point(f"{at}.adaln.{part}", one)[:, None] for part, one in zip(PARTS, made, strict=True)
            )
            read = norm(f"{at}.ln1", f"{name}.norm1", stream) * (1 + scale_1) + shift_1
            q, k, v = linear(f"{name}.attn_qkv", read).chunk(3, dim=-1)
            q, k, v = (
                point(f"{at}.attn.hook_{letter}", x.unflatten(-1, (self.heads, -1)))
                for letter, x in zip("qkv", (q, k, v), strict=True)
            )
            turned = [point(f"{at}.attn.hook_rot_{letter}", rotated(x)) for letter, x in (("q", q), ("k", k))]
            scores = torch.einsum("bqhd,bkhd->bhqk", *turned) / q.shape[-1] ** 0.5
            scores = point(f"{at}.attn.hook_attn_scores", scores if mask is None else scores + mask)
            pattern = point(f"{at}.attn.hook_pattern", scores.softmax(-1).nan_to_num(0.0))
            z = point(f"{at}.attn.hook_z", torch.einsum("bhqk,bkhd->bqhd", pattern, v))
            output = w[f"{name}.attn_out.weight"].T.unflatten(0, (self.heads, -1))
            result = torch.einsum("bphd,hdm->bphm", z, output) * gate_1[:, :, None]
            result = point(f"{at}.attn.hook_result", result)
            stream = point(f"{at}.hook_resid_mid", stream + point(f"{at}.hook_attn_out", result.sum(2)))
            read = norm(f"{at}.ln2", f"{name}.norm2", stream) * (1 + scale_2) + shift_2
            post = point(f"{at}.mlp.hook_post", functional.gelu(linear(f"{name}.mlp.0", read), approximate="tanh"))
            mlp = point(f"{at}.hook_mlp_out", gate_2 * linear(f"{name}.mlp.2", post))
            stream = point(f"{at}.hook_resid_post", stream + mlp)
        return PlainPass(self.read_out(stream, cond, point), values)

    def times(self, time: float | Tensor, rows: int) -> Tensor:
        """The noise level of each row as the network reads it."""
        given = torch.as_tensor(time, dtype=self.weights["vocab_embed.embedding"].dtype).reshape(-1)
        return given.expand(rows) if self.timed else torch.zeros(rows, dtype=given.dtype)

    def condition(self, time: Tensor) -> Tensor:
        """The vector that modulations are made from."""
        w, steps = self.weights, torch.arange(128) / 128
        angles = time[:, None] * 10000 ** (-steps.to(time))
        x = torch.cat([angles.cos(), angles.sin()], dim=-1)
        for number in (0, 2):
            x = functional.silu(x @ w[f"sigma_map.mlp.{number}.weight"].T + w[f"sigma_map.mlp.{number}.bias"])
        return x

    def read_out(self, stream: Tensor, cond: Tensor, point: Callable[[str, Tensor], Tensor]) -> Tensor:
        """Logits of a stream: the final norm, shift and scale, and the head."""
        w, name = self.weights, "output_layer"
        made = cond @ w[f"{name}.adaLN_modulation.weight"].T + w[f"{name}.adaLN_modulation.bias"]
        shift, scale = (
            point(f"hook_final_{what}", one)[:, None]
            for what, one in zip(("shift", "scale"), made.chunk(2, dim=-1), strict=True)
        )
        centered = stream - stream.mean(-1, keepdim=True)
        normalized = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        normalized = point("ln_final.hook_normalized", normalized) * w[f"{name}.norm_final.weight"]
        return (normalized * (1 + scale) + shift) @ w[f"{name}.linear.weight"].T + w[f"{name}.linear.bias"]


def rotated(x: Tensor) -> Tensor:
    """Queries or keys [batch, pos, head, d_head], rotated by their position."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None].to(x), angle.sin()[:, None].to(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
