"""Attention sinks: recording a run, sink tracks, detectors, and measures of where sinks are."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.sinks.detectors import (
        Broadcast,
        Detector,
        EpsilonOverMean,
        MeanPlusStd,
        NoOp,
        ResidualPeak,
        SinkRate,
        SmallValueNorm,
        TopK,
        everywhere,
        over_others,
    )
    from sinklens.sinks.quantities import Quantity
    from sinklens.sinks.record import Record
    from sinklens.sinks.strongest import StrongestKeys
    from sinklens.sinks.track import SinkTrack, build_track

_HOMES = {
    "Broadcast": "detectors",
    "Detector": "detectors",
    "EpsilonOverMean": "detectors",
    "MeanPlusStd": "detectors",
    "NoOp": "detectors",
    "Quantity": "quantities",
    "Record": "record",
    "ResidualPeak": "detectors",
    "SinkRate": "detectors",
    "SinkTrack": "track",
    "SmallValueNorm": "detectors",
    "StrongestKeys": "strongest",
    "TopK": "detectors",
    "build_track": "track",
    "everywhere": "detectors",
    "over_others": "detectors",
}

__all__ = [
    "Broadcast",
    "Detector",
    "EpsilonOverMean",
    "MeanPlusStd",
    "NoOp",
    "Quantity",
    "Record",
    "ResidualPeak",
    "SinkRate",
    "SinkTrack",
    "SmallValueNorm",
    "StrongestKeys",
    "TopK",
    "build_track",
    "everywhere",
    "over_others",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.sinks.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
