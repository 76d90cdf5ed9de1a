"""Signs of damage in the weights or settings of a model of which nothing is known.

`damage_checks` makes three checks, none of which needs a reference:

- *loss*: of two fixed English texts, the one that the model knows better is scored, with 1/7 of its tokens masked at a
  time (a causal model predicts each next token; a model with a noise schedule gets 15 % noise). A sound model is far
  below log(vocabulary) and below the loss of the same tokens shuffled.
- *undone damage*: the loss is measured again after each change that would undo a typical damage: a square matrix
  transposed, two modules of one shape or two neighbouring layers exchanged, a layer left out, another rope theta or
  epsilon of the norms. A change makes a sound model worse. One that improves a model points to the damage.
- *layers*: weights that are zero, or whose spread is far from that of all other layers; a layer that adds nothing, or
  whose update or attention entropy is far from its neighbours'.

Limitation: if the model knows neither text, the first two checks are open, unless a change makes it know one. A damage
that costs less than 1 % of the loss goes unnoticed, as does any that no listed change undoes, unless the loss or the
layers show it. Models with an encoder or several modes of attention have no loss here.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinklens.experiments.nll.autoregressive import score_exactly
from sinklens.experiments.nll.diffusion import bounds
from sinklens.experiments.nll.estimate import divided, longest
from sinklens.experiments.nll.hooked_pass import HookedPass
from sinklens.experiments.nll.noise import DrawRule, MaskNoise, NoisyDraws, TimedNoise, noise_of
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.runs.control_keys import ControlLog
from sinklens.tasks.word_problems import held_out

if TYPE_CHECKING:
    from sinklens.model import Model

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
FAR = 10.0  # factor between the spread of a weight and that of the other layers, or an update and the neighbours'
THETAS = (0.02, 0.1, 10.0, 50.0)
EPSILONS = (1e-6, 1e-5)
Values = list[tuple[Tensor, Tensor]]


class Change(NamedTuple):
    """A change of a model: `make` makes it and returns what takes it back."""

    name: str
    make: Callable[[], Callable[[], None]]


class Damage(NamedTuple):
    """What a check found: `suspicious` is None if it could not be made."""

    name: str
    expected: str
    found: str
    suspicious: bool | None


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
    problems = [(one.prompt, f" {one.answer}") for one in held_out(PROBLEMS)]
    texts = [
        [divided(*text, lambda one: model.encode(one)[0][0].tolist()) for text in some] for some in (problems, [PROSE])
    ]
    fitting = [[one for one in some if len(one.prompt) + len(one.answer) <= longest(model)] for some in texts]
    return [some for some in fitting if some]


def _shuffled(pair: PromptAnswer) -> PromptAnswer:
    tokens = [*pair.prompt, *pair.answer]
    order = np.random.default_rng(0).permutation(np.arange(1, len(tokens)))
    mixed = (tokens[0], *(tokens[place] for place in order))
    return PromptAnswer(mixed[: len(pair.prompt)], mixed[len(pair.prompt) :])


def damage_checks(model: "Model") -> list[Damage]:
    """The three checks; see the module."""
    expected = (
        f"below {KNOWN_BELOW:g} of log(vocabulary), and below the loss of shuffled text",
        "no change improves the loss",
    )
    names = "loss", "undone damage"
    texts = _texts(model)
    if not texts or model.tree.architecture.encoder or model.tree.changes_attention:
        why = "has no single loss of a text" if texts else "has no tokenizer, or no room for a text"
        checks = [Damage(*both, f"not measured: the model {why}", None) for both in zip(names, expected, strict=True)]
        return [*checks, layer_check(model)]
    known, best = min(((token_losses(model, some), some) for some in texts), key=lambda one: one[0].mean())
    mixed, most = token_losses(model, [_shuffled(one) for one in best]).mean(), math.log(model.cfg.d_vocab)
    text = f"{known.mean():.3f} nats per token, shuffled {mixed:.3f}, log(vocabulary) {most:.3f}"
    bad = bool(not math.isfinite(known.mean()) or known.mean() >= min(mixed, most))
    both = names[1], expected[1]
    loss = Damage(names[0], expected[0], text, bad or (False if known.mean() < KNOWN_BELOW * most else None))
    return [loss, _undone(model, best, known, KNOWN_BELOW * most, *both), layer_check(model)]


def _undone(
    model: "Model", texts: list[PromptAnswer], before: np.ndarray, limit: float, name: str, expected: str
) -> Damage:
    """Whether a change improves the loss; of an unknown text, whether one makes it known."""
    known = before.mean() < limit
    gains, tried = list[tuple[float, str]](), 0
    for change in changes(model):
        undo = change.make()
        try:
            after = token_losses(model, texts)
        finally:
            undo()
        tried += 1
        gain = before - after
        error = gain.std(ddof=1) / math.sqrt(len(gain)) + 1e-12
        factor, sigmas = before.mean() / (after.mean() + 1e-3), gain.mean() / error  # 0.001 nats: nothing to improve
        becomes_known = after.mean() < limit and factor >= LARGE[0]
        if (known or becomes_known) and any(factor >= least and sigmas >= few for least, few in (CLEAR, LARGE)):
            gains.append((float(after.mean()), f"{change.name}: {after.mean():.3f} ({sigmas:.1f} standard errors)"))
    best = "; ".join(text for _, text in sorted(gains)[:3])
    found = f"{len(gains)} of {tried} changes improve the loss of {before.mean():.3f}" + (f", e.g. {best}" * bool(best))
    return Damage(name, expected, found, bool(gains) or (False if known else None))


def _layers(model: "Model") -> dict[str, dict[int, dict[str, nn.Module]]]:
    """The modules with weights of their own: stack of layers -> layer -> name."""
    found: dict[str, dict[int, dict[str, nn.Module]]] = {}
    for name, module in model.tree.hf.named_modules():
        place = re.search(r"\.(\d+)\.", name)
        if place and any(True for _ in module.parameters(recurse=False)):
            found.setdefault(name[: place.start()], {}).setdefault(int(place[1]), {})[name[place.end() :]] = module
    return found


def _own(module: nn.Module) -> dict[str, Tensor]:
    own = module.named_parameters(recurse=False)
    return {name: value for name, value in own if value.is_floating_point() and not value.is_meta}


def _exchange(one: dict[str, Tensor], other: dict[str, Tensor]) -> Values | None:
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return None
    return [pair for name in one for pair in ((one[name], other[name].data), (other[name], one[name].data))]


def changes(model: "Model") -> Iterator[Change]:
    """Each change that would undo a damage."""
    for stack, layers in _layers(model).items():
        found: dict[str, dict[int, Values]] = {}
        for layer, modules in layers.items():
            for name, module in modules.items():
                weight = _own(module).get("weight")
                if weight is not None and weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
                    found.setdefault(f"{name} transposed", {})[layer] = [(weight, weight.data.T.contiguous())]
            for one, other in zip(modules, list(modules)[1:], strict=False):
                if both := _exchange(_own(modules[one]), _own(modules[other])):
                    found.setdefault(f"{one} and {other} exchanged", {})[layer] = both
            weights = [value for module in modules.values() for value in _own(module).values()]
            found.setdefault("left out", {})[layer] = [(value, torch.zeros_like(value)) for value in weights]
        for what, places in found.items():
            for layer, values in places.items():
                yield Change(f"{stack}.{layer}: {what}", partial(_put, values))
            if what != "left out":
                every = [pair for values in places.values() for pair in values]
                yield Change(f"{stack}: {what} in all layers", partial(_put, every))
        for layer, after in zip(layers, list(layers)[1:], strict=False):
            whole = [
                {f"{name}.{key}": value for name, module in layers[one].items() for key, value in _own(module).items()}
                for one in (layer, after)
            ]
            if both := _exchange(*whole):
                yield Change(f"{stack}: layers {layer} and {after} exchanged", partial(_put, both))
    yield from _settings(model)


def _put(values: Values) -> Callable[[], None]:
    """Give weights other values, without copying any."""
    before = [(weight, weight.data) for weight, _ in values]
    for weight, value in values:
        weight.data = value

    def undo() -> None:
        for weight, value in before:
            weight.data = value

    return undo


def _settings(model: "Model") -> Iterator[Change]:
    modules, eps = list(model.tree.hf.modules()), model.tree.architecture.eps

    def put(attribute: str, values: list[tuple[nn.Module, Any]]) -> Callable[[], None]:
        before = [(module, getattr(module, attribute)) for module, _ in values]
        for module, value in values:
            setattr(module, attribute, value)

        def undo() -> None:
            for module, value in before:
                setattr(module, attribute, value)

        return undo

    rotary = [(module, found) for module in modules if isinstance(found := getattr(module, "inv_freq", None), Tensor)]
    for factor in THETAS if rotary else ():
        turned = [
            (module, found * factor ** -torch.linspace(0, 1, len(found) + 1)[:-1].to(found)) for module, found in rotary
        ]
        yield Change(f"rope theta times {factor:g}", partial(put, "inv_freq", turned))
    norms = [module for module in modules if isinstance(getattr(module, eps, None), float)]
    for value in EPSILONS if norms else ():
        yield Change(f"epsilon {value:g}", partial(put, eps, [(module, value) for module in norms]))


def layer_check(model: "Model") -> Damage:
    """Whether the weights and activations of a layer are far from those of the others."""
    odd = []
    for stack, layers in _layers(model).items():
        spreads: dict[str, dict[int, float]] = {}
        for layer, modules in layers.items():
            for name, module in modules.items():
                for key, value in _own(module).items():
                    if value.ndim > 1:
                        spreads.setdefault(f"{name}.{key}", {})[layer] = float(value.detach().float().std())
        for name, found in spreads.items():
            odd += [f"the spread of {stack}.{layer}.{name} is {text}" for layer, text in _far(found)]
    odd += _odd_activations(model)
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    said = "; ".join(odd[:3]) + more or "all layers resemble their neighbours"
    return Damage("layers", f"no layer is zero, or {FAR:g} times its neighbours", said, bool(odd))


def _far(found: dict[int, float]) -> Iterator[tuple[int, str]]:
    """The layers whose number is zero, or far from that of both neighbours."""
    for layer, value in found.items():
        others = sorted((one for one in found if one != layer), key=lambda one: abs(one - layer))
        beside = [found[near] for near in others[:2] if found[near]]
        apart = all(not 1 / FAR < value / near < FAR for near in beside) and len(found) > 2
        if value == 0 or not math.isfinite(value) or (beside and apart):
            yield layer, f"{value:.3g}, beside {' and '.join(f'{near:.3g}' for near in beside) or 'zeros'}"


@torch.no_grad()
def _odd_activations(model: "Model") -> list[str]:
    """Layers whose update or attention entropy is far from the neighbours'."""
    if model.tree.architecture.encoder:
        return []
    seen: dict[str, Tensor] = {}
    wanted = [
        f"blocks.{layer}.{kind}"
        for layer in range(model.cfg.n_layers)
        for kind in ("hook_resid_pre", "hook_resid_post", "attn.hook_pattern")
    ]
    ids = (torch.arange(24)[None] * 7 + 3) % model.cfg.d_vocab
    if fitting := _texts(model):
        ids = torch.tensor([fitting[0][0].prompt])
    hooks = [(name, lambda value, hook: seen.update({hook.name: value})) for name in wanted]
    time: dict[str, Any] = {"time": NOISE} if model.tree.timed else {}
    model.tree.run_with_hooks(ids.to(model.cfg.device), fwd_hooks=hooks, **time)
    updates, entropies = dict[int, float](), dict[int, float]()
    for layer in range(model.cfg.n_layers):
        before, after, pattern = (seen[name].float() for name in wanted[3 * layer : 3 * layer + 3])
        updates[layer] = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).median())
        entropies[layer] = float(torch.special.entr(pattern).sum(-1).mean())
    inner = {layer: value for layer, value in updates.items() if value == 0 or 0 < layer < model.cfg.n_layers - 1}
    return [
        f"the {what} of layer {layer} is {text}"
        for what, found in (("update", inner), ("attention entropy in nats", entropies))
        for layer, text in _far(found)
    ]
