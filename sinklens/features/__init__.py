"""Features: sparse autoencoders (SAEs) and transcoders in a run.

`load_sae` reads an SAE in SAELens's format, `load_gemma_scope` in Gemma Scope's; `SpliceSAE` replaces an activation by
its reconstruction and ablates or clamps features, and `RandomError` is a control of it; `read_features` says which fire
where in a run, and `summarize_features` where they fire most; `collect` writes activations of runs to disk, `train` and
`train_many` train SAEs on them, and `assess` and `assess_by_share` say how good one is at masked and at decided
positions. Any object with ``encode`` and ``decode`` is an SAE; a `Transcoder` writes to another point than it reads
(``to=``), and `SpliceCrossLayer` runs one whose features write to all later layers (`load_cross_layer`).
`collect_sinks` writes the sinks of many runs to one store. `store_size` says beforehand how much `collect` would write,
and `export_store` and `store_frame` hand it to other tools."""

from sinklens.features.assessing import assess
from sinklens.features.autoencoder import SAE, SparseAutoencoder, Transcoder
from sinklens.features.by_share import assess_by_share
from sinklens.features.collecting import collect
from sinklens.features.collecting_sinks import collect_sinks
from sinklens.features.cross_layer import SpliceCrossLayer, load_cross_layer, save_cross_layer
from sinklens.features.examples import FeatureExample, FeatureSummary, summarize_features
from sinklens.features.exporting import StoreSize, export_store, store_frame, store_size
from sinklens.features.gemma_scope import load_gemma_scope, save_gemma_scope
from sinklens.features.random_error import RandomError
from sinklens.features.reading import read_features
from sinklens.features.saelens import load_sae, save_sae, shipped_saes
from sinklens.features.splice import SpliceSAE
from sinklens.features.store import ActivationStore
from sinklens.features.training import SAERecipe, TrainedSAE, train, train_many

__all__ = [
    "SAE",
    "ActivationStore",
    "FeatureExample",
    "FeatureSummary",
    "RandomError",
    "SAERecipe",
    "SparseAutoencoder",
    "SpliceCrossLayer",
    "SpliceSAE",
    "StoreSize",
    "TrainedSAE",
    "Transcoder",
    "assess",
    "assess_by_share",
    "collect",
    "collect_sinks",
    "export_store",
    "load_cross_layer",
    "load_gemma_scope",
    "load_sae",
    "read_features",
    "save_cross_layer",
    "save_gemma_scope",
    "save_sae",
    "shipped_saes",
    "store_frame",
    "store_size",
    "summarize_features",
    "train",
    "train_many",
]
