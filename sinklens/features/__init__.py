"""Features: sparse autoencoders (SAEs) and transcoders in a run, and probes.

`load_sae` reads an SAE in SAELens's format, `load_gemma_scope` in Gemma Scope's; `SpliceSAE` replaces an activation by
its reconstruction and ablates or clamps features, and `RandomError` is a control of it; `read_features` says which fire
where in a run, and `summarize_features` where they fire most; `collect` writes activations of runs to disk, `train`
trains SAEs on them, and `assess` and `assess_by_share` say how good one is at masked and at decided positions. Any
object with ``encode`` and ``decode`` is an SAE; a transcoder writes to another point than it reads (``to=``), and
`SpliceCrossLayer` runs one whose features write to all later layers (`load_cross_layer`). `store_size` says beforehand
how much `collect` would write.

Probes say what can be read from activations, where and when, with controls: `probe_data` reads activations of a run
with the labels that the run itself gives (final token, deciding step, state, sink), `probe_table` fits and tests linear
probes by point, step, noise level or state, and `fit_probe` returns one `Probe`, whose direction is an intervention.
"""

from sinklens.features.assessing import assess, assess_by_share
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.collecting import collect, store_size
from sinklens.features.cross_layer import SpliceCrossLayer, load_cross_layer
from sinklens.features.gemma_scope import load_gemma_scope
from sinklens.features.probe_places import ProbeData, joined, probe_data
from sinklens.features.probe_tables import probe_table
from sinklens.features.probes import Probe, fit_probe
from sinklens.features.reading import read_features, summarize_features
from sinklens.features.saelens import load_sae, save_sae, shipped_saes
from sinklens.features.splice import RandomError, SpliceSAE
from sinklens.features.store import ActivationStore
from sinklens.features.training import SAERecipe, train

__all__ = [
    "ActivationStore",
    "Probe",
    "ProbeData",
    "RandomError",
    "SAERecipe",
    "SparseAutoencoder",
    "SpliceCrossLayer",
    "SpliceSAE",
    "assess",
    "assess_by_share",
    "collect",
    "fit_probe",
    "joined",
    "load_cross_layer",
    "load_gemma_scope",
    "load_sae",
    "probe_data",
    "probe_table",
    "read_features",
    "save_sae",
    "shipped_saes",
    "store_size",
    "summarize_features",
    "train",
]
