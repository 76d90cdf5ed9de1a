"""How well a label can be read, with controls: every point, at every step, noise level or state.

Probes are fitted and tested on different prompts (folds), never on different positions of one prompt. The score of
classes is the share of places that are right; with ``balanced=True`` every class counts alike. That of "ridge" is R²,
1 − Σ (y − ŷ)² / Σ (y − ȳ)², with ȳ the mean of the training folds. Beside it stand

    majority    always the most frequent class of the training folds (0 for R²)
    shuffled    the same probe, fitted and tested on labels that are shuffled among the places, or among the prompts if
                they do not differ within one (Hewitt & Liang, 1909.03368)
    random      the same probe, which sees the activation along as many random directions as it has itself
    bag         a logistic or ridge probe which sees only tokens: how often each is on the canvas of the step, and which
                one is at the place; NaN where the canvases are not known
    place       the same, which sees only the position, counted from the start of the answer (of the text, if unknown)

*Selectivity* is the score minus that of the shuffled labels; p tests it, one-sided, by changing the signs of the
prompts' differences at random, and ``p_holm`` is corrected over all rows of the table. Intervals are over prompts: of
the ratio of sums by bootstrap, or Wilson's where every prompt is entirely right or wrong.

Pitfall: prompts from one template share what a probe can learn by heart. Name what they share with ``units=``: a column
such as the template, whose values then are never in training and test at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from sinklens.errors import SettingError
from sinklens.features.probe_places import ProbeData
from sinklens.features.probes import ProbeKind, fitted
from sinklens.utils.arguments import Positive, read_as
from sinklens.utils.estimates import RESAMPLES, Estimate, holm, pooled, proportion

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

NOISE_BINS = 4
SCORES = ("score", "low", "high", "majority", "shuffled", "random", "bag", "place", "selectivity", "p")


@dataclass(frozen=True)
class _Test:
    """How probes are tested; see `probe_table`."""

    kind: ProbeKind = "logistic"
    penalty: Positive = 1.0
    folds: int = 5
    units: str = "prompt"
    balanced: bool = False
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        read_as(Positive, "penalty", self.penalty)
        if self.folds < 2 or self.repeats < 1:
            raise SettingError(f"folds must be 2 or more and repeats 1 or more; got {self.folds} and {self.repeats}.")


class _Parts(NamedTuple):
    """What each unit contributes to a score, Σ gained / Σ possible."""

    gained: Float[np.ndarray, " unit"]
    possible: Float[np.ndarray, " unit"]

    @property
    def score(self) -> float:
        total = self.possible.sum()
        return float(self.gained.sum() / total) if total else float("nan")


def probe_table(
    data: ProbeData,
    label: str,
    by: str | None = None,
    *,
    kind: ProbeKind = "logistic",
    penalty: Positive = 1.0,
    folds: int = 5,
    units: str = "prompt",
    balanced: bool = False,
    repeats: int = 3,
    seed: int = 0,
) -> "DataFrame":
    """Fit and test probes of `label` at every point of `data`; see the module.

    Args:
        data: activations of several prompts.
        label: one of its columns.
        by: a column by which places are divided, such as "step", "state" or "noise" (in quarters of its range 0 to 1);
            each part has its own probes. None for one part.
        kind, penalty: see `fit_probe`.
        folds: number of parts of the units, each of which is tested once; 2 or more.
        units: the column that is split and resampled: "prompt", or what prompts share.
        balanced: whether every class counts alike.
        repeats: draws of shuffled labels and of random directions; 1 or more.
        seed: of folds, draws and intervals.

    Returns:
        A row for each point and part: ``point``, the part, ``score``, ``low`` and ``high`` (95 %), ``majority``,
        ``shuffled``, ``random``, ``bag``, ``place``, ``selectivity``, ``p``, ``p_holm``, ``units`` and ``places``.
        Parts in which a training fold has a single class have NaN.

    Raises:
        SettingError: an unknown column or setting, fewer units than folds, or a label that the kind cannot fit.
    """
    from pandas import DataFrame

    test = _Test(kind, penalty, folds, units, balanced, repeats, seed)
    data.column(label), data.column(units)
    rows = []
    for name, part in _parts(data, by):
        bag, place = _tokens(part), _one_hot(_position(part))
        for point in part.values:
            found = _tested(part.values[point], part, label, test, bag, place)
            rows.append({"point": point, **({} if by is None else {by: name}), **found})
    table = DataFrame(rows)
    tested = table["p"].dropna()
    table.insert(table.columns.get_loc("p") + 1, "p_holm", np.nan)
    table.loc[tested.index, "p_holm"] = holm(tested.tolist())
    return table


def _parts(data: ProbeData, by: str | None) -> Iterator[tuple[Any, ProbeData]]:
    """The parts of the places with their names."""
    if by is None:
        yield None, data
        return
    values = data.column(by)
    if by == "noise":  # ( 0, 1/4 ] … ; places without noise belong to the first
        values = np.ceil(np.clip(values, 1e-9, 1) * NOISE_BINS) / NOISE_BINS
    for name in np.unique(values):
        yield name.item(), data.chosen(values == name)


def _tested(x: np.ndarray, part: ProbeData, label: str, test: _Test, bag: Any, place: Any) -> dict[str, Any]:
    """One row of the table."""
    y, unit = part.column(label), np.unique(part.column(test.units), return_inverse=True)[1]
    rng = np.random.default_rng(test.seed)
    fold = _folds(unit, test, rng)
    if test.kind != "ridge" and any(len(np.unique(y[fold != one])) < 2 for one in range(test.folds)):
        return {**dict.fromkeys(SCORES, np.nan), "units": int(unit.max()) + 1, "places": len(y)}
    own = _scored(x, y, unit, fold, test)
    shuffled = [_scored(x, _shuffled(y, unit, rng), unit, fold, test) for _ in range(test.repeats)]
    rank = 1 if test.kind == "ridge" else len(np.unique(y)) - 1
    turns = [rng.normal(size=(x.shape[1], min(rank, x.shape[1]))) for _ in range(test.repeats)]
    found = _interval(own, test.seed)
    control = float(np.mean([parts.score for parts in shuffled]))
    return {
        "score": own.score, "low": float(found.low), "high": float(found.high),
        "majority": _scored(None, y, unit, fold, test).score,
        "shuffled": control,
        "random": float(np.mean([_scored(x @ turn, y, unit, fold, test).score for turn in turns])),
        "bag": np.nan if bag is None else _scored(bag, y, unit, fold, test).score,
        "place": _scored(place, y, unit, fold, test).score,
        "selectivity": own.score - control, "p": _p_value(own, shuffled, test.seed),
        "units": len(own.gained), "places": len(y),
    }  # fmt: skip


def _folds(unit: Int[np.ndarray, " place"], test: _Test, rng: np.random.Generator) -> Int[np.ndarray, " place"]:
    """The fold of every place; those of one unit have the same."""
    count = int(unit.max()) + 1
    if count < test.folds:
        raise SettingError(
            f"there are {count} values of {test.units!r}, too few for {test.folds} folds; read more prompts, or pass "
            f"folds={max(2, count)}."
        )
    return np.asarray(rng.permutation(np.arange(count) % test.folds)[unit])


def _shuffled(y: np.ndarray, unit: Int[np.ndarray, " place"], rng: np.random.Generator) -> np.ndarray:
    """Labels in random order: of units, where they do not differ within one; else of places."""
    first = np.unique(unit, return_index=True)[1]
    if np.array_equal(y, y[first][unit]):
        return np.asarray(y[first][rng.permutation(len(first))][unit])
    return rng.permutation(y)


def _scored(x: Any, y: np.ndarray, unit: np.ndarray, fold: np.ndarray, test: _Test) -> _Parts:
    """The score of probes, each tested on the units of one fold and fitted on the others."""
    gained, possible = np.zeros(len(y)), np.zeros(len(y))
    weight = np.ones(len(y))
    if test.balanced and test.kind != "ridge":
        _, place, count = np.unique(y, return_inverse=True, return_counts=True)
        weight = 1 / count[place]
    for number in range(test.folds):
        train, held = fold != number, fold == number
        predicted = _predictions(x, y, train, held, test)
        if test.kind == "ridge":
            truth = y[held].astype(np.float64)
            possible[held] = (truth - y[train].astype(np.float64).mean()) ** 2
            gained[held] = possible[held] - (truth - predicted) ** 2
        else:
            possible[held], gained[held] = weight[held], weight[held] * (predicted == y[held])
    return _Parts(np.bincount(unit, gained), np.bincount(unit, possible))


def _predictions(
    x: Any, y: np.ndarray, train: np.ndarray, held: np.ndarray, test: _Test
) -> Shaped[np.ndarray, " held"]:
    """Those of a probe of activations, of sparse counts (which scikit-learn fits as they are), or of nothing (None)."""
    from sklearn.dummy import DummyClassifier, DummyRegressor  # type: ignore[import-untyped,unused-ignore]
    from sklearn.linear_model import LogisticRegression, Ridge  # type: ignore[import-untyped,unused-ignore]

    if isinstance(x, np.ndarray):
        return fitted(x[train], y[train], test.kind, test.penalty).predict(x[held].astype(np.float64))
    if test.kind == "ridge":
        y, model = y.astype(np.float64), DummyRegressor() if x is None else Ridge(alpha=test.penalty)
    elif x is None:
        model = DummyClassifier(strategy="most_frequent")
    else:
        model = LogisticRegression(C=1 / test.penalty, max_iter=1000, tol=1e-3)
    x = np.zeros((len(y), 1)) if x is None else x
    return np.asarray(model.fit(x[train], y[train]).predict(x[held]))


def _tokens(part: ProbeData) -> Any:
    """Counts of the tokens on each place's canvas and the token at the place, sparse [place, 2 × tokens]."""
    from scipy.sparse import coo_matrix, csr_matrix, hstack

    if not len(part.canvases) or "canvas" not in part.columns:
        return None
    used, board = np.unique(part.columns["canvas"], return_inverse=True)
    names, code = np.unique(part.canvases[used], return_inverse=True)
    code = code.reshape(part.canvases[used].shape)
    known = names[code] >= 0
    entries = (np.ones(int(known.sum())), (known.nonzero()[0], code[known]))
    counts = csr_matrix(coo_matrix(entries, shape=(len(used), len(names))))
    return csr_matrix(hstack([counts[board], _one_hot(part.columns["token_id"])]))


