"""Features: sparse autoencoders (SAEs) in a run, and probes.

`load_sae` reads an SAE in SAELens's format; `SpliceSAE` replaces an activation by its reconstruction and ablates or
clamps features; `read_features` says which fire where in a run, and `summarize_features` where they fire most;
`save_neuronpedia` and `save_feature_graph` write them for other pages; `collect` writes activations of runs to disk,
and `assess` says how good an SAE is at masked and at decided positions. Any object with ``encode`` and ``decode`` is an
SAE.

Probes say what can be read from activations, where and when, with controls: `probe_data` reads activations of a run
with the labels that the run itself gives (final token, deciding step, state, sink), `probe_table` fits and tests linear
probes by point, step, noise level or state, and `fit_probe` returns one `Probe`, whose direction is an intervention.
"""

from sinklens.features.assessing import assess
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.collecting import collect
from sinklens.features.graphs import save_feature_graph
from sinklens.features.hub import push_to_hub
from sinklens.features.neuronpedia import save_neuronpedia
from sinklens.features.probe_places import ProbeData, probe_data
from sinklens.features.probe_tables import probe_table
from sinklens.features.probes import Probe, fit_probe
from sinklens.features.reading import read_features, summarize_features
from sinklens.features.saelens import load_sae, save_sae, shipped_saes
from sinklens.features.splice import SpliceSAE
from sinklens.features.store import ActivationStore

__all__ = [
    "ActivationStore",
    "Probe",
    "ProbeData",
    "SparseAutoencoder",
    "SpliceSAE",
    "assess",
    "collect",
    "fit_probe",
    "load_sae",
    "probe_data",
    "probe_table",
    "push_to_hub",
    "read_features",
    "save_feature_graph",
    "save_neuronpedia",
    "save_sae",
    "shipped_saes",
    "summarize_features",
]
