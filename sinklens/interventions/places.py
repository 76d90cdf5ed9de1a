"""Where an intervention acts in one run: a mask over the positions of the text, for each step and layer.

``positions=`` are the same everywhere; a *finder* (finders.py) finds those of ``where=``. In a diffusion run the mask
of a step applies to all queries of its pass. In an autoregressive run each query has the mask of the step that owns it,
also in later passes that compute it again, so a key/value cache changes nothing.

Limitation: in a single pass there are no steps and no padding, so only arrays and ``positions=`` have a meaning.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.interventions.finders import Finder, finder_of
from sinklens.interventions.where import AtPositions
from sinklens.runs.intervention import Pairs, QuerySpan, RunContext, layer_of, place_mask

if TYPE_CHECKING:
    from sinklens.hooks.points import Point
    from sinklens.model import Model


class Places:
    """The positions of one intervention in one run, as masks over the queries of a pass.

    Args:
        what: the intervention.
        layers: layers that it changes; by default those of `what`.
        queries: whether the positions are those of queries.

    Raises:
        SettingError: `where` has no meaning in this run.
    """

    def __init__(
        self,
        what: AtPositions,
        model: "Model",
        run: RunContext | None,
        layers: Sequence[int] | None = None,
        queries: bool = True,
    ) -> None:
        self._run, self._in_step, self._positions = run, what.step_test(run), what.positions
        self._fixed = None if run is None else place_mask(what.positions, run.real)[:, None]
        self._layers = what.chosen_layers(model) if layers is None else layers
        self._finder: Finder | None = None
        if what.where is not None:
            self._finder = finder_of(what, model, run, self._layers)
            if queries and self._finder.past:
                raise SettingError(
                    f"where={what.where!r} finds keys of the text before, whose queries an autoregressive run has "
                    f"already computed, so {type(what).__name__} would change nothing. Pass a SinkTrack of another run "
                    f"or Where(source=..., same_step=True); or change keys, with AblateValues or MaskSinks."
                )

    def first(self) -> Pairs:
        """The hooks that find positions; list them before those that use them."""
        return [] if self._finder is None else self._finder.first()

    def last(self) -> Pairs:
        """The hooks that keep the scores of a step for the next; list them last."""
        return [] if self._finder is None else self._finder.last()

    def refuse_by_layer(self, point: str) -> None:
        """Check that the positions are the same in all layers, because `point` is in none.

        Raises:
            SettingError: they differ by layer.
        """
        if self._finder is not None and self._finder.by_layer:
            raise SettingError(
                f"where= finds positions for each layer, and {point} is in none; name a head, as in "
                f"Where(top_k=1, of=(layer, head)), or pass an array whose layer axis has size 1."
            )

    def at(self, step: int, layer: int | None) -> Bool[Tensor, "#batch #head pos"] | None:
        """The positions of a step of the run, over the complete text; None for nowhere."""
        assert self._fixed is not None
        if not self._in_step(step):
            return None
        if self._finder is None:
            return self._fixed
        found = self._finder.at(step, layer)
        if found is None:
            return None
        missing = self._fixed.shape[-1] - found.shape[-1]  # not decoded yet
        return torch.nn.functional.pad(found, (0, missing)) & self._fixed

    def in_any_head(self, step: int) -> Bool[Tensor, "#batch pos"] | None:
        """The positions of a step of the run in any layer and head, over the complete text; None for nowhere."""
        by_layer = self._finder is not None and self._finder.by_layer
        found = [mask for layer in (self._layers if by_layer else [None]) if (mask := self.at(step, layer)) is not None]
        return torch.stack([mask.any(dim=1) for mask in found]).any(dim=0) if found else None

    def of_queries(
        self, hook: "Point", queries: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected queries of the pass of a point; None if there are none at this step."""
        step, layer = hook.step or 0, layer_at(hook)
        if self._run is None:
            return self._of_single_pass(layer, queries, device)
        first, spans = self._run.first(step, queries), self._run.query_spans(step, queries)
        if len(spans) == 1:
            return self.of_span(layer, spans[0], first, device)
        found = [(span, mask) for span in spans if (mask := self.of_span(layer, span, first, device)) is not None]
        if not found:
            return None
        heads = max(mask.shape[1] for _, mask in found)
        rows = torch.zeros(len(self._run.real), heads, queries, dtype=torch.bool, device=device)
        for span, mask in found:
            rows[..., span.start : span.stop] = mask
        return rows

    def of_span(
        self, layer: int | None, span: QuerySpan, first: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query"] | None:
        """The affected positions of a span of a pass whose first one is text position `first`; None if none are."""
        if self._run is None:
            return self._of_single_pass(layer, span.stop - span.start, device)
        mask = self.at(span.step, layer)
        return None if mask is None else mask[..., first + span.start : first + span.stop].to(device)

    def _of_single_pass(
        self, layer: int | None, queries: int, device: torch.device
    ) -> Bool[Tensor, "#batch #head query"]:
        """The affected queries of a single pass."""
        fixed = place_mask(self._positions, torch.ones(1, queries, dtype=torch.bool, device=device))[:, None]
        if self._finder is None:
            return fixed
        found = self._finder.at(0, layer)
        assert found is not None, "a single pass has only arrays"
        if found.shape[-1] not in (1, queries):
            raise SettingError(f"where has {found.shape[-1]} positions, and the pass {queries}; give one for each.")
        return found.to(device) & fixed


def layer_at(point: "Point") -> int | None:
    """The layer of a point; None if it is in none."""
    return layer_of(point) if str(point.name).startswith("blocks.") else None


def head_mask(heads: Sequence[int], size: int, device: torch.device) -> Bool[Tensor, " head"]:
    """True at `heads`, of `size` heads."""
    chosen = torch.zeros(size, dtype=torch.bool, device=device)
    chosen[list(heads)] = True
    return chosen


def on_heads(
    mask: Bool[Tensor, "#batch #head query"], heads: Sequence[int], size: int
) -> Bool[Tensor, "#batch head query"]:
    """`mask` at the heads in `heads`, of `size` heads."""
    return mask & head_mask(heads, size, mask.device)[:, None]


def of_any_head(mask: Bool[Tensor, "#batch #head query"], heads: Sequence[int]) -> Bool[Tensor, "#batch query"]:
    """The positions that any of `heads` has."""
    return mask[:, 0] if mask.shape[1] == 1 else mask[:, list(heads)].any(dim=1)
