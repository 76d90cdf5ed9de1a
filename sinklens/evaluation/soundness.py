"""Signs of damage in the weights or settings of an unknown model.

`damage_checks` makes three checks, none of which needs a reference. They name everything suspicious, with its numbers:

- *loss*: of two fixed English texts, the one that the model knows better is scored, with 1/7 of its tokens masked at a
  time (a causal model predicts each next token; a model with a noise schedule gets 15 % noise). A sound model is below
  0.6 log(vocabulary) and below the loss of the same tokens shuffled.
- *undone damage*: the loss is measured again after each change that would undo typical damage: a square matrix
  transposed, two modules of one shape or two neighboring layers exchanged, a layer left out, another rope theta or
  epsilon of the norms. A change makes a sound model worse. One that improves a model points to the damage. A change
  that makes the first of several texts worse is not measured on the others.
- *layers*: weights that are zero, or whose root mean square is ten times larger or smaller than in the nearest layers;
  attention whose entropy, in one pass, is far from the neighbors'.

On the shipped models they raise no false alarm, and notice a transposed projection, exchanged queries and keys, a rope
theta times 50, an epsilon of 1e-2 and a zero layer, unless the damage costs the model nothing: a transposed matrix that
the answers hardly depend on is not noticed. The changes cost some hundred short passes for 32 layers.

Limitation: if the model knows neither text, the first two checks are open, unless a change makes it know one. Damage
that costs less than 1 % of the loss goes unnoticed, as does any that no listed change undoes, unless the loss or the
layers show it. Models with an encoder or several modes of attention have no loss here.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from sinklens.experiments.nll.autoregressive import score_exactly
from sinklens.experiments.nll.diffusion import bounds
from sinklens.experiments.nll.estimate import divided, longest
from sinklens.experiments.nll.hooked_pass import HookedPass
from sinklens.experiments.nll.noise import DrawRule, MaskNoise, NoisyDraws, TimedNoise, noise_of
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.model import Model
from sinklens.runs.control_keys import ControlLog
from sinklens.tasks.word_problems import held_out
from sinklens.utils.estimates import Estimate

PROSE = (
    "The",
    " house stood on a hill above the river. In the morning the old man opened the door, and the children came in from "
    "the garden. They asked him for the story of the king and his three sons.",
)
PROBLEMS = 8
PART = 7  # one token of so many is masked
NOISE = 0.15
KNOWN_BELOW = 0.6  # share of log(vocabulary) below which a text counts as known
CLEAR = (1.01, 4.0)  # factor of the loss and standard errors: a small gain of many tokens
LARGE = (2.0, 1.5)
WORSE = 1.02  # factor of the loss of the first text from which a change is not measured on the others
FAR = 10.0  # factor between the size of a weight and that in the nearest layers
UNLIKE = 3.0  # the same for attention; below 2 in every shipped model
THETAS = (0.02, 0.1, 10.0, 50.0)
EPSILONS = (1e-6, 1e-5)
Outcome = Literal["passed", "failed", "open", "recorded"]
EXPECTED = {
    "loss": f"below {KNOWN_BELOW:g} of log(vocabulary), and below the loss of shuffled text",
    "undone damage": "no change improves the loss",
    "layers": f"no layer is zero, {FAR:g} times its neighbors, or attends with {UNLIKE:g} times their entropy",
}
PARAMETER = re.compile(r"(.+?)\.(\d+)\.(.+)\.(\w+)")  # stack of layers, layer, module and name
Weights = dict[str, Tensor]
Values = list[tuple[Any, str, Any]]


class Change(NamedTuple):
    """A change of a model: attributes of objects get other values, in a ``with change.made():`` block."""

    name: str
    values: Values

    @contextmanager
    def made(self) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.values]
        try:
            for owner, name, value in self.values:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what is checked.
        outcome: "passed"; "failed"; "open" if the limits allow both; "recorded" if nothing is expected.
        expected: what was expected, and its source.
        found: what was found, in words.
        number: the number with its limits; None if there is none. For masking, it is accuracy without masking minus
            accuracy with it, positive if accuracy is lost.
        statement: whether it is a statement of the study, not a property that the checkpoint must have.
    """

    name: str
    outcome: Outcome
    expected: str
    found: str
    number: Estimate | None = None
    statement: bool = False


def _check(name: str, found: str, suspicious: bool | None) -> Check:
    """The check of `EXPECTED` with this name; None if it cannot be decided."""
    outcome: Outcome = "open" if suspicious is None else "failed" if suspicious else "passed"
    return Check(name, outcome, EXPECTED[name], "suspicious: " * bool(suspicious) + found)


