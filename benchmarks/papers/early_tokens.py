"""Do tokens that are forced early decide the answer? docs/papers/early-tokens.md.

Two held-out problems of each of the seven templates. In each run of tiny-llada, a token of the answer is replaced at a
step: the number that is *copied* from the question, the one that is *computed* (the first after "="), or, as a control,
a *word*. Counted are runs whose final number changes, and runs that had not decided that number yet. The planted
dependence: the numbers of the question are hidden in all layers, so the final number can only follow those of the
answer ("cut"). The planted absence: the computed number is hidden as well. Each is compared with the run that hides the
same positions and replaces nothing. Intervals: Wilson's over problems.

About 40 seconds of processor time.
"""

import numpy as np
from templates import balanced

import sinklens
from sinklens.experiments import sweep
from sinklens.interventions import ForceTokens, HideKeys
from sinklens.tasks.word_problems import read_answer
from sinklens.utils.estimates import proportion

AT = (0, 12, 18, 23)
problems = balanced(2)
model = sinklens.load("tiny-llada")
counts: dict[str, list[bool]] = {}


def token(text: str) -> int:
    """The id of a text of one token."""
    return int(model.to_single_token(text))


for problem in problems:
    run = sinklens.generate(model, problem.prompt, record_sinks=False, progress=False)
    names = model.to_str_tokens(run.tokens[0], prepend_bos=False)
    answer = range(run.prompt_length, run.prompt_length + run.answers[0].tokens)
    copied = next(column for column in answer if names[column].strip().isdigit())
    computed = next(c for c in answer if c > names.index(" =", answer.start) and names[c].strip().isdigit())
    word = next(c for c in reversed(answer[:-2]) if names[c].strip().isalpha() and c < names.index("####"))
    final = names.index("####", run.prompt_length) + 1
    new = {c: token(" 7" if names[c] != " 7" else " 8") for c in (copied, computed)} | {word: token(" apples")}
    given = [c for c in range(run.prompt_length) if names[c].strip().isdigit()]
    cut, hidden = HideKeys(positions=given), HideKeys(positions=[*given, computed])
    interventions = {"cut": [cut], "hidden": [hidden]}
    for step in AT:
        force = {c: ForceTokens(tokens={c: new[c]}, steps=[step]) for c in new}
        interventions |= {f"copied, step {step}": force[copied], f"computed, step {step}": force[computed]}
        interventions[f"word, step {step}"] = force[word]
        interventions |= {
            f"cut, computed, step {step}": [force[computed], cut],
            f"cut, word, step {step}": [force[word], cut],
        }
        interventions[f"hidden, computed, step {step}"] = [force[computed], hidden]
        counts.setdefault(f"undecided, step {step}", []).append(int(run.unmask_step[0, final]) >= step)
    found = sweep(model, problem.prompt, interventions, progress=False)["answer"]
    texts = {name: str(found.sel(intervention=name).item()) for name in interventions}
    for name, text in texts.items():
        hides, _, rest = name.partition(", ")
        plain = texts[hides] if rest and hides in texts else run.text or ""  # with the same positions hidden, if any
        counts.setdefault(name, []).append(read_answer(text) != read_answer(plain))

for name in sorted(counts):
    print(name, proportion(int(np.sum(counts[name])), len(counts[name])))
