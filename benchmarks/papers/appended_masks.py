"""Measure the tables of docs/papers/appended-masks.md: what do masks after the answer do to a prediction?

    python benchmarks/papers/appended_masks.py [MODEL ...] [each=N]

The worked answers of 42 held-out word problems, six of each template, with every number masked. End tokens fill the
answer up to 24 positions; after it stand n further positions: masks, end tokens (which the models were trained to put
there), or masks that no query can attend to. Prints the mean change of the log-probability of the right numbers, the
share of problems in which all right numbers are the most likely, and the attention of the masked numbers to the further
positions. Took 3 minutes on a fraction of a core.
"""

import sys
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from templates import answers, call, loaded, mean, row

from sinklens.experiments.swaps import kinds_of_vocabulary
from sinklens.interventions import HideKeys
from sinklens.sinks.kinds import Kind
from sinklens.tasks.word_problems import Problem

MODELS = ("tiny-llada", "tiny-dream", "tiny-mmada")
ANSWER = 24
EXTRA = (8, 24, 48)
CASES = ("masks", "end tokens", "hidden masks")


def predicted(model: Any, one: Problem) -> Float[np.ndarray, "case extra 3"]:
    """Log-probability of the right numbers, whether all are most likely, and attention to the further positions."""
    prompt = model.encode(one.prompt).ids[0]
    answer = model.encode(f" {one.answer}", prepend_bos=False).ids[0]
    end = model.special_tokens["end"][0]
    text = torch.cat([prompt, answer, torch.full((max(ANSWER - len(answer), 0),), end)])
    places = np.flatnonzero(kinds_of_vocabulary(model)[text.numpy()] == Kind.DIGIT)
    places = torch.from_numpy(places[places >= len(prompt)])
    found = np.zeros((len(CASES), len(EXTRA) + 1, 3))
    for at, case in enumerate(CASES):
        for number, extra in enumerate((0, *EXTRA)):
            added = torch.full((extra,), end if case == "end tokens" else model.mask_token_id)
            ids = torch.cat([text, added])[None].clone()
            ids[0, places] = model.mask_token_id
            behind = list(range(len(text), len(text) + extra))
            hidden = HideKeys(positions=behind).hooks_for(model) if case == "hidden masks" and extra else []
            drawn: list[float] = []

            def keep(pattern: torch.Tensor, hook: Any, drawn: list[float] = drawn, first: int = len(text)) -> None:
                drawn.append(float(pattern[0, :, places, first:].sum(-1).mean()))

            hooks = [*hidden, (lambda name: name.endswith("hook_pattern"), keep)]
            logits = model.run_with_hooks(ids, fwd_hooks=hooks)[0].float()
            log_p = logits[places - int(model.family_record.shift)].log_softmax(-1)
            right = text[places]
            chosen = log_p.gather(1, right[:, None])
            found[at, number] = float(chosen.mean()), float((log_p.argmax(1) == right).all()), np.mean(drawn)
    return found


def main() -> None:
    """Print the tables."""
    names, asked, _ = call(sys.argv[1:], MODELS, 6)
    for name in names:
        model = loaded(name, masks=True)
        with torch.no_grad():
            found = np.array([predicted(model, one) for one in asked])  # [prompt, case, extra, 3]
        for at, case in enumerate(CASES):
            for number, extra in enumerate((0, *EXTRA)):
                change = found[:, at, number, 0] - found[:, at, 0, 0]
                drawn = 100 * found[:, at, number, 2]
                cells = (mean(change, asked, ".2f"), answers(found[:, at, number, 1]), mean(drawn, asked, ".0f"))
                print(row(name, case, str(extra), *cells), flush=True)
        for control in (1, 2):
            change = found[:, 0, -1, 0] - found[:, control, -1, 0]
            print(row(name, f"{EXTRA[-1]} masks − {CASES[control]}", mean(change, asked, ".2f")), flush=True)


if __name__ == "__main__":
    main()
