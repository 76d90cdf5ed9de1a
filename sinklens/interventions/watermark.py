"""A watermark: every draw of a token is biased toward a list that a key selects.

The logits of the tokens on a *green list*, a share γ of the vocabulary, are raised by δ before a token is proposed
(Kirchenbauer et al., 2301.10226). The list is one for all positions (Zhao et al., 2306.17439), or it depends on the
token before, as in the original. benchmarks/papers/watermarks.py counts green tokens in a text.

Pitfall: a diffusion model decides positions in any order. With ``context="previous"`` a position whose left neighbor is
undecided has no list yet and is drawn without bias; the more tokens a step decides, the weaker the mark.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.runs.intervention import Canvas, Intervention, Pairs, RunContext

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class GreenList(Intervention):
    """Raise the logits of the tokens on a green list.

        generate(model, prompt, hooks=GreenList(key=7, delta=3.0), temperature=1.0)

    Attributes:
        key: the secret; another key gives other lists.
        share: γ, the share of the vocabulary that is green, in (0, 1).
        delta: δ, added to green logits.
        context: "none" for one list, or "previous" for a list that depends on the token before.

    Raises:
        SettingError: a share or context out of range, or a model whose canvas is random tokens.
    """

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads", "positions")

    key: int
    share: float = 0.25
    delta: float = 2.0
    context: Literal["none", "previous"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise SettingError(f"share is the green part of the vocabulary, above 0 and below 1; got {self.share}.")
        if self.context not in ("none", "previous"):
            raise SettingError(f"context must be 'none' or 'previous'; got {self.context!r}.")

    def green(self, vocabulary: int, previous: int = -1) -> Bool[Tensor, " vocab"]:
        """The green tokens.

        Args:
            vocabulary: number of tokens.
            previous: the token before, for ``context="previous"``.
        """
        return _green(self.key, self.share, vocabulary, previous if self.context == "previous" else -1)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        if run.tree.changes_attention and not run.causal:
            raise SettingError(
                f"{type(self).__name__} knows one token per position and pass, and passes of {model.family} models "
                f"also predict next tokens; use a hook function at denoise.hook_logits."
            )
        in_step, canvas = self.step_test(run), Canvas(run)

        def raised(value: Float[Tensor, "batch pos vocab"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            if self.context == "none":
                return value + self.delta * self.green(value.shape[-1]).to(value)
            before = _before(canvas, value.shape[1], hook, run)
            return value + self.delta * self._lists(before, value.shape[-1]).to(value)

        return [("denoise.hook_canvas", canvas.hook), ("denoise.hook_logits", raised)]

    def _lists(self, before: Int[Tensor, "batch pos"], vocabulary: int) -> Bool[Tensor, "batch pos vocab"]:
        """The list of each position; nothing where the token before is not known."""
        tokens, place = before.unique(return_inverse=True)
        none = torch.zeros(vocabulary, dtype=torch.bool)
        lists = [none if token < 0 else self.green(vocabulary, token) for token in tokens.tolist()]
        return torch.stack(lists).to(before.device)[place]


def _before(canvas: Canvas, size: int, hook: Point, run: RunContext) -> Int[Tensor, "batch pos"]:
    """The token before each position that logits are for; -1 where it is undecided or there is none."""
    assert canvas.now is not None, "every step of a run has a canvas"
    ids, undecided = canvas.now.ids, canvas.now.undecided
    if run.causal:
        return ids[:, -1:]
    hidden = undecided | ~run.real[:, : ids.shape[1]].to(ids.device)
    shifted = torch.nn.functional.pad(ids.masked_fill(hidden, -1)[:, :-1], (1, 0), value=-1)
    first = 0 if size == ids.shape[1] else hook.forward_pass.queries.start
    return shifted[:, first : first + size]


@lru_cache(maxsize=1024)
def _green(key: int, share: float, vocabulary: int, previous: int) -> Bool[Tensor, " vocab"]:
    """A random part of the vocabulary that depends on the key and the token before."""
    digest = hashlib.sha256(repr((key, previous)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    found = torch.zeros(vocabulary, dtype=torch.bool)
    found[torch.randperm(vocabulary, generator=generator)[: max(1, round(share * vocabulary))]] = True
    return found
