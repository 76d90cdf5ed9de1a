"""Measure how well edge attribution ranks the direct paths of a trained model: against path patching, edge by edge.

    python benchmarks/edges.py

On the canvas of a step of tiny-llada, with one number of the problem exchanged; the metric is the log-probability of
the final token at the first masked position. Prints one line per case and number of gradients averaged.
"""

import sinklens
from sinklens.experiments import agreement, edge_attribution, path_patching_effects

CASES = [
    ("Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:", " 6", " 8", 20),
    ("Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:", " 6", " 7", 8),
    ("Question: Ben has 9 eggs. He finds 4 more. How many eggs does Ben have now?\nAnswer:", " 4", " 7", 8),
]


def main() -> None:
    """Print the agreement of every case."""
    import torch

    model = sinklens.load("tiny-llada")
    for prompt, old, new, step in CASES:
        run = sinklens.generate(model, prompt, record_sinks=False)
        ids, place = run.canvas[:, step], int(run.undecided[0, step].nonzero()[0, 0])
        other, target = ids.clone(), int(run.canvas[0, -1, place])
        other[other == model.to_single_token(old)] = model.to_single_token(new)

        def metric(logits: torch.Tensor, place: int = place, target: int = target) -> torch.Tensor:
            return logits[0, place].log_softmax(-1)[target]

        truth = path_patching_effects(model, ids, other, metric)
        for path in (0, 8):
            found = agreement(edge_attribution(model, ids, other, metric, path=path), truth)["effect"]
            print(
                f"{old} → {new}, step {step}, path={path}: {found.places} edges, rank correlation "
                f"{found.rank_correlation:.2f}, Pearson {found.correlation:.2f}, error {found.relative_error:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
