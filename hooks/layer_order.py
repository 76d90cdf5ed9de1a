"""Passes whose layers run in another order: some skipped, some several times.

The list of layers of a transformers model is replaced while a block lasts. A layer that runs twice passes its hook
points twice; a cache then holds the values of its last run.

Pitfall: a layer finds its cached keys by its own number, so only a permutation works with a key/value cache.
`LayerOrder` refuses other orders in passes that compute a part of the text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sinklens.hooks.tree import HookTree

PER_LAYER = ("layer_types",)  # settings of a config with one entry for each place of a pass


class LayerList:
    """The layers of a model, which can be put into another order and back.

    Args:
        tree: the tree of the model.
    """

    def __init__(self, tree: HookTree) -> None:
        architecture = tree.architecture
        self._base: Any = tree.hf.get_submodule(architecture.base)
        self._name = architecture.layers
        self._layers: Any = self._base.get_submodule(self._name)
        self._config = self._base.config
        self._before = {
            name: getattr(self._config, name)
            for name in ("num_hidden_layers", *PER_LAYER)
            if getattr(self._config, name, None) is not None
        }

    def reorder(self, order: Sequence[int]) -> None:
        """Run the layers `order`, one after the other, in the passes that follow."""
        parent, _, name = self._name.rpartition(".")
        setattr(self._base.get_submodule(parent), name, nn.ModuleList([self._layers[layer] for layer in order]))
        self._config.num_hidden_layers = len(order)
        for key in PER_LAYER:
            if key in self._before:
                setattr(self._config, key, [self._before[key][layer] for layer in order])

    def restore(self) -> None:
        """Run all layers in their own order again."""
        parent, _, name = self._name.rpartition(".")
        setattr(self._base.get_submodule(parent), name, self._layers)
        for key, value in self._before.items():
            setattr(self._config, key, value)


@contextmanager
def layers_in_order(tree: HookTree, order: Sequence[int]) -> Iterator[LayerList]:
    """Run the layers `order` in all passes of a block."""
    layers = LayerList(tree)
    try:
        layers.reorder(order)
        yield layers
    finally:
        layers.restore()
