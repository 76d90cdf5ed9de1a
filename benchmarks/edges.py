"""Measure how well edge attribution ranks the direct paths of a trained model, and what path patching costs.

    python -m benchmarks.edges

On the canvas of a step of tiny-llada, with one number of the problem exchanged; the metric is the log-probability of
the final token at the first masked position. Prints one line per case and number of gradients averaged, against path
patching edge by edge; and for the first case how much faster path patching is with several edges in a pass.
"""

import time
from typing import Any

import sinklens
from sinklens.experiments import agreement, edge_attribution, path_patching_effects

SENDERS = ["embed", "L0H4", "L1H0", "1_mlp_out"]
CASES = [
    ("Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:", " 6", " 8", 20),
    ("Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:", " 6", " 7", 8),
    ("Question: Ben has 9 eggs. He finds 4 more. How many eggs does Ben have now?\nAnswer:", " 4", " 7", 8),
]


def stacking(*arguments: Any, repeats: int = 3) -> str:
    """The CPU time of path patching with one edge in a pass, over that with the default number."""
    best, found = {}, {}
    for edges in (1, 16):
        times = []
        for _ in range(repeats):
            start = time.process_time()
            found[edges] = path_patching_effects(*arguments, senders=SENDERS, batch_size=edges)["effect"]
            times.append(time.process_time() - start)
        best[edges] = min(times)
    difference = float(abs(found[16] - found[1]).max())
    return (
        f"{int(found[1].notnull().sum())} edges: {best[1]:.2f} s one by one, {best[16]:.2f} s stacked, "
        f"{best[1] / best[16]:.1f} times faster; largest difference {difference:.1e}"
    )


def main() -> None:
    """Print the agreement of every case."""
    import torch

    torch.set_num_threads(1)  # a model this small gains nothing from more
    model = sinklens.load("tiny-llada")
    for prompt, old, new, step in CASES:
        run = sinklens.generate(model, prompt, record_sinks=False)
        ids, place = run.canvas[:, step], int(run.undecided[0, step].nonzero()[0, 0])
        other, target = ids.clone(), int(run.canvas[0, -1, place])
        other[other == model.to_single_token(old)] = model.to_single_token(new)

        def metric(logits: torch.Tensor, place: int = place, target: int = target) -> torch.Tensor:
            return logits[0, place].log_softmax(-1)[target]

        if step == 20:
            print(stacking(model, ids, other, metric), flush=True)
        truth = path_patching_effects(model, ids, other, metric)
        for path in (0, 8):
            found = agreement(edge_attribution(model, ids, other, metric, ig_steps=path), truth)["effect"]
            print(
                f"{old} → {new}, step {step}, path={path}: {found.places} edges, rank correlation "
                f"{found.rank_correlation:.2f}, Pearson {found.correlation:.2f}, error {found.relative_error:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
