"""Measure how faithful and complete the strongest edges of the shipped models are, beside random circuits.

    python -m benchmarks.circuits [MODEL ...] > rows.txt
    python -m benchmarks.circuits --rows rows.txt --picture docs/pictures/circuit-curves.svg

The task is copying: in a word problem, the first number of the prompt is exchanged for another one, and the metric is
the difference of the two numbers' logits at the position of the answer that repeats the first number; in a diffusion
model at the step that decides this position. Edges are scored on training problems, by attribution and by integrated
gradients, and the mean scores give the circuits. These are measured on held-out problems, with as many problems of each
template. Intervals are t intervals over the seven templates: each template is one value, a ratio of sums over its
problems.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

import sinklens
from sinklens.analyses.estimates.deciding import in_groups
from sinklens.evaluation.verification import mean_of
from sinklens.experiments import circuit_curves, edge_scores
from sinklens.experiments.circuits import CircuitCase, circuit_case
from sinklens.tasks.word_problems import PROBLEM_KINDS, Problem, held_out, training
from sinklens.utils.estimates import Estimate

MODELS = ("tiny-llada", "tiny-llama")
PATHS = {"attribution": 0, "integrated gradients": 8}
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
EACH, DRAWS = 2, 2
"""Problems of each template, for the scores and for the measurement, and random circuits of each kind per problem."""


def over_templates(
    values: Float[np.ndarray, " prompt"],
    kinds: Sequence[str],
    weights: Float[np.ndarray, " prompt"] | None = None,
) -> Estimate:
    """The mean of the templates' means with its t interval; NaN values are left out.

    Args:
        kinds: the template of each value.
        weights: of each value within its template; None for equal ones.
    """
    known = np.where(np.isnan(values), np.nan, 1.0 if weights is None else weights)
    means = in_groups(known * values, kinds) / in_groups(known, kinds)
    return mean_of(means.tolist())


def text(value: Estimate) -> str:
    """``mean (low to high)``."""
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"


def case_of(model: sinklens.Model, problem: Problem) -> CircuitCase | None:
    """The case of a problem; None if its first number occurs again in the prompt or not at all in the answer."""
    run = sinklens.generate(model, problem.prompt, record_sinks=False, progress=False)
    number = next(word for word in problem.question.split() if word.isdigit())
    other = next(n for n in range(2, 21) if str(n) not in problem.question and abs(n - int(number)) > 2)
    old, new = (model.to_single_token(f" {n}") for n in (number, other))
    prompt, answer = run.canvas[0, 0, : run.prompt_length], run.canvas[0, -1, run.prompt_length :]
    places = (answer == old).nonzero()[:, 0].tolist()
    if int((prompt == old).sum()) != 1 or not places:
        return None
    place = run.prompt_length + places[0]
    if model.causal:
        ids, reads = run.canvas[:, -1, :place], place - 1
    else:
        ids, reads = run.canvas[:, int(run.unmask_step[0, place])], place
    changed = ids.clone()
    changed[0, : run.prompt_length][prompt == old] = new

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, reads, old] - logits[0, reads, new]

    return circuit_case(model, ids, changed, metric)


def cases_of(model: sinklens.Model, problems: Sequence[Problem]) -> Iterator[tuple[str, CircuitCase]]:
    """The first `EACH` cases of every template."""
    for kind in PROBLEM_KINDS:
        found = (case_of(model, problem) for problem in problems if problem.kind == kind)
        for _, case in zip(range(EACH), (case for case in found if case is not None), strict=False):
            yield kind, case


def measured(name: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each score, share and kind of circuit."""
    model = sinklens.load(name)
    fitted = [case for _, case in cases_of(model, training(21, 120))]
    kinds, tested = zip(*cases_of(model, held_out(120)), strict=True)
    rows = []
    for score in paths:
        scores = edge_scores(fitted, path=PATHS[score]).mean("step", skipna=False)
        curves = [circuit_curves([case], scores, SHARES, draws=DRAWS, seed=10 * n) for n, case in enumerate(tested)]
        span = np.array([one.attrs["full"] - one.attrs["empty"] for one in curves])
        for share in SHARES:
            for kind in ("circuit", "random", "degree"):
                row: dict[str, Any] = {"model": name, "score": score, "share": share, "kind": kind, "n": len(tested)}
                row |= {"edges": int(curves[0]["edges"].sel(share=share)), "span": float(np.median(span))}
                row["changed"] = float(np.mean([one["changed"].sel(share=share).mean() for one in curves]))
                for measure in ("faithfulness", "completeness"):
                    values = np.array([float(one[measure].sel(share=share, kind=kind).mean()) for one in curves])
                    row[measure] = over_templates(values, kinds, span)  # a ratio of sums
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """The rows that an earlier call printed."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    measures = ("faithfulness", "completeness")
    return [row | {measure: Estimate(*row[measure]) for measure in measures} for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = []
    for row in (row for row in rows if row["kind"] == "circuit"):
        beside = [
            next(
                o for o in rows if o["kind"] == kind and all(o[key] == row[key] for key in ("model", "score", "share"))
            )
            for kind in ("random", "degree")
        ]
        cells = [text(row["faithfulness"])]
        cells += [f"{other['faithfulness'].value:.2f}" for other in beside]
        cells += [text(row["completeness"])]
        cells += [f"{other['completeness'].value:.2f}" for other in beside]
        cells += [f"{row['changed']:.2f}"]
        lines.append(f"| {row['model']} | {row['score']} | {row['share']:.0%}, {row['edges']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves of every model and score as a figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "circuits", "font.size": 8}
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((row["model"], row["score"]) for row in rows))
    size = (max(3.6, 2.6 * len(panels)), 4.4)
    figure, axes = plt.subplots(2, len(panels), figsize=size, sharex=True, sharey=True, squeeze=False)
    shares = list(dict.fromkeys(row["share"] for row in rows))
    colors = {"circuit": "#2171b5", "random": "#969696", "degree": "#e6550d"}
    labels = {"circuit": "strongest", "random": "random", "degree": "degree-matched"}
    for column, panel in enumerate(panels):
        for line, measure in enumerate(("faithfulness", "completeness")):
            axis = axes[line, column]
            for kind, color in colors.items():
                chosen = [row for row in rows if (row["model"], row["score"]) == panel and row["kind"] == kind]
                values = [row[measure] for row in chosen]
                at = [row["share"] for row in chosen]
                axis.plot(at, [value.value for value in values], "o-", ms=3, color=color, label=labels[kind])
                low, high = [value.low for value in values], [value.high for value in values]
                axis.fill_between(at, low, high, color=color, alpha=0.2, lw=0)
            axis.axhline(1, color="black", lw=0.5, ls=":")
            axis.axhline(0, color="black", lw=0.5)
            axis.set_xscale("log")
            axis.set_xticks(shares, [f"{share:.0%}" for share in shares], minor=False)
            axis.minorticks_off()
            if column == 0:
                axis.set_ylabel(measure)
            if line == 0:
                axis.set_title(",\n".join(panel))
            else:
                axis.set_xlabel("edges kept")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Print the table, and draw the figure if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--scores", nargs="*", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--rows", type=Path, help="what an earlier call printed, instead of measuring")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = (
        read(arguments.rows)
        if arguments.rows
        else [row for name in arguments.models for row in measured(name, arguments.scores)]
    )
    print(table(rows))
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
