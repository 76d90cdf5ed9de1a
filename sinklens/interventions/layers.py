"""Run the layers of a model in another order, for all positions of a pass.

A permutation swaps layers, a number that occurs twice repeats one, and a missing number skips one without computing it.
`SkipLayers` skips a layer at some steps and positions only.

Pitfall: a layer that does little at one noise level may matter at another. Compare the effect by step, under replay.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.layer_order import LayerList, layers_in_order
from sinklens.hooks.points import Point
from sinklens.interventions.places import CANVAS
from sinklens.runs.intervention import Intervention, Pairs, RunContext, whole_numbers, within

if TYPE_CHECKING:
    from sinklens.model import Model

CACHES = ("use_cache", "use_block_cache")


@dataclass(frozen=True)
class LayerOrder(Intervention):
    """Run the layers of a model in another order.

        LayerOrder([0, 2, 1, 3])  # layers 1 and 2 swapped
        LayerOrder([0, 1, 1, 2, 3])  # layer 1 twice
        with LayerOrder([0, 1, 3]).applied(model):  # a single pass without layer 2
            logits = model(ids)

    Attributes:
        order: the layers of a pass, first to last.
        steps: steps with this order; None means all.

    Raises:
        SettingError: an empty order, a layer that does not exist, ``layers=``, ``heads=`` or ``positions=``; in a run,
            an order that is no permutation in passes that compute only a part of the text (with a key/value cache or a
            cache policy); a model with an encoder.
    """

    changes_model: ClassVar[bool] = True
    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads", "positions")
    indexed: ClassVar[tuple[str, ...]] = ("order",)

    order: Sequence[int]

    @contextmanager
    def applied(self, model: "Model") -> Iterator[None]:
        with layers_in_order(model.tree, self._numbers(model)):
            yield

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        order = self._numbers(model)
        if run.single:
            raise SettingError(
                "LayerOrder changes the model and not a point, so a single pass cannot take it as hooks; write "
                "`with LayerOrder(order).applied(model):` around the pass."
            )
        permutation = sorted(order) == list(range(model.cfg.n_layers))
        if not permutation and any(json.loads(run.settings).get(name) for name in CACHES):
            raise SettingError(self._of_a_part("steps with use_cache=True compute"))
        in_step, layers = self.step_test(run), LayerList(model.tree)

        def begin(value: Tensor, hook: Point) -> None:
            if in_step(hook.step or 0):
                layers.reorder(order)
            else:
                layers.restore()

        def complete(value: Tensor, hook: Point) -> None:
            now = hook.forward_pass
            if in_step(hook.step or 0) and (now.first(value.shape[1]) or now.computed is not None):
                raise SettingError(self._of_a_part(f"step {hook.step} computes"))

        checks: Pairs = [] if permutation else [(f"blocks.{order[0]}.hook_resid_pre", complete)]
        return [(CANVAS, begin), *checks]

    def _of_a_part(self, what: str) -> str:
        return (
            f"LayerOrder({list(self.order)}) skips or repeats layers, and {what} only a part of the text: other keys "
            f"come from a cache, by the number of their layer. Run with use_cache=False and without cache=, or pass a "
            f"permutation of all layers."
        )

    def _numbers(self, model: "Model") -> list[int]:
        """The order as indices from 0."""
        if model.tree.architecture.encoder:
            raise SettingError(f"LayerOrder is not available for {model.family} models, which have an encoder.")
        numbers = whole_numbers("layer", self.order)
        return [within("layer", [number], model.cfg.n_layers)[0] for number in numbers]
