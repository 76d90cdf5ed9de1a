"""The numbers of a finished run as JSON, in the arrays that the report's page reads.

The report embeds these arrays in its file; a server sends them. Either way the sinks and strongest keys are those
computed in Python (report_data.py), and the browser runs one copy of the code that draws them.

Limitation: the arrays hold every step. Maps of scores are sent by layer, because those of all layers of a large model
take hundreds of megabytes.
"""

import base64
from typing import Any

from sinklens.views.attention import CELLS
from sinklens.views.report_data import Numbers


def run_data(numbers: Numbers) -> dict[str, Any]:
    """Sizes, vocabulary and the arrays of all steps (canvas, decisions, strongest keys), bytes in base64."""
    steps = range(numbers.steps)
    info = {
        **numbers.info(steps),
        "held": list(range(numbers.layers)),
        "start": numbers.most_moving(range(numbers.layers)),
        "cells": CELLS,
    }
    return {"info": info, "chunks": {name: _text(content) for name, content in numbers.shared_chunks(steps).items()}}


def layer_maps(numbers: Numbers, layer: int | None) -> dict[str, Any]:
    """Scores and sinks of a layer, the mean over its heads first; None: only the mean over all heads."""
    scores, sinks, peaks = numbers.maps(layer, range(numbers.steps))
    return {"scores": _text(scores), "sinks": _text(sinks), "peaks": peaks}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
