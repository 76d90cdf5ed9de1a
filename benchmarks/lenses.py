"""Measure which lens decodes the final token of the shipped models earlier, by layer and masked share.

    python -m benchmarks.lenses [MODEL ...]

A tuned lens and a Jacobian lens are fitted on training problems and read, with the logit lens, on held-out ones, as
many of each template. Prints, by bucket of the masked share, the first layer that decodes the final token for good (see
sinklens.experiments.compare_lenses), its paired difference from the logit lens, and the share of places decoded by
layer. Each template is one value; intervals are t intervals over the seven templates.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

import sinklens
from sinklens.analyses.estimates.deciding import in_groups
from sinklens.evaluation.verification import mean_of
from sinklens.experiments import TunedLens, compare_lenses, fit_jacobian_lens, train_tuned_lens
from sinklens.tasks.word_problems import PROBLEM_KINDS, Problem, held_out, training
from sinklens.utils.estimates import Estimate

BUCKETS = {"tiny-llada": 2, "tiny-llama": 1}
STEPS = {"tiny-llada": {"steps": 12}, "tiny-llama": {}}
FITTED, TESTED = 2, 2
"""Problems of each template."""


def chosen(problems: Sequence[Problem], each: int) -> Iterator[Problem]:
    """The first problems of every template."""
    for kind in PROBLEM_KINDS:
        yield from [problem for problem in problems if problem.kind == kind][:each]


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


def measured(name: str) -> list[dict[str, Any]]:
    """A row for each bucket and lens."""
    model, buckets = sinklens.load(name), BUCKETS[name]
    fitted = [problem.prompt for problem in chosen(training(22, 60), FITTED)]
    tested = list(chosen(held_out(60), TESTED))
    kinds = [problem.kind for problem in tested]
    given: dict[str, Any] = {"buckets": buckets, **STEPS[name]}
    lenses: dict[str, TunedLens | None] = {
        "logit": None,
        "tuned": train_tuned_lens(model, fitted, updates=150, batch=128, learning_rate=3e-3, **given),
        "Jacobian": fit_jacobian_lens(model, fitted, passes=10, dims=48, **given),
    }
    found = compare_lenses(model, [problem.prompt for problem in tested], lenses, **given)
    rows = []
    for bucket in found["bucket"].values[::-1]:
        for lens in lenses:
            here = found.sel(bucket=bucket)
            now, logit = here.sel(lens=lens), here.sel(lens="logit")
            row: dict[str, Any] = {"model": name, "bucket": float(bucket), "lens": lens, "n": len(tested)}
            row["first"] = over_templates(now["first"].to_numpy(), kinds)
            row["earlier"] = over_templates((logit["first"] - now["first"]).to_numpy(), kinds)
            decoded, more = now["decoded"], now["decoded"] - logit["decoded"]
            row["decoded"] = [over_templates(decoded.sel(layer=n).to_numpy(), kinds) for n in range(model.cfg.n_layers)]
            row["more"] = [over_templates(more.sel(layer=n).to_numpy(), kinds) for n in range(model.cfg.n_layers)]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows:
        low = row["bucket"] - 1 / BUCKETS[row["model"]]
        share = "" if BUCKETS[row["model"]] == 1 else f", {low:.2f} to {row['bucket']:.2f}"
        decoded = " | ".join(f"{value.value:.2f}" for value in row["decoded"])
        earlier = "" if row["lens"] == "logit" else text(row["earlier"])
        lines.append(f"| {row['model']}{share} | {row['lens']} | {decoded} | {text(row['first'])} | {earlier} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BUCKETS))
    print(table([row for name in parser.parse_args().models for row in measured(name)]))


if __name__ == "__main__":
    main()
