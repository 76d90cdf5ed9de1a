"""Measure the tables of docs/papers/one-sink-token.md: does an extra token that sees only itself take up the sinks?

    python benchmarks/papers/one_sink_token.py [MODEL ...] [each=N] [SETTING=VALUE ...]

14 held-out word problems, two of each template, without an extra token, with one that sees only itself, with one
without a value, with an ordinary extra token (a second start token), and with a *planted* sink: the extra token, whose
attention scores are raised by 6 in every head. Took 10 minutes for each model on a fraction of a core.
"""

import sys
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from templates import answers, call, mean, row

import sinklens
from sinklens.interventions import SinkToken
from sinklens.sinks import Record, motion
from sinklens.sinks.values import value_over_median
from sinklens.tasks.word_problems import Problem, read_answer

MODELS = ("tiny-llada", "tiny-dream")
MEASURES = (
    "strongest key is the first token, %",
    "strongest key changes, % of steps",
    "value norm at sinks",
    "right, %",
)


def planted(mask: torch.Tensor, hook: Any) -> torch.Tensor:
    """Raise the attention scores of the first token by 6."""
    mask = mask.clone()
    mask[..., 0] += 6
    return mask


CASES: dict[str, Any] = {
    "nothing added": [],
    "sink token": SinkToken(),
    "sink token, value 0": SinkToken(value="zero"),
    "ordinary token": [],
    "planted sink": [SinkToken(), (lambda name: name.endswith("hook_attn_mask"), planted)],
}


def prompt_ids(model: Any, prompt: str, case: str) -> torch.Tensor:
    """The ids of a prompt; an ordinary token is the one that `SinkToken` inserts."""
    ids = model.encode(prompt).ids
    return torch.cat([ids.new_tensor([model.special_tokens["start"][:1]]), ids], dim=1) if "ordinary" in case else ids


def measured(model: Any, one: Problem, case: str, settings: dict[str, Any]) -> Float[np.ndarray, " measure"]:
    """`MEASURES` of one run."""
    ids, record = prompt_ids(model, one.prompt, case), Record(["values"])
    run = sinklens.generate(model, ids, hooks=CASES[case], record_sinks=record, progress=False, **settings)
    track = run.sinks
    first = float((motion.strongest_key(track) == 0).mean())
    norm = float(value_over_median(track).where(track.detect()).mean())
    moved = float(motion.jumps(track)["share"].mean())
    return np.array([100 * first, 100 * moved, norm, read_answer(run.text[0] or "") == one.result])


def main() -> None:
    """Print the tables."""
    names, asked, settings = call(sys.argv[1:], MODELS, 2)
    for name in names:
        model, found = sinklens.load(name), {}
        for case in CASES:
            found[case] = np.array([measured(model, one, case, settings) for one in asked])
            cells = [mean(part, asked) for part in found[case].T[:-1]]
            print(row(name, case, *cells, answers(found[case][:, -1])), flush=True)
        for case in ("sink token", "sink token, value 0"):
            difference = found[case] - found["ordinary token"]
            cells = [mean(part, asked) for part in difference.T[:-1]]
            print(row(name, f"{case} − ordinary token", *cells, answers(difference[:, -1], -1)), flush=True)


if __name__ == "__main__":
    main()
