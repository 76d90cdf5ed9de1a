"""Definitions of what a sink is, as small classes with one interface.

A detector turns a track into a boolean array [batch, step, layer, head, pos]. A new definition is one subclass.
"""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import xarray as xr

from sinklens.errors import TrackError
from sinklens.sinks.track import SinkTrack, Unit


class Detector(ABC):
    """One definition of a sink."""

    @abstractmethod
    def detect(self, track: SinkTrack) -> xr.DataArray:
        """True where `track` has a sink: [batch, step, layer, head, pos]."""


@dataclass(frozen=True)
class EpsilonOverMean(Detector):
    """The paper's definition (Rulli et al., 2510.15731, Eq. 3).

    Position j is a sink if Ā[j] > (1 / (S − 1)) Σ_{k≠j} Ā[k] + ε, with Ā the score in `unit`.

    Attributes:
        epsilon: ε, in `unit`; the paper uses 3 and does not state the unit.
        unit: "sum" (uniform attention is 1), "percent" or "fraction"; with "fraction" an ε of 1 or more cannot be met.
    """

    epsilon: float = 3.0
    unit: Unit = "sum"

    def detect(self, track: SinkTrack) -> xr.DataArray:
        if self.unit == "fraction" and self.epsilon >= 1:
            warnings.warn(
                f"with unit 'fraction' no score exceeds 1, so epsilon = {self.epsilon} can never be met; "
                f"use unit='sum' or unit='percent'.",
                stacklevel=2,
            )
        score = track.scores(self.unit)
        others = (score.sum("pos") - score) / (score.notnull().sum("pos") - 1).clip(min=1)
        return score > others + self.epsilon


@dataclass(frozen=True)
class TopK(Detector):
    """The `k` strongest keys of every head and step, whatever their score.

    Attributes:
        k: how many; existing positions only.
    """

    k: int = 1

    def detect(self, track: SinkTrack) -> xr.DataArray:
        score = track.scores()
        if not 1 <= self.k <= score.sizes["pos"]:
            raise TrackError(f"k lies between 1 and {score.sizes['pos']}, the number of positions; got {self.k}.")
        strongest = np.argsort(-score.fillna(-np.inf).to_numpy(), axis=-1, kind="stable")[..., : self.k]
        found = np.zeros(score.shape, dtype=bool)
        np.put_along_axis(found, strongest, True, axis=-1)
        return score.copy(data=found) & score.notnull()
