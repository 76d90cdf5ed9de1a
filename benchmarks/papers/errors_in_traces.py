"""Does the trace of a run say that its answer is wrong? docs/papers/errors-in-traces.md.

    python benchmarks/papers/errors_in_traces.py [MODEL ...] [each=N] [SETTING=VALUE ...]

Runs of tiny-llada, or of other models, that err: 84 held-out problems, 28 of each template with two steps of
arithmetic, 6 steps of denoising in random order at temperature 1. From every step come three numbers over undecided
positions of the answer: the mean and the highest entropy of the predictions and the smallest gap. A logistic regression
reads them from one step, a window of steps or all, and is tested on problems that it was not fitted to, in six folds.
The window is chosen among the problems of the fit. An AUROC compares right and wrong answers of one template.
Intervals: bootstrap over problems.

About 12 seconds of processor time for tiny-llada.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xarray as xr
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from templates import RANDOM, Call, call, having, loaded

import sinklens
from sinklens.experiments import step_predictions
from sinklens.tasks.word_problems import Problem, read_answer

MODELS = ("tiny-llada",)
EACH, STEPS = 28, 6
DRAWN = {"temperature": 1.0, "greedy": False}  # settings, each of other samplers, by which tokens are drawn
TWO_STEPS = ("groups-then-more", "more-then-fewer", "together")
Features = np.ndarray
"""[problem, feature]."""


class Judged(NamedTuple):
    """A run, its predictions, its problems, and whether the answers are wrong, [problem]."""

    run: sinklens.Generation
    found: xr.Dataset
    problems: list[Problem]
    wrong: np.ndarray

    @property
    def kinds(self) -> np.ndarray:
        """The template of each problem."""
        return np.array([problem.kind for problem in self.problems])

    def report(self, label: str, scores: np.ndarray) -> None:
        """Print an AUROC with its 95 % bootstrap interval over problems."""
        rng = np.random.default_rng(0)
        draws = [rng.integers(len(scores), size=len(scores)) for _ in range(500)]
        values = [auroc(scores[draw], self.wrong[draw], self.kinds[draw]) for draw in draws]
        low, high = np.nanquantile(values, [0.025, 0.975])
        print(f"{label}: {auroc(scores, self.wrong, self.kinds):.2f} [{low:.2f}, {high:.2f}]", flush=True)


def erring_runs(name: str, asked: Call) -> Judged:
    """A run in which many answers are wrong; prints how many."""
    problems = [problem for problem in asked.problems if problem.kind in TWO_STEPS]
    model = loaded(name, masks=True, shuffles=True)
    settings = {"steps": STEPS, "record_sinks": False} | having(model, RANDOM | DRAWN) | asked.settings
    run = sinklens.generate(model, [problem.prompt for problem in problems], progress=False, **settings)
    results = zip(run.answers, problems, strict=True)
    wrong = np.array([read_answer(answer.text or "") != problem.result for answer, problem in results])
    print(f"{name}: {wrong.sum()} of {len(wrong)} answers are wrong")
    return Judged(run, step_predictions(run), problems, wrong)


def step_features(found: xr.Dataset) -> np.ndarray:
    """Mean entropy, highest entropy and smallest gap of undecided answer positions, [problem, step, 3]."""
    entropy, gap = (found[name].where(found["masked"] & found["answer"]) for name in ("entropy", "gap"))
    found = [entropy.mean("pos").fillna(0), entropy.max("pos").fillna(0), gap.min("pos").fillna(1)]  # if none is left
    return np.stack(found, axis=-1)


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
    steps = train.shape[1]
    windows = [slice(first, last) for first in range(steps) for last in range(first + 1, steps + 1)]

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


def main() -> None:
    """Print the tables."""
    asked = call(sys.argv[1:], MODELS, EACH)
    for name in asked.models:
        tell(erring_runs(name, asked))


def tell(judged: Judged) -> None:
    """Print the table of a model."""
    wrong, report = judged.wrong, judged.report
    print("by template:", {str(kind): int(wrong[judged.kinds == kind].sum()) for kind in sorted(set(judged.kinds))})
    features = step_features(judged.found)
    numbers = [[one.result, sum(map(len, one.question.split()))] for one in judged.problems]
    report("the problem alone", out_of_fold(np.array(numbers, dtype=float), wrong))
    for step in range(features.shape[1]):
        report(f"step {step}", out_of_fold(features[:, step], wrong))
    report("mean over steps", out_of_fold(features.mean(axis=1), wrong))
    report("all steps", out_of_fold(features.reshape(len(wrong), -1), wrong))
    report("best window", out_of_fold(features, wrong, best_window))
    shuffled = judged._replace(wrong=np.random.default_rng(0).permutation(wrong))
    scores = out_of_fold(features.reshape(len(wrong), -1), shuffled.wrong)
    shuffled.report("all steps, shuffled labels", scores)


if __name__ == "__main__":
    main()
