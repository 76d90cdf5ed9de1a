"""The loss of one pass: of the next token, or of the tokens behind the masks of a canvas.

An autoregressive model is trained on −log p(next token). A masked diffusion model is trained on canvases: positions of
a text x are masked with a probability t. The loss of the canvas is −log p(x_i | canvas), summed over its masked
positions i and divided by t and by the number of positions (Nie et al., 2025, Large Language Diffusion Models, eq. 3).
The canvas does not record t. The loss therefore uses the share of masked positions, so that the loss of a row is the
mean over its masked positions, and the loss of a batch is the mean over its rows.

What was behind the masks is not on the canvas; the caller passes it as ``targets``. Not included: weights that a
checkpoint's training gave to individual positions (Dream), and the loss of a canvas of random tokens (DiffusionGemma).

Silent failure that is refused: a block-causal model is trained with all blocks before a masked one decided. With masks
in two blocks of a row, a pass conditions the later one on masks, as no training step does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.utilities import lm_cross_entropy_loss

from sinklens.errors import SettingError, require
from sinklens.hooks.attention.blocks import Blocks

Loss = Callable[..., Tensor]  # of the logits of a pass, and of whether to return that of each token


def next_token_loss(ids: Int[Tensor, "batch pos"], real: Tensor | None) -> Loss:
    """−log p of each next token, as TransformerLens computes it; `real` is False on padding."""
    return lambda logits, per_token=False: lm_cross_entropy_loss(logits, ids, real, per_token)


def _masked_loss(
    masked: Bool[Tensor, "batch pos"],
    targets: Int[Tensor, "batch pos"],
    own: Bool[Tensor, "batch pos"] | None,
    logits: Float[Tensor, "batch pos vocab"],
    per_token: bool = False,
) -> Tensor:
    """The mean over the masked positions of each row and then over rows; or [batch, pos], 0 where not masked.

    Args:
        own: positions whose own logits predict them although the model's logits are about the next position: the first
            real token of each row. None if all logits are about their own position.
    """
    if own is not None:
        logits = torch.where(own[..., None], logits, torch.cat([logits[:, :1], logits[:, :-1]], dim=1))
    targets = torch.where(masked, targets, 0)
    lost = -logits.float().log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]
    lost = torch.where(masked, lost, 0.0)
    return lost if per_token else (lost.sum(dim=1) / masked.sum(dim=1)).mean()


@dataclass(frozen=True)
class Masks:
    """How a masked diffusion model reads a canvas.

    Attributes:
        token: the mask token.
        shift: whether its logits at a position predict the token at the next one.
        blocks: the blocks of a block-causal model; None for other attention.
    """

    token: int
    shift: bool
    blocks: Blocks | None = None

    def loss(
        self,
        canvas: Int[Tensor, "batch pos"],
        targets: Int[Tensor, "batch pos"] | None,
        real: Bool[Tensor, "batch pos"] | None,
    ) -> Loss:
        """The loss of a pass over `canvas`.

        Raises:
            SettingError: there are no targets, a row has no masks, the targets have another shape or masks themselves,
                or the masks of a row of a block-causal model are in several blocks.
        """
        real = torch.ones_like(canvas, dtype=torch.bool) if real is None else real.to(canvas.device).bool()
        masked = (canvas == self.token) & real
        self._check(canvas, masked, targets)
        assert targets is not None
        if self.blocks is not None:
            number = self.blocks.numbers(real)
            low = number.masked_fill(~masked, number.max() + 1).amin(dim=1)
            high = number.masked_fill(~masked, -1).amax(dim=1)
            if bool((low != high).any()):
                row = int((low != high).nonzero()[0])
                raise SettingError(
                    f"row {row} has masks in blocks {int(low[row])} to {int(high[row])}, but a block-causal model is "
                    f"trained with the blocks before a masked one decided; pass a canvas for each block, masked in "
                    f"that block alone."
                )
        own = real & (real.long().cumsum(dim=1) == 1) if self.shift else None
        return partial(_masked_loss, masked, targets.to(canvas.device), own)

    def _check(self, canvas: Tensor, masked: Tensor, targets: Tensor | None) -> None:
        if bare := (~masked.any(dim=1)).nonzero().flatten().tolist():
            raise SettingError(
                f"row {bare[0]} has no mask token ({self.token}). The loss of a diffusion model is that of the tokens "
                f"behind the masks: pass a canvas with masks, and as targets= the ids of the text without them."
            )
        if targets is None:
            raise SettingError(
                "a canvas does not say which tokens are behind its masks; pass their ids as targets= [batch, pos], "
                "such as run.tokens or the text before it was masked."
            )
        require(
            targets.shape == canvas.shape,
            f"targets= has the shape of the canvas, {list(canvas.shape)}; got {list(targets.shape)}.",
        )
        behind = targets.to(canvas.device)[masked]
        require(
            not bool(((behind == self.token) | (behind < 0)).any()),
            "targets= has no token at some masked positions (a mask, or -1); pass the full text.",
        )
