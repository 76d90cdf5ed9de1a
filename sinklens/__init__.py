"""sinklens: open a diffusion language model while it denoises.

    model = sinklens.load("tiny-llada")
    with sinklens.trace(model, "Question: ...") as t:
        for step in t.steps:
            pattern = t["blocks.2.attn.hook_pattern"]
    print(t.text)

`load` loads a model, `trace` opens a denoising run as a block, `generate` runs one without a block, and `lab` shows a
live run in the browser. Submodules are imported on first use, so ``import sinklens`` is fast.
"""

from typing import TYPE_CHECKING, Any

from sinklens.errors import SinklensError

if TYPE_CHECKING:
    from sinklens.live import lab
    from sinklens.model import Model, borrow, load
    from sinklens.runs import Trace, generate, replay, trace
    from sinklens.runs.result import Answer, Generation
    from sinklens.sinks.track import SinkTrack

__version__ = "0.3.0"
__all__ = [
    "Answer", "Generation", "Model", "SinkTrack", "SinklensError", "Trace", "borrow", "generate", "lab", "load",
    "replay", "trace",
]  # fmt: skip

_HOMES = {
    "Answer": "sinklens.runs.result",
    "Generation": "sinklens.runs.result",
    "Model": "sinklens.model",
    "SinkTrack": "sinklens.sinks.track",
    "Trace": "sinklens.runs",
    "borrow": "sinklens.model",
    "generate": "sinklens.runs",
    "lab": "sinklens.live",
    "load": "sinklens.model",
    "replay": "sinklens.runs",
    "trace": "sinklens.runs",
}
_MODULES = (
    "analyses", "cli", "errors", "evaluation", "experiments", "families", "features", "hooks", "interventions",
    "live", "model", "runs", "sampling", "sinks", "tasks", "utils", "views",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"sinklens.{name}")
    raise AttributeError(f"module 'sinklens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
