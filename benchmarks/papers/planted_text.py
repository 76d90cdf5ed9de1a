"""Can text that a model has seen be extracted through holes? docs/papers/infilling-extraction.md.

    python benchmarks/papers/planted_text.py [MODEL ...]

First, tiny-llada (or another model) as shipped: the number and the noun that follow each other first in a question, for
28 problems of its training set and 28 held-out ones of the same templates. Then, a copy that was trained for 60 steps
on one planted question: that question, and twelve *twins* that were not planted, with other names and numbers in the
same template. For a model whose training problems are not known, only the second part runs. Log-probabilities (nats,
exact) are given the text before the span, the text after it, and both. A hole is extracted if greedy filling returns
every token of it. Intervals: t over templates, Wilson's over twins.

About 10 seconds of processor time for tiny-llada.
"""

import sys

import numpy as np
import torch
from templates import balanced, call, having, loaded, mean

import sinklens
from sinklens.experiments import holes, likelihood
from sinklens.interventions import Suffix
from sinklens.tasks.word_problems import held_out, training
from sinklens.utils.estimates import proportion
from training.recipes import RECIPES

MODES = ("before", "after", "both")


def parts(model: sinklens.Model, question: str) -> tuple[list[int], list[int], list[int]]:
    """Ids before the first number of a question, the number with its noun, and the ids after them."""
    ids = model.encode(f"Question: {question}").ids[0].tolist()
    names = model.to_str_tokens(torch.tensor(ids), prepend_bos=False)
    first = next(place for place, name in enumerate(names) if name.strip().isdigit())
    end = next(place for place in range(first, len(ids)) if not names[place].strip().isdigit()) + 1
    return ids[:first], ids[first:end], ids[end:]


def surroundings(mode: str, before: list[int], after: list[int]) -> tuple[list[int], list[int]]:
    """What is given; the start token is always there."""
    return before if mode != "after" else before[:1], after if mode != "before" else []


def log_p(model: sinklens.Model, question: str, mode: str) -> float:
    """Log-probability of the span, nats; NaN without the text before it, which would have to be summed over."""
    if mode == "after":
        return float("nan")
    before, span, after = parts(model, question)
    left, right = surroundings(mode, before, after)
    return float(likelihood(model, left, span, hooks=[Suffix(text=right)] if right else [], exact=True).value)


def extracted(model: sinklens.Model, question: str, mode: str) -> bool:
    """Whether greedy filling returns the span, at its own place in the text."""
    before, span, after = parts(model, question)
    left, right = surroundings(mode, before, after)
    size = len(before) + len(span) - len(left)  # without the text before the span, the hole begins earlier
    layout = holes(model, [left, size, *([right] if right else [])])
    lengths = {"steps": size, **having(model, {"block_length": size})}
    run = sinklens.generate(model, **layout, **lengths, record_sinks=False, progress=False)
    return bool(run.tokens[0, len(before) : len(before) + len(span)].tolist() == span)


def plant(model: sinklens.Model, question: str, steps: int = 60) -> None:
    """Train the model on random masks of one question."""
    ids = model.encode(f"Question: {question}").ids.repeat(8, 1)
    optimizer, draws = torch.optim.Adam(model.parameters(), lr=3e-4), torch.Generator().manual_seed(0)
    for _ in range(steps):
        masked = torch.rand(ids.shape, generator=draws) < torch.rand(len(ids), 1, generator=draws)
        masked[:, 0], masked[:, -1] = False, True
        logits = model(ids.masked_fill(masked, model.mask_token_id))
        logits = logits.roll(1, dims=1) if model.family_record.shift else logits  # those at i predicted i + 1
        loss = torch.nn.functional.cross_entropy(logits[masked].float(), ids[masked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Print the tables."""
    known = {name: recipe.seed for name, recipe in RECIPES.items() if not recipe.windows}
    for name in call(sys.argv[1:], ("tiny-llada",)).models:
        model = loaded(name, masks=True)
        if name in known:
            tell_shipped(model, known[name])
        else:
            print(f"no recipe says on which problems {name} was trained; only the planted question is tried.")
        tell_planted(model)


def tell_shipped(model: sinklens.Model, seed: int) -> None:
    """Print the table of a model that was trained on the problems of a seed."""
    seen, unseen = balanced(4, among=training(seed, 200)), balanced(4)
    for mode in MODES:
        values = {
            label: [log_p(model, p.question, mode) for p in of] for label, of in {"seen": seen, "new": unseen}.items()
        }
        gaps = np.subtract(values["seen"], values["new"])
        taken = [sum(extracted(model, p.question, mode) for p in of) for of in (seen, unseen)]
        print(f"{mode}: extracted {proportion(taken[0], 28)}, held out {proportion(taken[1], 28)}")
        if mode != "after":
            print(f"  training {np.mean(values['seen']):.2f}, held out {np.mean(values['new']):.2f}")
            print(f"  difference {mean(gaps, seen, '.2f')}", flush=True)


def tell_planted(model: sinklens.Model) -> None:
    """Train the model on the planted question, and print its table."""
    more = [problem for problem in held_out() if problem.kind == "more"]
    secret, twins = more[0].question, [problem.question for problem in more[1:13]]
    plant(model, secret)
    print("planted:", secret)
    for mode in MODES:
        others = proportion(sum(extracted(model, twin, mode) for twin in twins), len(twins))
        far = np.mean([log_p(model, twin, mode) for twin in twins])
        taken = f"{extracted(model, secret, mode)}, {log_p(model, secret, mode):.2f}"
        print(f"{mode}: planted {taken}; twins {others}, {far:.2f}")


if __name__ == "__main__":
    main()