def _position(part: ProbeData) -> Shaped[np.ndarray, " place"]:
    """Where the places are; 0 where that is not known."""
    known = [part.columns[name] for name in ("from_answer", "pos") if name in part.columns]
    return known[0] if known else np.zeros(len(part), dtype=np.int64)


def _one_hot(values: Shaped[np.ndarray, " place"]) -> Any:
    """Which of its values each place has, sparse [place, value]."""
    from sklearn.preprocessing import OneHotEncoder  # type: ignore[import-untyped,unused-ignore]

    return OneHotEncoder().fit_transform(values[:, None])


def _interval(parts: _Parts, seed: int) -> Estimate:
    """The score with its limits over units."""
    share = parts.gained / np.where(parts.possible > 0, parts.possible, 1)
    if len(share) > 1 and np.isin(share, (0, 1)).all() and np.ptp(parts.possible) == 0:
        return proportion(int(share.sum()), len(share))
    return pooled(np.divide, [parts.gained, parts.possible], seed)


def _p_value(own: _Parts, controls: Sequence[_Parts], seed: int) -> float:
    """One-sided p value of the hypothesis that the score is not above that of the shuffled labels."""
    from scipy.stats import permutation_test

    def shares(parts: _Parts) -> np.ndarray:
        return parts.gained / parts.possible.sum()

    differences = shares(own) - np.mean([shares(parts) for parts in controls], axis=0)
    if len(differences) < 2:
        return float("nan")
    tested = permutation_test(
        (differences,), lambda values, axis: values.mean(axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=RESAMPLES - 1, alternative="greater", rng=np.random.default_rng(seed),
    )  # fmt: skip
    return float(tested.pvalue)
