"""Attention sinks: recorded scores, tracks of them over a run, and detectors."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklens.sinks.detectors import Detector, EpsilonOverMean, TopK
    from sinklens.sinks.recorder import SinkRecorder
    from sinklens.sinks.track import SinkTrack, Unit, build_track

_HOMES = {
    "Detector": "detectors",
    "EpsilonOverMean": "detectors",
    "TopK": "detectors",
    "SinkRecorder": "recorder",
    "SinkTrack": "track",
    "Unit": "track",
    "build_track": "track",
}

__all__ = ["Detector", "EpsilonOverMean", "SinkRecorder", "SinkTrack", "TopK", "Unit", "build_track"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"sinklens.sinks.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
