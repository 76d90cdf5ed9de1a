"""Probes: what can be read from activations, where and when, with controls.

`probe_data` reads activations of a run with the labels that the run itself gives (final token, deciding step, state,
sink), `probe_table` fits and tests linear probes by point, step, noise level or state, and `fit_probe` returns one
`Probe`, whose direction is an intervention.
"""

from sinklens.probes.data import ProbeData, joined, probe_data
from sinklens.probes.fitting import Probe, fit_probe
from sinklens.probes.tables import ProbeTest, probe_table

__all__ = ["Probe", "ProbeData", "ProbeTest", "fit_probe", "joined", "probe_data", "probe_table"]
