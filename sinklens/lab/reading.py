"""What a finished run did not keep, computed again when the page asks for it: patterns and proposals of one step.

A run without changes is read by one pass of its model over the step's canvas. A run with chips is repeated on its own
canvases up to the step, with the chips, since some of them depend on earlier steps; so is a run of a model with an
encoder, whose steps depend on the logits of the step before.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.interventions import MaskedLogits
from sinklens.lab.execution import confidence_hooks, repeat, texts
from sinklens.lab.outcome import Outcome
from sinklens.lab.refusal import require
from sinklens.lab.spec import RunSpec
from sinklens.sinks.record import Record
from sinklens.views.patterns import patterns_at

if TYPE_CHECKING:
    from sinklens.model import Model

LISTED = 10  # proposals of a position


def patterns(
    spec: RunSpec, outcome: Outcome, model: "Model", step: int, layers: Sequence[int]
) -> Mapping[int, Float[Tensor, "head query key"]]:
    """Attention patterns of one step by layer, on the positions that exist at the step.

    Raises:
        TrackError: no such step or layer.
    """
    run = outcome.generation(model)
    if spec.changes or model.tree.architecture.encoder:
        wanted = Record(patterns=[(step, layer) for layer in layers])
        run.patterns.update(repeat(spec, model, outcome, steps=step + 1, record=wanted).patterns)
    return patterns_at(run, step, layers)


def proposals(spec: RunSpec, outcome: Outcome, model: "Model", step: int) -> dict[int, dict[str, Any]]:
    """The proposals of a step by position: the likeliest tokens, and the confidence that orders the decisions.

    Raises:
        SettingError: the sampler computes only some of the undecided positions.
    """
    kept, confidence = MaskedLogits(steps=[step]), dict[int, Tensor]()
    run = repeat(spec, model, outcome, steps=step + 1, extra=[*confidence_hooks(model, confidence), kept])
    require(step in kept.kept, f"step {step} made no proposals.", 404)
    probabilities = kept.kept[step].softmax(dim=-1)
    places = _places(outcome, run.model.tree.causal, step)
    best = probabilities.topk(min(LISTED, probabilities.shape[-1]), dim=-1)
    words = texts(model, set(best.indices.flatten().tolist()))
    found = {}
    for place, shares, ids in zip(places, best.values.tolist(), best.indices.tolist(), strict=True):
        listed = [{"id": token, "text": words.get(token), "p": share} for token, share in zip(ids, shares, strict=True)]
        found[place] = {"confidence": _of(confidence.get(step), place), "proposals": listed}
    return found


def _places(outcome: Outcome, causal: bool, step: int) -> list[int]:
    """Positions whose logits `MaskedLogits` kept, in its order."""
    if causal:
        return [outcome.prompt_length + step]
    return (outcome.undecided[step] & outcome.real).nonzero()[0].tolist()


def _of(confidence: Tensor | None, place: int) -> float | None:
    """The confidence of a position; None if the sampler did not consider it."""
    if confidence is None or place >= len(confidence) or not torch.isfinite(confidence[place]):
        return None
    return float(confidence[place])
