"""Does accuracy depend on the order of decoding, and does reasoning settle first? docs/papers/order-robustness.md.

    python benchmarks/papers/order_robustness.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Two held-out problems of each of the seven templates. The layouts: reasoning, then the number (as trained), and the
number first, on which no shipped model was trained; the hole for it has as many tokens as the right number. The orders
of models with masks, in 12 steps: by confidence, at random and, if the sampler has blocks, from left to right. The
settling steps of three tokens of each answer: the first number, which is copied from the question; the first number
after "=", which is computed; and the number after "####". Intervals: Wilson's for shares, t over templates.

About 15 seconds of processor time for the default models.
"""

import re
import sys
from typing import Any

import numpy as np
from templates import RANDOM, Call, call, having, mean

import sinklens
from sinklens.experiments import holes, settling_steps, step_predictions
from sinklens.tasks.word_problems import Problem, read_answer
from sinklens.utils.estimates import paired, proportion

MODELS = ("tiny-llama", "tiny-llada")
QUIET = {"record_sinks": False, "progress": False}


def verdicts(texts: list[str], problems: list[Problem]) -> np.ndarray:
    """Which texts have the right result after ``####``."""
    return np.array([read_answer(text) == problem.result for text, problem in zip(texts, problems, strict=True)])


def number_first(model: sinklens.Model, problems: list[Problem]) -> np.ndarray:
    """Verdicts where the number stands before the reasoning."""
    found = []
    for problem in problems:
        prompt, size = problem.prompt, len(model.encode(f" {problem.result}", prepend_bos=False).ids[0])
        layout = {"prompts": f"{prompt} ####", "gen_length": 24}
        if not model.causal:
            layout = holes(model, [f"{prompt} ####", size, "\n", 23 - size])
        run = sinklens.generate(model, **layout, **QUIET)
        field = re.match(r"\s*(-?\d+)", run.answers[0].text or "")  # what stands there, whatever the text says later
        found.append(field is not None and int(field.group(1)) == problem.result)
    return np.array(found)


def columns(run: sinklens.Generation, row: int) -> dict[str, int]:
    """Columns of the first number, the first after "=" and the first after "####"; −1 if there is no such number."""
    tokens = [
        token.strip() for token in run.model.to_str_tokens(run.tokens[row, run.prompt_length :], prepend_bos=False)
    ]
    numbers = [place for place, token in enumerate(tokens) if token.isdigit()]
    starts = {"copied": 0, "computed": "=", "final": "####"}
    first = {
        label: tokens.index(mark) if mark in tokens else len(tokens) if mark else 0 for label, mark in starts.items()
    }
    found = {label: [n for n in numbers if n >= first[label]] for label in starts}
    return {label: run.prompt_length + places[0] if places else -1 for label, places in found.items()}


def layouts(model: sinklens.Model, asked: Call) -> None:
    """Print the right answers of both layouts."""
    given = having(model, asked.settings)
    texts = sinklens.generate(model, [one.prompt for one in asked.problems], **QUIET, **given).answers
    last, first = verdicts([one.text or "" for one in texts], asked.problems), number_first(model, asked.problems)
    gap = paired(last, first).difference
    print(f"{model.name}: number last {proportion(int(last.sum()), len(last))}, ", end="")
    print(f"first {proportion(int(first.sum()), len(first))}")
    print(f"  difference {gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]", flush=True)


def orders(model: sinklens.Model, asked: Call) -> None:
    """Print right answers and settling steps of every order."""
    problems = asked.problems
    given: dict[str, dict[str, Any]] = {"confidence": {}}
    given |= {"random": having(model, RANDOM), "left to right": having(model, {"block_length": 2})}
    for order, chosen in given.items():
        if order != "confidence" and not chosen:
            continue
        settings = {"steps": 12} | asked.settings | chosen
        run = sinklens.generate(model, [one.prompt for one in problems], **QUIET, **settings)
        found = step_predictions(run)
        settled, decided, rows = (
            settling_steps(found).to_numpy(),
            found["decided_step"].to_numpy(),
            range(len(problems)),
        )
        judged = verdicts([answer.text or "" for answer in run.answers], problems)
        print(f"{model.name}, {order}: {proportion(int(judged.sum()), len(judged))}")
        steps = {}
        for label in ("copied", "computed", "final"):
            places = [columns(run, row)[label] for row in rows]
            steps[label] = [settled[row, c] if c >= 0 else np.nan for row, c in zip(rows, places, strict=True)]
            made = [decided[row, c] if c >= 0 else np.nan for row, c in zip(rows, places, strict=True)]
            texts = mean(steps[label], problems, ".2f", (0, np.inf)), mean(made, problems, ".2f")
            print(f"  {label}: settles {texts[0]}, decided {texts[1]}")
        for label in ("copied", "computed"):
            later = np.array(steps["final"], dtype=float) - np.array(steps[label], dtype=float)
            print(f"  final − {label}: {mean(later, problems, '.2f')} steps", flush=True)


def main() -> None:
    """Print the tables."""
    asked = call(sys.argv[1:], MODELS, 2)
    for name in asked.models:
        model = sinklens.load(name)
        layouts(model, asked)
        if model.mask_token_id is not None:
            orders(model, asked)


if __name__ == "__main__":
    main()
