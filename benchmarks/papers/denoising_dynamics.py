"""Does uncertainty that leaves its usual course betray a wrong answer? docs/papers/denoising-dynamics.md.

    python benchmarks/papers/denoising_dynamics.py [MODEL ...] [each=N] [SETTING=VALUE ...]

The runs of errors_in_traces.py. A reference course, mean and variance of the entropy at every step, is taken from right
answers of five folds of problems; a problem of the sixth is scored by its mean squared deviation from it in standard
deviations, by the mean deviation with its sign, and by controls: the entropy of the last step alone, without a course;
the same deviations after the steps of the tested runs were shuffled; and the courses of all tokens, or of all but
numbers, in place of numbers. Intervals: bootstrap over problems.

About 12 seconds of processor time for tiny-llada.
"""

import sys
from collections.abc import Callable

import numpy as np
import xarray as xr
from errors_in_traces import EACH, MODELS, Judged, erring_runs, out_of_fold
from templates import call

import sinklens


def course(found: xr.Dataset, chosen: np.ndarray) -> np.ndarray:
    """Mean entropy of the chosen positions of the answer at every step, decided or not, [problem, step]."""
    inside = found["answer"] & xr.DataArray(chosen, dims=("batch", "pos"))
    return found["entropy"].where(inside).mean("pos").fillna(0).transpose("batch", "step").to_numpy()


def is_number(run: sinklens.Generation) -> np.ndarray:
    """Which tokens of the finished canvas are numbers, [problem, pos]."""
    names = np.array([run.model.to_single_str_token(token) for token in range(run.model.cfg.d_vocab)])
    digits = np.array([name.strip().isdigit() for name in names])
    ids = run.tokens.numpy()
    return digits[ids.clip(min=0)] & (ids >= 0)


def deviation(power: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Scores by the deviation from the course of right answers, to a power, averaged over steps."""

    def scores(train: np.ndarray, wrong: np.ndarray, test: np.ndarray) -> np.ndarray:
        right = train[~wrong]
        return (((test - right.mean(axis=0)) / (right.std(axis=0) + 1e-3)) ** power).mean(axis=1)

    return scores


def main() -> None:
    """Print the tables."""
    asked = call(sys.argv[1:], MODELS, EACH)
    for name in asked.models:
        tell(erring_runs(name, asked))


def tell(judged: Judged) -> None:
    """Print the table of a model."""
    wrong, report, numbers = judged.wrong, judged.report, is_number(judged.run)
    for label, chosen in {"numbers": numbers, "all tokens": numbers | True, "all but numbers": ~numbers}.items():
        entropy = course(judged.found, chosen)
        print(label)
        report("  squared deviation", out_of_fold(entropy, wrong, deviation(2)))
        report("  signed deviation", out_of_fold(entropy, wrong, deviation(1)))
        mixed = np.random.default_rng(0).permuted(entropy, axis=1)
        report("  squared deviation, steps shuffled", out_of_fold(mixed, wrong, deviation(2)))
        report("  mean over steps", entropy.mean(axis=1))
        report("  last step alone", entropy[:, -1])


if __name__ == "__main__":
    main()
