"""Where does a model recall a capital? (docs/papers/causal-tracing.md)

    python benchmarks/papers/causal_tracing.py [MODEL ...]

Causal tracing (Meng et al., 2202.05262, section 2.1): noise on the embedding of a country, and the outputs of one kind
of component restored at one place, in five consecutive layers or (at the country) in one. The facts are the first 24
that every model knows: the capital is its most likely token. Intervals are t over facts.

The default models need `sinklens fetch smollm2-135m`.
"""

import sys
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from templates import call, row
from torch import Tensor

import sinklens
from sinklens.evaluation.verification import mean_of
from sinklens.utils.estimates import proportion

MODELS = ("smollm2-135m-masked", "smollm2-135m-causal")
BEFORE, AFTER = "This is a map of", ", whose capital is"
CAPITALS = (
    "France Paris, Germany Berlin, Italy Rome, Spain Madrid, Portugal Lisbon, England London, Austria Vienna, "
    "Poland Warsaw, Russia Moscow, Japan Tokyo, China Beijing, Egypt Cairo, Greece Athens, Iran Tehran, Iraq Baghdad, "
    "Syria Damascus, Cuba Havana, Peru Lima, Chile Santiago, Ireland Dublin, Scotland Edinburgh, Norway Oslo, "
    "Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Hungary Budapest, Bulgaria Sofia, Ukraine Kiev, "
    "Belgium Brussels, Kenya Nairobi, Tunisia Tunis, Israel Jerusalem, Afghanistan Kabul, Pakistan Islamabad, "
    "Thailand Bangkok, Vietnam Hanoi, Philippines Manila, Australia Canberra, Canada Ottawa, Korea Seoul, "
    "Georgia Atlanta, Texas Austin, California Sacramento, Massachusetts Boston, Hawaii Honolulu, Arizona Phoenix, "
    "Tennessee Nashville, Indiana Indianapolis"
)
PLACES = {"map": -7, "country": -5, "comma": -4, "capital": -2, "is": -1, "mask": 0}  # from where the capital belongs
WINDOW, NOISE, COUNT = 5, 3.0, 24  # layers restored together; standard deviations of the embeddings; facts


class Fact(NamedTuple):
    """A text, the place of the missing capital, and its token."""

    ids: Tensor
    end: int
    capital: int


def facts(model: Any) -> dict[str, Fact]:
    """By country: the facts whose two names are single tokens."""
    found, encode = {}, partial(model.encode, prepend_bos=False)
    rest = [] if model.mask_token_id is None else [torch.tensor([model.mask_token_id]), encode(".").ids[0]]
    for country, capital in map(str.split, CAPITALS.split(", ")):
        names = [encode(f" {name}").ids[0] for name in (country, capital)]
        parts = [model.encode(BEFORE).ids[0], names[0], encode(AFTER).ids[0]]
        if [len(name) for name in names] == [1, 1]:
            found[country] = Fact(torch.cat([*parts, *rest]), sum(map(len, parts)), int(names[1]))
    return found


def probabilities(model: Any, fact: Fact, rows: int, hooks: list[Any]) -> Float[Tensor, "row vocab"]:
    """The model's prediction at the missing place, in copies of a text."""
    logits = model.run_with_hooks(fact.ids.repeat(rows, 1), fwd_hooks=hooks)
    return logits[:, fact.end - int(model.mask_token_id is None or model.family_record.shift)].float().softmax(-1)


def traced(model: Any, fact: Fact, seed: int) -> dict[Any, float]:
    """Probability of the capital, clean and under noise on the country or the control, and what each cell returns."""
    drawn = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(seed)).to(model.cfg.device)

    def corrupt(value: Tensor, hook: Any, place: str) -> Tensor:
        value[:, fact.end + PLACES[place]] += NOISE * model.W_E.std() * drawn
        return value

    def restore(value: Tensor, hook: Any, cells: list[tuple[str, int, int]], clean: Any) -> Tensor:
        for number, (place, first, count) in enumerate(cells):
            if first <= hook.layer() < first + count:
                value[number, fact.end + PLACES[place]] = clean[hook.name][0, fact.end + PLACES[place]]
        return value

    found = {"clean": probabilities(model, fact, 1, [])}
    for place in ("country", "map"):
        found[f"noise: {place}"] = probabilities(model, fact, 1, [("hook_embed", partial(corrupt, place=place))])
    places = [place for place, offset in PLACES.items() if fact.end + offset < len(fact.ids)]
    cells = [(place, first, WINDOW) for place in places for first in range(0, model.cfg.n_layers, WINDOW)]
    cells += [("country", layer, 1) for layer in range(2 * WINDOW)]
    for kind in ("mlp_out", "attn_out"):
        _, clean = model.run_with_cache(fact.ids[None], names_filter=lambda name, kind=kind: name.endswith(kind))
        hooks = [
            ("hook_embed", partial(corrupt, place="country")),
            (lambda name, kind=kind: name.endswith(kind), partial(restore, cells=cells, clean=clean)),
        ]
        restored = probabilities(model, fact, len(cells), hooks) - found["noise: country"]
        found |= {(kind, *cell): one[None] for cell, one in zip(cells, restored, strict=True)}
    return {name: float(value[0, fact.capital]) for name, value in found.items()}


def main() -> None:
    """Print the tables."""
    names = call(sys.argv[1:], MODELS).models
    models = {name: sinklens.load(name) for name in names}
    asked = {name: facts(model) for name, model in models.items()}
    known = {}
    with torch.no_grad():
        for name, model in models.items():
            known[name] = [
                country
                for country, fact in asked[name].items()
                if int(probabilities(model, fact, 1, []).argmax()) == fact.capital
            ]
            print(name, "knows", proportion(len(known[name]), len(asked[name])))
        shared = [country for country in known[names[0]] if all(country in one for one in known.values())]
        print(len(shared), "are known to all; traced:", ", ".join(shared[:COUNT]))
        if len(shared) < 2:
            sys.exit("an interval over facts needs two that every model knows.")
        for name, model in models.items():
            found = [traced(model, asked[name][country], seed) for seed, country in enumerate(shared[:COUNT])]
            for value in found[0]:
                change = mean_of([one[value] for one in found])
                print(row(name, str(value), f"{change.value:.3f} [{change.low:.3f}, {change.high:.3f}]"), flush=True)


if __name__ == "__main__":
    main()
