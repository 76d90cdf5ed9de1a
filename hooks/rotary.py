"""The rotary position embedding of a model, as a matrix for each position.

A rotated query at position i is ``q @ R(i)``, and a rotated key at j is ``k @ R(j)``; their product is q R(i) R(j)ᵀ kᵀ,
which depends on i − j. Dimension m of the first half of the rotated dimensions turns together with dimension m of the
second half; dimensions beyond the rotated ones stay as they are.

Pitfall: positions are counted from the first real token, so they differ from canvas columns in a padded batch.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import require


def rotations(tree: Any, positions: Int[Tensor, " pos"]) -> Float[Tensor, "pos d_head d_head"]:
    """R for each position, in float32: a rotated query or key is ``x @ R``.

    Raises:
        SettingError: the layers of the model rotate differently, or not at all.
    """
    architecture, d_head = tree.architecture, tree.cfg.d_head
    require(
        not architecture.encoder,
        f"the layers of a {tree.hf.config.model_type} model rotate differently, so there is no single rotation; "
        f"compare hook_q_normed and hook_rot_q of a layer.",
    )
    require(
        architecture.rotary,
        f"a {tree.hf.config.model_type} model does not rotate queries and keys; positions are in hook_pos_embed.",
    )
    embedding = tree.hf.get_submodule(f"{architecture.base}.{architecture.rotary}")
    like = torch.zeros(1, device=tree.cfg.device)  # float32; the model rounds to its own type
    cos, sin = (part[0][:, None] for part in embedding(like, positions[None].to(like.device)))
    size = cos.shape[-1]
    identity = torch.eye(d_head, device=like.device).expand(len(positions), -1, -1)
    turned, kept = identity.split([size, d_head - size], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, kept], dim=-1)