class _Parts(MaskNoise):
    """Masks every seventh token, with each of the seven beginnings."""

    def draw(self, rule: DrawRule, prompt: tuple[int, ...], answer: Int[Tensor, " pos"], block: int) -> NoisyDraws:
        masked = torch.arange(min(PART, len(answer)))[:, None] == torch.arange(len(answer)) % PART
        share = torch.full((len(masked),), 1 / len(masked), dtype=torch.float64)
        return NoisyDraws(answer.where(~masked, self.mask_id), masked, share, share)


def token_losses(model: "Model", pairs: Sequence[PromptAnswer]) -> np.ndarray:
    """The loss of each answer token, in nats, in a fixed order."""
    if model.causal:
        found = score_exactly(model, pairs, None)
    else:
        noise = noise_of(model)
        noise = replace(noise, interval=(NOISE, NOISE)) if isinstance(noise, TimedNoise) else _Parts(noise.mask_id)
        found = bounds(HookedPass(model, (), 0.0, 0, ControlLog()), noise, pairs, DrawRule(PART, PART), None)
    return np.concatenate([one.losses[~np.isnan(one.losses)] for one in found])


def _texts(model: "Model") -> list[list[PromptAnswer]]:
    if model.tokenizer is None:
        return []
    texts = [(one.prompt, f" {one.answer}") for one in held_out(PROBLEMS)], [PROSE]
    pairs = [[divided(*text, lambda one: model.encode(one)[0][0].tolist()) for text in some] for some in texts]
    fitting = [[one for one in some if len(one.prompt) + len(one.answer) <= longest(model)] for some in pairs]
    return [some for some in fitting if some]


def _shuffled(pair: PromptAnswer) -> PromptAnswer:
    tokens = [*pair.prompt, *pair.answer]
    order = np.random.default_rng(0).permutation(np.arange(1, len(tokens)))
    mixed = (tokens[0], *(tokens[place] for place in order))
    return PromptAnswer(mixed[: len(pair.prompt)], mixed[len(pair.prompt) :])


def damage_checks(model: "Model") -> list[Check]:
    """The three checks; see the module."""
    texts = _texts(model)
    if not texts or model.tree.architecture.encoder or model.tree.changes_attention:
        why = "not measured: the model has no tokenizer, no room for a text, or no single loss of one"
        return [_check("loss", why, None), _check("undone damage", why, None), layer_check(model)]
    known, best = min(((token_losses(model, some), some) for some in texts), key=lambda one: one[0].mean())
    loss, mixed = known.mean(), token_losses(model, [_shuffled(one) for one in best]).mean()
    most = math.log(model.cfg.d_vocab)
    bad, sound = not loss < min(mixed, most), loss < KNOWN_BELOW * most  # NaN is bad
    text = f"{loss:.3f} nats per token, shuffled {mixed:.3f}, log(vocabulary) {most:.3f}"
    return [
        _check("loss", text, True if bad else False if sound else None),
        _undone(model, best, known, KNOWN_BELOW * most),
        layer_check(model),
    ]


def _undone(model: "Model", texts: list[PromptAnswer], before: np.ndarray, limit: float) -> Check:
    """Whether a change improves the loss; of an unknown text, whether one makes it known."""
    known, first = before.mean() < limit, token_losses(model, texts[:1]).mean()
    gains, tried = list[tuple[float, str]](), 0
    for change in changes(model):
        tried += 1
        with change.made():
            if len(texts) > 1 and token_losses(model, texts[:1]).mean() > WORSE * first:
                continue
            after = token_losses(model, texts)
        gain = before - after
        sigmas = gain.mean() / (gain.std(ddof=1) / math.sqrt(len(gain)) + 1e-12)
        factor = before.mean() / (after.mean() + 1e-3)  # 0.001 nats: nothing to improve
        becomes_known = after.mean() < limit and factor >= LARGE[0]
        if (known or becomes_known) and any(factor >= least and sigmas >= few for least, few in (CLEAR, LARGE)):
            gains.append((float(after.mean()), f"{change.name}: {after.mean():.3f} ({sigmas:.1f} standard errors)"))
    best = "; ".join(text for _, text in sorted(gains)[:3])
    found = f"{len(gains)} of {tried} changes improve the loss of {before.mean():.3f}" + f", e.g. {best}" * bool(best)
    return _check("undone damage", found, True if gains else False if known else None)


def _layers(model: "Model") -> dict[str, dict[int, dict[str, Weights]]]:
    """Stack of layers -> layer -> module -> its own weights."""
    found: dict[str, dict[int, dict[str, Weights]]] = {}
    for name, value in model.tree.hf.named_parameters():
        if (place := PARAMETER.fullmatch(name)) and value.is_floating_point() and not value.is_meta:
            stack, layer, module, own = place.groups()
            found.setdefault(stack, {}).setdefault(int(layer), {}).setdefault(module, {})[own] = value
    return found


def _exchanged(one: Weights, other: Weights) -> Values:
    """Two modules exchanged; nothing if they differ in shape."""
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return []
    return [(mine[name], "data", theirs[name].data) for mine, theirs in ((one, other), (other, one)) for name in one]


