"""Does the trace of a run say that its answer is wrong? docs/papers/errors-in-traces.md.

Runs of tiny-llada that err: 84 held-out problems, 28 of each template with two steps of arithmetic, 6 steps of
denoising in random order at temperature 1. From every step come three numbers over undecided positions of the answer:
the mean and the highest entropy of the predictions and the smallest gap. A logistic regression reads them from one
step, a window of steps or all, and is tested on problems that it was not fitted to, in six folds. The window is chosen
among the problems of the fit. An AUROC compares right and wrong answers of one template. Intervals: bootstrap over
problems.

About 12 seconds of processor time.
"""

from collections.abc import Callable

import numpy as np
import xarray as xr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from template_means import balanced

import sinklens
from sinklens.experiments import entropy_features, step_predictions
from sinklens.tasks.word_problems import Problem, read_answer

STEPS = 6
TWO_STEPS = ("groups-then-more", "more-then-fewer", "together")
Features = np.ndarray
"""[problem, feature]."""


def erring_runs(problems: list[Problem]) -> tuple[sinklens.Generation, xr.Dataset, np.ndarray]:
    """A run of each problem, its predictions, and whether its answer is wrong [problem]."""
    model, prompts = sinklens.load("tiny-llada"), [problem.prompt for problem in problems]
    settings = {"steps": STEPS, "remasking": "random", "temperature": 1.0, "record_sinks": False}
    run = sinklens.generate(model, prompts, progress=False, **settings)
    results = zip(run.answers, problems, strict=True)
    wrong = np.array([read_answer(answer.text or "") != problem.result for answer, problem in results])
    return run, step_predictions(run), wrong


def step_features(found: xr.Dataset) -> np.ndarray:
    """Mean entropy, highest entropy and smallest gap of undecided answer positions, [problem, step, 3]."""
    columns = entropy_features(found, parts=STEPS).to_numpy()[:, :-1]  # without the share of changes
    return columns.reshape(len(columns), STEPS, 3)


def fitted(train: Features, labels: np.ndarray, test: Features) -> np.ndarray:
    """Scores of `test` by a logistic regression."""
    probe = make_pipeline(StandardScaler(), LogisticRegression()).fit(train, labels)
    return probe.decision_function(test)


def out_of_fold(features: Features, wrong: np.ndarray, fit: Callable = fitted, folds: int = 6) -> np.ndarray:
    """Scores of every problem by a fit to the problems of other folds."""
    fold, scores = np.arange(len(wrong)) % folds, np.zeros(len(wrong))
    for number in range(folds):
        test = fold == number
        scores[test] = fit(features[~test], wrong[~test], features[test])
    return scores


def best_window(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Scores by the window of steps that separates the training problems best, in six folds of them."""
    windows = [slice(first, last) for first in range(STEPS) for last in range(first + 1, STEPS + 1)]

    def held(window: slice) -> float:
        part = train[:, window].reshape(len(labels), -1)
        return auroc(out_of_fold(part, labels), labels, np.zeros(len(labels)))

    window = max(windows, key=held)
    return fitted(train[:, window].reshape(len(train), -1), labels, test[:, window].reshape(len(test), -1))


def auroc(scores: np.ndarray, wrong: np.ndarray, kinds: np.ndarray) -> float:
    """Probability that a wrong answer scores higher than a right one of its template."""
    above, pairs = 0.0, 0
    for kind in set(kinds):
        high, low = scores[(kinds == kind) & wrong][:, None], scores[(kinds == kind) & ~wrong]
        above, pairs = above + (high > low).sum() + 0.5 * (high == low).sum(), pairs + high.size * low.size
    return float(above / pairs) if pairs else np.nan


def report(label: str, scores: np.ndarray, wrong: np.ndarray, kinds: np.ndarray) -> None:
    """Print an AUROC with its 95 % bootstrap interval over problems."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(wrong), size=len(wrong)) for _ in range(500)]
    low, high = np.nanquantile([auroc(scores[draw], wrong[draw], kinds[draw]) for draw in draws], [0.025, 0.975])
    print(f"{label}: {auroc(scores, wrong, kinds):.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main() -> None:
    """Print the table."""
    problems = balanced(28, TWO_STEPS)
    kinds = np.array([problem.kind for problem in problems])
    _, found, wrong = erring_runs(problems)
    features = step_features(found)
    print(f"{wrong.sum()} of {len(wrong)} answers are wrong; by template:")
    print({kind: int(wrong[kinds == kind].sum()) for kind in sorted(set(kinds))})
    numbers = np.array([[p.result, sum(map(len, p.question.split()))] for p in problems], dtype=float)
    report("the problem alone", out_of_fold(numbers, wrong), wrong, kinds)
    for step in range(STEPS):
        report(f"step {step}", out_of_fold(features[:, step], wrong), wrong, kinds)
    report("mean over steps", out_of_fold(features.mean(axis=1), wrong), wrong, kinds)
    report("all steps", out_of_fold(features.reshape(len(wrong), -1), wrong), wrong, kinds)
    report("best window", out_of_fold(features, wrong, best_window), wrong, kinds)
    shuffled = np.random.default_rng(0).permutation(wrong)
    report("all steps, shuffled labels", out_of_fold(features.reshape(len(wrong), -1), shuffled), shuffled, kinds)


if __name__ == "__main__":
    main()
