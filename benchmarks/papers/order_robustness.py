"""Does accuracy depend on the order of decoding, and does reasoning settle first? docs/papers/order-robustness.md.

Two held-out problems of each of the seven templates. The layouts: reasoning, then the number (as trained), and the
number first, on which no shipped model was trained. The orders of tiny-llada: by confidence, at random, from left to
right. The settling steps of three tokens of each answer: the first number, which is copied from the question; the first
number after "=", which is computed; and the number after "####". Intervals: Wilson's for shares, t over templates.

About 15 seconds of processor time.
"""

import re

import numpy as np
from templates import balanced, mean

import sinklens
from sinklens.experiments import holes, settling_steps, step_predictions
from sinklens.tasks.word_problems import read_answer
from sinklens.utils.estimates import paired, proportion

SHORT = {"steps": 12, "record_sinks": False}
ORDERS = {"confidence": {}, "random": {"remasking": "random"}, "left to right": {"block_length": 2}}
problems = balanced(2)
prompts = [problem.prompt for problem in problems]


def verdicts(texts: list[str]) -> np.ndarray:
    """Which texts have the right result after ``####``."""
    return np.array([read_answer(text) == problem.result for text, problem in zip(texts, problems, strict=True)])


def number_first(model: sinklens.Model) -> np.ndarray:
    """Verdicts where the number stands before the reasoning."""
    found = []
    for prompt, problem in zip(prompts, problems, strict=True):
        layout = {"prompts": f"{prompt} ####", "gen_length": 24}
        if not model.causal:
            layout = holes(model, [f"{prompt} ####", 1, "\n", 22])
        run = sinklens.generate(model, **layout, record_sinks=False, progress=False)
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


for name in ("tiny-llama", "tiny-llada"):
    model = sinklens.load(name)
    last = verdicts(
        [a.text or "" for a in sinklens.generate(model, prompts, record_sinks=False, progress=False).answers]
    )
    first = number_first(model)
    gap = paired(last, first).difference
    print(f"{name}: number last {proportion(int(last.sum()), len(last))}, ", end="")
    print(f"first {proportion(int(first.sum()), len(first))}")
    print(f"  difference {gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]", flush=True)

model = sinklens.load("tiny-llada")
for order, settings in ORDERS.items():
    run = sinklens.generate(model, prompts, progress=False, **SHORT, **settings)
    found = step_predictions(run)
    settled, decided, rows = settling_steps(found).to_numpy(), found["decided_step"].to_numpy(), range(len(prompts))
    judged = verdicts([answer.text or "" for answer in run.answers])
    print(f"{order}: {proportion(int(judged.sum()), len(judged))}")
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
