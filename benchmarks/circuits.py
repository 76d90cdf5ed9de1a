"""Measure how faithful and complete the strongest edges of the shipped models are, beside random circuits.

    python benchmarks/circuits.py

On the canvas of a step in the middle of the run, with one number of the problem exchanged; the metric is the mean
log-probability of the final tokens at the undecided positions. Scores are integrated gradients (``path=8``), their mean
over the three problems; the circuits are measured on the same three problems and on three others.
"""

import sinklens
from sinklens.experiments import circuit_cases, circuit_curves, edge_scores

STEP = 8
SHARES = (0.02, 0.1, 0.3)
FITTED = [
    ("Question: Mia has 17 pens. She loses 6 of them. How many pens are left?\nAnswer:", " 6", " 7"),
    ("Question: Ben has 9 eggs. He finds 4 more. How many eggs does Ben have now?\nAnswer:", " 4", " 7"),
    ("Question: Kim has 20 balls. She buys 18 more. How many balls does Kim have now?\nAnswer:", " 18", " 11"),
]
OTHERS = [
    ("Question: Mia has 19 cards. She loses 8 of them. How many cards are left?\nAnswer:", " 8", " 5"),
    ("Question: Ben has 12 coins. He finds 3 more. How many coins does Ben have now?\nAnswer:", " 3", " 6"),
    ("Question: Kim has 14 books. She buys 13 more. How many books does Kim have now?\nAnswer:", " 13", " 19"),
]


def cases_of(model: sinklens.Model, problems: list[tuple[str, str, str]]) -> list:
    """One case per problem."""
    found = []
    for prompt, old, new in problems:
        run = sinklens.generate(model, prompt, record_sinks=False, progress=False)
        found += circuit_cases(run, {old: new}, steps=[STEP])
    return found


def main() -> None:
    for name in ("tiny-llada", "tiny-dream"):
        model = sinklens.load(name)
        fitted, others = cases_of(model, FITTED), cases_of(model, OTHERS)
        scores = edge_scores(fitted, path=8).mean("step", skipna=False)
        for label, cases in (("same problems", fitted), ("other problems", others)):
            curves = circuit_curves(cases, scores, SHARES, draws=3)
            for share in SHARES:
                now = curves.sel(share=share)
                parts = [
                    f"{kind} {float(now['faithfulness'].sel(kind=kind).mean()):.2f} / "
                    f"{float(now['completeness'].sel(kind=kind).mean()):.2f}"
                    for kind in ("circuit", "random", "degree")
                ]
                changed = float(now["changed"].mean())
                print(
                    f"{name}, {label}, {int(now['edges'])} edges ({share:.0%}): {', '.join(parts)}; {changed:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
