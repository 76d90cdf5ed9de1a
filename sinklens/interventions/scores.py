"""The scores of each step, collected while a run lasts for the rules of the next step.

In a diffusion run they are the column sums of ``hook_sink_scores``. In an autoregressive run they are the last token's
attention, which is computed here from its query, all keys and the additive mask.

Limitation: in an autoregressive run, that last row ignores edits that later hooks make to ``hook_attn_mask``, to the
scores or to the pattern. List interventions on the mask before this one.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.hooks.normalizers import normalizer_of
from sinklens.hooks.points import Point
from sinklens.interventions.controls import Scores
from sinklens.runs.intervention import Pairs, RunContext, layer_of

if TYPE_CHECKING:
    from sinklens.model import Model


class StepScores:
    """The scores of some layers.

    Attributes:
        now: by layer, those of the step that runs, on the device where keys are chosen.
        starts: by layer, the first text position that is a key, where a window hides others.
    """

    def __init__(self, model: "Model", run: RunContext, layers: Iterable[int]) -> None:
        self._run, self._layers, self._scale = run, sorted(layers), model.cfg.d_head**-0.5
        self.now: dict[int, Scores] = {}
        self.starts: dict[int, int] = {}
        self._query: Tensor | None = None
        self._key: Tensor | None = None

    def begin(self) -> tuple[dict[int, Scores], dict[int, int]]:
        """Begin a step; returns `now` and `starts` of the step before."""
        before = self.now, self.starts
        self.now, self.starts = {}, {}
        return before

    def first(self) -> Pairs:
        """Hooks to list before those that use the scores."""
        found: Pairs = []
        for layer in self._layers if self._run.causal else ():
            at = f"blocks.{layer}.attn"
            found += [(f"{at}.hook_rot_q", self._keep_query), (f"{at}.hook_rot_k", self._keep_key)]
        return found

    def last(self) -> Pairs:
        """Hooks to list after them, which see the attention as it was used."""
        point, keep = ("hook_attn_mask", self._last_row) if self._run.causal else ("hook_sink_scores", self._keep)
        return [(f"blocks.{layer}.attn.{point}", keep) for layer in self._layers]

    def _keep(self, value: Scores, hook: Point) -> None:
        if self._run.tree.watch.length is not None:
            start = self.starts[layer_of(hook)] = hook.key_positions.start
            value = torch.nn.functional.pad(value, (start, 0))
        self.now[layer_of(hook)] = value.to(self._run.real.device)  # layers may be on several devices

    def _keep_query(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._query = value

    def _keep_key(self, value: Float[Tensor, "batch key kv_head d_head"], hook: Point) -> None:
        self._key = value

    def _last_row(self, value: Float[Tensor, "batch head query key"], hook: Point) -> None:
        """The attention of the last token, from its query, all keys and the mask as it was used."""
        assert self._query is not None
        assert self._key is not None
        query, key = self._query[:, -1].float(), self._key.float()
        key = key.repeat_interleave(query.shape[1] // key.shape[2], dim=2)
        scores = torch.einsum("bhd,bkhd->bhk", query, key) * self._scale + value[:, :, -1].float()
        real = self._run.real[:, : scores.shape[-1]].to(scores.device)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        counts = real.sum(dim=1)[:, None, None]  # uniform attention is 1, as in column sums
        weights = normalizer_of(self._run.tree.hf)(scores[:, :, None], counts[..., None])[:, :, 0]
        self.now[layer_of(hook)] = (weights * counts).to(self._run.real.device)
