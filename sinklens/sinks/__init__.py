"""Attention sinks: recording a run, sink tracks, detectors, and measures of where sinks are."""

from typing import TYPE_CHECKING

from sinklens.utils.lazy import lazily

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
    "Broadcast": "sinklens.sinks.detectors",
    "Detector": "sinklens.sinks.detectors",
    "EpsilonOverMean": "sinklens.sinks.detectors",
    "MeanPlusStd": "sinklens.sinks.detectors",
    "NoOp": "sinklens.sinks.detectors",
    "Quantity": "sinklens.sinks.quantities",
    "Record": "sinklens.sinks.record",
    "ResidualPeak": "sinklens.sinks.detectors",
    "SinkRate": "sinklens.sinks.detectors",
    "SinkTrack": "sinklens.sinks.track",
    "SmallValueNorm": "sinklens.sinks.detectors",
    "StrongestKeys": "sinklens.sinks.strongest",
    "TopK": "sinklens.sinks.detectors",
    "build_track": "sinklens.sinks.track",
    "everywhere": "sinklens.sinks.detectors",
    "over_others": "sinklens.sinks.detectors",
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


__getattr__ = lazily(__name__, _HOMES)
