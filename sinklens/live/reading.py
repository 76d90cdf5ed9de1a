"""What a finished run did not keep, computed when the page asks for it: patterns and proposals of one step.

A run without changes is read by one pass of its model over the step's canvas. A run with chips is repeated on its own
canvases up to the step, with the chips, since some of them depend on earlier steps. The same holds for a run whose
steps read keys cached by earlier steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.interventions import MaskedLogits
from sinklens.live.comparing import fitting
from sinklens.live.execution import confidence_hooks, repeat, texts
from sinklens.live.outcome import RunOutcome
from sinklens.live.refusal import require
from sinklens.live.spec import RunSpec
from sinklens.model import Model
from sinklens.runs import Generation
from sinklens.sinks import Record
from sinklens.views.patterns import patterns_at
from sinklens.views.report import build
from sinklens.views.report_data import Material

LISTED = 10  # proposals of a position


def patterns(
    spec: RunSpec, outcome: RunOutcome, model: "Model", step: int, layers: Sequence[int]
) -> Mapping[int, Float[Tensor, "head query key"]]:
    """Attention patterns of one step by layer, on the positions that exist at the step.

    Raises:
        TrackError: no such step or layer.
    """
    run = outcome.generation(model, spec.cache)
    if spec.changes or not _alone(run):
        wanted = Record(patterns=[(step, layer) for layer in layers])
        run.patterns.update(repeat(spec, model, outcome, steps=step + 1, record=wanted).patterns)
    return patterns_at(run, step, layers)


def report(spec: RunSpec, outcome: RunOutcome, model: "Model") -> str:
    """The offline report of a run as one HTML file.

    Raises:
        SettingError: the run is too large for the budget.
    """
    tokenizer, start = model.tokenizer, outcome.prompt_length
    ids = outcome.canvas[0, :start][outcome.real[:start]].tolist()
    material = Material(
        track=outcome.track(),
        canvas=outcome.canvas,
        prompt=f"token ids {ids}" if tokenizer is None else str(tokenizer.decode(ids)),
        answer=f"token ids {outcome.canvas[-1, start:].tolist()}" if tokenizer is None else outcome.answer.text or "",
        patterns=lambda step, layers: patterns(spec, outcome, model, step, layers),
        facts=[] if changed(spec) == "none" else [("changes", changed(spec))],
    )
    return build(material)


def changed(spec: RunSpec) -> str:
    """What changes a run, as its script writes it; "none" for an ordinary run."""
    changes = [change.source() for change in spec.changes]
    return "; ".join([*changes, *([] if spec.replay is None else [f"replays run {spec.replay}"])]) or "none"


def certainty(spec: RunSpec, outcome: RunOutcome, model: "Model") -> Float[np.ndarray, "measure step pos"]:
    """How sure each step is of each undecided position: the largest probability, and the entropy in nats.

    NaN at decided positions, at those that the step does not compute, and at steps left out because the logits of all
    would need too much memory.
    """
    steps = fitting([outcome], model, outcome.steps, 1)
    kept = MaskedLogits(steps=steps)
    repeat(spec, model, outcome, steps=max(steps) + 1, extra=[kept])
    found = np.full((2, outcome.steps, outcome.canvas.shape[1]), np.nan)
    for step, logits in kept.kept.items():
        logs = logits.log_softmax(dim=-1)
        places = _places(outcome, model.tree.causal, step)
        found[0, step, places] = logs.amax(dim=-1).exp()
        found[1, step, places] = torch.special.entr(logs.exp()).sum(dim=-1)
    return found[:, :, outcome.real]


def lens(spec: RunSpec, outcome: RunOutcome, model: "Model", pos: int) -> dict[str, Any]:
    """What each layer predicts at a position, at each step: the logit lens of `experiments.logit_lens`.

    ``token``, ``p``, ``entropy`` (nats) and ``final_p``, the probability of the run's final token: [step, layer].
    """
    from sinklens.experiments import LogitLens, logit_lens

    run = outcome.generation(model, spec.cache)
    if spec.changes or not _alone(run):
        reader = LogitLens(positions=[pos], top_k=1)
        data = reader.read(repeat(spec, model, outcome, extra=[reader]))
    else:
        data = logit_lens(model, run, positions=[pos], top_k=1)
    words = texts(model, {*np.unique(data["token"]).tolist(), int(data["final_token"][0])})
    tokens = data["token"].to_numpy()[:, :, 0, 0].tolist()
    return {
        "pos": pos,
        "steps": data["step"].to_numpy().tolist(),
        "layers": data["layer"].to_numpy().tolist(),
        "final": words.get(int(data["final_token"][0])),
        "token": [[words.get(token, "" if token < 0 else f"⟨{token}⟩") for token in row] for row in tokens],
        "p": _plain(data["probability"].to_numpy()[:, :, 0, 0]),
        "entropy": _plain(data["entropy"].to_numpy()[:, :, 0]),
        "final_p": _plain(data["final_probability"].to_numpy()[:, :, 0]),
    }


def _plain(values: np.ndarray) -> list[Any]:
    """Numbers as JSON; None for those that are not finite."""
    plain = values.astype(object)
    plain[~np.isfinite(values)] = None
    return list(plain.tolist())


def _alone(run: Generation) -> bool:
    """Whether one pass over a step's canvas computes what the step did: nothing was cached before it."""
    return not (run.model.tree.architecture.encoder or run.key_reuse)


def proposals(spec: RunSpec, outcome: RunOutcome, model: "Model", step: int) -> dict[int, dict[str, Any]]:
    """The proposals of a step by position: the likeliest tokens, and the confidence that orders the decisions.

    Positions that the step did not compute, under a cache policy, have none.

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
        if math.isnan(shares[0]):
            continue
        listed = [{"id": token, "text": words.get(token), "p": share} for token, share in zip(ids, shares, strict=True)]
        found[place] = {"confidence": _of(confidence.get(step), place), "proposals": listed}
    return found


def _places(outcome: RunOutcome, causal: bool, step: int) -> list[int]:
    """Positions whose logits `MaskedLogits` kept, in its order."""
    if causal:
        return [outcome.prompt_length + step]
    return (outcome.undecided[step] & outcome.real).nonzero()[0].tolist()


def _of(confidence: Tensor | None, place: int) -> float | None:
    """The confidence of a position; None if the sampler did not consider it."""
    if confidence is None or place >= len(confidence) or not torch.isfinite(confidence[place]):
        return None
    return float(confidence[place])
