"""Measure which lens decodes the final token of the shipped models earlier, by masked share.

    python benchmarks/lenses.py

A tuned lens and two Jacobian lenses are fitted on training problems and read, with the logit lens, on held-out ones.
Prints the first layer that decodes the final token for good (see sinklens.experiments.compare_lenses), and the share of
positions decoded by layer, with intervals over prompts of the paired difference from the logit lens.
"""

import numpy as np

import sinklens
from sinklens.analyses.intervals import mean_interval
from sinklens.experiments import compare_lenses, fit_jacobian_lens, train_tuned_lens
from sinklens.tasks.word_problems import held_out, training

BUCKETS = 2
SETTINGS = {"steps": 12}


def main() -> None:
    fitted = [problem.prompt for problem in training(5, 16)]
    tested = [problem.prompt for problem in held_out(12)]
    for name in ("tiny-llada", "tiny-dream"):
        model = sinklens.load(name)
        lenses = {
            "logit": None,
            "tuned": train_tuned_lens(model, fitted, buckets=BUCKETS, updates=150, **SETTINGS),
            "jacobian": fit_jacobian_lens(model, fitted, buckets=BUCKETS, passes=6, **SETTINGS),
            "jacobian, own": fit_jacobian_lens(model, fitted, buckets=BUCKETS, passes=12, targets="own", **SETTINGS),
        }
        found = compare_lenses(model, tested, lenses, buckets=BUCKETS, **SETTINGS)
        for bucket in found["bucket"].values:
            now = found.sel(bucket=bucket)
            for lens in lenses:
                decoded = ", ".join(f"{value:.2f}" for value in now["decoded"].sel(lens=lens).mean("prompt").values)
                first = now["first"].sel(lens=lens).to_numpy()
                difference = first - now["first"].sel(lens="logit").to_numpy()
                interval = mean_interval(difference[~np.isnan(difference)])
                print(
                    f"{name}, share up to {bucket}: {lens}: first {np.nanmean(first):.2f}, {interval}; {decoded}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
