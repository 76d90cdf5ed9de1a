"""The keys that an intervention changes, for the queries of each pass: those of its rule, or those of ``where=``.

In a diffusion run the keys of a step are changed for all queries of its pass. In an autoregressive run the keys of a
step are changed for the queries that belong to it, with a key/value cache or without; ``queries=`` says for which.

Caveat: with a key/value cache, a pass has only some keys of the text, to which the positions are cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.choice import KeyChoice
from sinklens.interventions.finders import Finder, finder_of
from sinklens.interventions.previous_sinks import PreviousSinks
from sinklens.interventions.where import AtPositions
from sinklens.runs.intervention import Pairs, QuerySpan, RunContext, layer_of, place_mask

if TYPE_CHECKING:
    from sinklens.model import Model

Reach = Literal["newest", "each", "all"]


def check_queries(queries: str) -> None:
    """Check the name of the affected queries.

    Raises:
        SettingError: an unknown name.
    """
    if queries not in get_args(Reach):
        raise SettingError(f"queries must be one of {', '.join(get_args(Reach))}; got {queries!r}.")


@dataclass(frozen=True, kw_only=True)
class AtKeys(KeyChoice, AtPositions):
    """Base class of interventions on keys, which are chosen by a rule or named by ``where=``."""

    def check_keys(self) -> None:
        """Check the rule; with `where`, that no rule is set.

        Raises:
            SettingError: settings that exclude each other.
        """
        if self.where is None:
            self.check_rule()
            _ = self.track
            return
        if self.top_k is not None or self.detector is not None:
            raise SettingError(
                f"pass one of top_k, detector and where; got where and top_k={self.top_k}, detector={self.detector!r}. "
                f"{type(self).__name__}(top_k=None, where=...) takes all keys there."
            )
        if not self.is_default():
            raise SettingError(
                "with where=, the settings scope, pick, only, same_step, source and persistent have no effect; "
                "pass them to it: where=Where(top_k=1, pick='random')."
            )


def require_run(what: AtPositions, run: RunContext | None) -> RunContext:
    """`run`, if there is one.

    Raises:
        SettingError: a single pass.
    """
    if run is None:
        raise SettingError(
            f"{type(what).__name__} changes keys in a run, which a single pass is not; use it in sinklens.trace or "
            f"sinklens.generate."
        )
    return run


class Chosen(NamedTuple):
    """The keys that a pass treats differently.

    Attributes:
        keys: [batch, head, query, key], or one row for all queries.
        rows: queries of each row of the batch that they apply to; the others are unchanged.
        some: whether there are any keys; None if not known yet.
    """

    keys: Bool[Tensor, "batch head query key"]
    rows: Bool[Tensor, "batch query"]
    some: bool | None = None

    def any(self) -> bool:
        """Whether there are any keys. On a GPU, a known answer avoids waiting for the device."""
        return bool(self.keys.any()) if self.some is None else self.some


class KeyPlaces:
    """The keys of one intervention in one run.

    Attributes:
        layers, heads: as non-negative indices.
    """

    def __init__(self, what: AtKeys, model: "Model", run: RunContext | None, queries: str = "newest") -> None:
        self.layers, self.heads, self._queries = what.chosen_layers(model), what.chosen_heads(model), queries
        self._in_step = what.step_test(run)
        among = None if run is None else place_mask(what.positions, run.real)
        self._sinks: PreviousSinks | None = None
        if what.where is None:
            name = type(what).__name__
            self._sinks = PreviousSinks(what, name, model, run, self.layers, self._in_step, among, self.heads)
        self._run, self._among = require_run(what, run), among
        self._finder: Finder = self._sinks or finder_of(what, model, run, self.layers)
        self._all_heads = len(self.heads) == model.cfg.n_heads
        self._n_heads, self._size = model.cfg.n_heads, 0

    def pairs(self, act: Callable[..., Any], point: str = "hook_attn_mask") -> Pairs:
        """All hooks: those that find the keys, and `act` on an attention point of every chosen layer.

        `at` takes a value of that point, which must have the axes batch, head, query and key.
        """
        counted = [(f"blocks.{layer}.attn.hook_rot_q", self._count) for layer in self.layers if self._run.causal]
        acts = [(f"blocks.{layer}.attn.{point}", act) for layer in self.layers]
        return [*self._finder.first(), *counted, *acts, *self._finder.last()]

    def _count(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        self._size = value.shape[1]

    def at(self, hook: Point, value: Tensor) -> Chosen | None:
        """The keys of this layer and pass, whose attention is `value`; None if there is nothing to do."""
        layer, step = layer_of(hook), int(hook.step or 0)
        if self._run.causal:
            return self._all_rows(layer, step, value) if self._queries == "all" else self._rows(layer, step, value)
        keys = self._keys(step, layer)
        if keys is None:
            return None
        place = hook.key_positions if self._run.tree.watch.length is not None else range(value.shape[-1])
        missing = max(0, place.stop - keys.shape[-1])  # positions that are new, or not among the keys of the pass
        keys = torch.nn.functional.pad(keys, (0, missing))[..., place.start : place.stop]
        some = None if self._sinks is None or not self._all_heads else self._sinks.some(layer)
        return Chosen(keys[:, :, None].to(value.device), self._rows_of(step)[:, None].to(value.device), some)

    def _keys(self, step: int, layer: int) -> Bool[Tensor, "batch #head pos"] | None:
        """The keys of a step, over the text that has been scored or all of it."""
        found = self._finder.at(step, layer) if self._in_step(step) else None
        if found is None:
            return None
        if self._sinks is None:
            assert self._among is not None
            found = found & self._among[:, None, : found.shape[-1]]
        if self._all_heads:
            return found
        kept = torch.zeros(len(found), self._n_heads, found.shape[-1], dtype=torch.bool, device=found.device)
        kept[:, self.heads] = found[:, self.heads] if found.shape[1] > 1 else found
        return kept

    def _rows_of(self, step: int) -> Bool[Tensor, " batch"]:
        """Rows whose keys are known."""
        return self._run.real.any(dim=1) if self._sinks is None else self._sinks.rows(step)

    def _rows(self, layer: int, step: int, value: Tensor) -> Chosen | None:
        """In a causal pass, each token keeps the keys of the step that it belongs to, even when recomputed."""
        size, width = self._size, value.shape[-1]
        found = torch.zeros(*value.shape[:2], size, width, dtype=torch.bool, device=value.device)
        rows = torch.zeros(len(value), size, dtype=torch.bool, device=value.device)
        for part in self._run.query_spans(step, size):
            keys = self._keys(part.step, layer)
            if keys is None:
                continue
            own = self._affected(part)
            found[:, :, own, : keys.shape[-1]] = keys[:, :, None, :width].to(value.device)
            rows[:, own] = self._rows_of(part.step)[:, None].to(value.device)
        return Chosen(found, rows) if bool(rows.any()) else None

    def _affected(self, part: QuerySpan) -> slice:
        """The queries of a span that are affected: in the prompt, only the last token decodes a token."""
        return slice(part.start if self._queries == "each" else part.stop - 1, part.stop)

    def _all_rows(self, layer: int, step: int, value: Tensor) -> Chosen | None:
        """In a complete causal pass, the keys of its newest token apply to all tokens."""
        if self._size < value.shape[-1]:
            raise SettingError(
                "queries='all' changes what earlier tokens computed, which a key/value cache has already stored; run "
                "with use_cache=False."
            )
        keys = self._keys(step, layer)
        if keys is None:
            return None
        width = value.shape[-1]
        found = torch.zeros(*value.shape[:2], 1, width, dtype=torch.bool, device=value.device)
        found[..., : keys.shape[-1]] = keys[:, :, None, :width]
        return Chosen(found, self._rows_of(step)[:, None].to(value.device))