def changes(model: "Model") -> Iterator[Change]:
    """Each change that would undo a damage."""
    for stack, layers in _layers(model).items():
        places: dict[str, dict[int, Values]] = {}
        for layer, modules in layers.items():
            weights = {name: own["weight"] for name, own in modules.items() if "weight" in own}
            square = {name: one for name, one in weights.items() if one.ndim == 2 and one.shape[0] == one.shape[1]}
            found = {f"{name} transposed": [(one, "data", one.data.T)] for name, one in square.items()}
            found |= {
                f"{one} and {two} exchanged": _exchanged(modules[one], modules[two]) for one, two in pairwise(modules)
            }
            for what, values in found.items():
                places.setdefault(what, {})[layer] = values
            every = [value for own in modules.values() for value in own.values()]
            yield Change(f"{stack}.{layer}: left out", [(value, "data", torch.zeros_like(value)) for value in every])
        for what, at in places.items():
            yield from (Change(f"{stack}.{layer}: {what}", values) for layer, values in at.items() if values)
            if values := [one for values in at.values() for one in values]:
                yield Change(f"{stack}: {what} in all layers", values)
        for (layer, one), (after, other) in pairwise(layers.items()):
            if values := _exchanged(_named(one), _named(other)):
                yield Change(f"{stack}: layers {layer} and {after} exchanged", values)
    yield from _settings(model)


def _named(modules: dict[str, Weights]) -> Weights:
    return {f"{module}.{name}": value for module, own in modules.items() for name, value in own.items()}


def _settings(model: "Model") -> Iterator[Change]:
    modules, eps = list(model.tree.hf.modules()), model.tree.architecture.eps
    rotary = [(one, found) for one in modules if isinstance(found := getattr(one, "inv_freq", None), Tensor)]
    norms = [one for one in modules if isinstance(getattr(one, eps, None), float)]
    for factor in THETAS if rotary else ():
        turned = [found * factor ** -torch.linspace(0, 1, len(found) + 1)[:-1].to(found) for _, found in rotary]
        values = [(one, "inv_freq", value) for (one, _), value in zip(rotary, turned, strict=True)]
        yield Change(f"rope theta times {factor:g}", values)
    for value in EPSILONS if norms else ():
        yield Change(f"epsilon {value:g}", [(one, eps, value) for one in norms])


def layer_check(model: "Model") -> Check:
    """Whether the weights or the attention of a layer are far from those of the others."""
    measured: dict[str, dict[int, float]] = {}
    for stack, layers in _layers(model).items():
        for layer, modules in layers.items():
            for name, value in _named(modules).items():
                if name.endswith("weight") or value.ndim > 1:  # biases may be zero
                    size = measured.setdefault(f"size of {stack}.{{}}.{name}", {})
                    size[layer] = float(value.detach().float().square().mean().sqrt())
    odd = [
        f"the {what.format(layer)} is {text}"
        for group, factor in ((measured, FAR), (_attention(model), UNLIKE))
        for what, found in group.items()
        for layer, text in _far(found, factor)
    ]
    more = f" and {len(odd) - 3} more" * (len(odd) > 3)
    return _check("layers", "; ".join(odd[:3]) + more or "all layers resemble their neighbors", bool(odd))


def _attention(model: "Model") -> dict[str, dict[int, float]]:
    """Per layer, the entropy of attention as a share of that of even attention."""
    if model.tree.architecture.encoder:
        return {}
    shares: dict[int, float] = {}

    def measure(pattern: Tensor, hook: Any) -> None:
        even = (pattern > 0).sum(dim=-1).log().sum()
        shares[hook.layer()] = float(torch.special.entr(pattern.float()).sum() / even)

    texts = _texts(model)
    ids = [*texts[0][0].prompt, *texts[0][0].answer] if texts else range(min(24, model.cfg.d_vocab))
    time: dict[str, Any] = {"time": NOISE} if model.tree.timed else {}
    with torch.no_grad():
        row = torch.tensor([[*ids]], device=model.cfg.device)
        model.tree.run_with_hooks(row, fwd_hooks=[(lambda name: name.endswith("hook_pattern"), measure)], **time)
    return {"entropy of attention in layer {}": shares}


def _far(found: dict[int, float], factor: float) -> Iterator[tuple[int, str]]:
    """The layers whose number is zero, or far from that of both neighbors."""
    for layer, value in found.items():
        others = sorted((one for one in found if one != layer), key=lambda one: abs(one - layer))
        beside = [found[near] for near in others[:2] if found[near]]
        apart = all(not 1 / factor < value / near < factor for near in beside) and len(found) > 2
        if value == 0 or not math.isfinite(value) or (beside and apart):
            yield layer, f"{value:.3g}, beside {' and '.join(f'{near:.3g}' for near in beside) or 'zeros'}"
