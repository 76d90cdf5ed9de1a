"""Features: sparse autoencoders (SAEs) in a run.

`load_sae` reads an SAE in SAELens's format; `SpliceSAE` replaces an activation by its reconstruction and ablates or
clamps features; `read_features` says which fire where in a run; `collect` writes activations of runs to disk, `train`
trains an SAE on them, and `assess` says how good it is at masked and at decided positions. Any object with ``encode``
and ``decode`` is an SAE. `collect_sinks` writes the sinks of many runs to one store. `store_size` says beforehand how
much `collect` would write, and `export_store` and `store_frame` hand it to other tools.
"""

from sinklens.features.assessing import assess
from sinklens.features.autoencoder import SAE, SparseAutoencoder
from sinklens.features.collecting import collect
from sinklens.features.collecting_sinks import collect_sinks
from sinklens.features.exporting import StoreSize, export_store, store_frame, store_size
from sinklens.features.reading import read_features
from sinklens.features.saelens import load_sae, save_sae, shipped_saes
from sinklens.features.splice import SpliceSAE
from sinklens.features.store import ActivationStore
from sinklens.features.training import SAERecipe, TrainedSAE, train

__all__ = [
    "SAE",
    "ActivationStore",
    "SAERecipe",
    "SparseAutoencoder",
    "SpliceSAE",
    "StoreSize",
    "TrainedSAE",
    "assess",
    "collect",
    "collect_sinks",
    "export_store",
    "load_sae",
    "read_features",
    "save_sae",
    "shipped_saes",
    "store_frame",
    "store_size",
    "train",
]
