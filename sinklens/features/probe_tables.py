"""How well a label can be read, with controls: every point, at every step, noise level or state.

Probes are fitted and tested on different prompts (folds), never on different positions of one prompt. The score of
classes is the share of places that are right; with ``balanced=True`` every class counts alike. That of "ridge" is R²,
1 − Σ (y − ŷ)² / Σ (y − ȳ)², with ȳ the mean of the training folds. Beside it stand

    majority    always the most frequent class of the training folds (0 for R²)
    shuffled    the same probe, fitted and tested on labels that are shuffled among the places, or among the prompts if
                they do not differ within one (Hewitt & Liang, 1909.03368)
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
SCORES = ("score", "low", "high", "majority", "shuffled", "bag", "place", "selectivity", "p")


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
        repeats: draws of shuffled labels; 1 or more.
        seed: of folds, draws and intervals.

    Returns:
        A row for each point and part: ``point``, the part, ``score``, ``low`` and ``high`` (95 %), ``majority``,
        ``shuffled``, ``bag``, ``place``, ``selectivity``, ``p``, ``p_holm``, ``units`` and ``places``.
        Parts in which a training fold has a single class have NaN.

    Raises:
        SettingError: an unknown column or setting, fewer units than folds, or a label that the kind cannot fit.
    """
    from pandas import DataFrame

    read_as(Positive, "penalty", penalty)
    if folds < 2 or repeats < 1:
        raise SettingError(f"folds must be 2 or more and repeats 1 or more; got {folds} and {repeats}.")
    rows = []
    for name, part in _parts(data, by):
        y, unit = part.column(label), np.unique(part.column(units), return_inverse=True)[1]
        count, rng = int(unit.max()) + 1, np.random.default_rng(seed)
        if count < folds:
            raise SettingError(
                f"there are {count} values of {units!r}, too few for {folds} folds; read more prompts, or pass "
                f"folds={max(2, count)}."
            )
        test = _Test(unit, rng.permutation(np.arange(count) % folds)[unit], kind, penalty, balanced)
        shuffled = [_control_labels(y, unit, rng) for _ in range(repeats)]
        bag = _tokens(part)
        about = {} if by is None else {by: name}
        missing = about | dict.fromkeys(SCORES, np.nan) | {"units": count, "places": len(part)}
        if test.lacks_classes(y):
            rows += [{"point": point, **missing} for point in part.values]
            continue
        controls = {
            "majority": test.scored(None, y).score,
            "bag": np.nan if bag is None else test.scored(bag, y).score,
            "place": test.scored(_one_hot(_position(part)), y).score,
        }
        for point, x in part.values.items():
            own, without = test.scored(x, y), [test.scored(x, labels) for labels in shuffled]
            found, control = _interval(own, seed), float(np.mean([parts.score for parts in without]))
            scores = {
                "score": own.score, "low": float(found.low), "high": float(found.high), "shuffled": control,
                "selectivity": own.score - control, "p": _p_value(own, without, seed),
            }  # fmt: skip
            rows.append({"point": point, **missing, **controls, **scores})
    table = DataFrame(rows)
    table.insert(table.columns.get_loc("p") + 1, "p_holm", holm(table["p"].tolist()))
    return table


class _Parts(NamedTuple):
    """What each unit contributes to a score, Σ gained / Σ possible."""

    gained: Float[np.ndarray, " unit"]
    possible: Float[np.ndarray, " unit"]

    @property
    def score(self) -> float:
        total = self.possible.sum()
        return float(self.gained.sum() / total) if total else float("nan")


class _Test(NamedTuple):
    """How probes of some places are tested: fitted on the units of all folds but one, tested on that one's."""

    unit: Int[np.ndarray, " place"]
    fold: Int[np.ndarray, " place"]
    kind: ProbeKind
    penalty: Positive
    balanced: bool

    def lacks_classes(self, y: Shaped[np.ndarray, " place"]) -> bool:
        """Whether the probe would be fitted to a single class."""
        return self.kind != "ridge" and any(len(np.unique(y[self.fold != one])) < 2 for one in np.unique(self.fold))

    def scored(self, x: Any, y: Shaped[np.ndarray, " place"]) -> _Parts:
        """The score of probes of activations, of sparse counts, or of nothing (None)."""
        gained, possible = np.zeros(len(y)), np.ones(len(y))
        if self.balanced and self.kind != "ridge":
            _, place, count = np.unique(y, return_inverse=True, return_counts=True)
            possible = 1 / count[place]
        for number in np.unique(self.fold):
            train, held = self.fold != number, self.fold == number
            predicted = self._predictions(x, y, train, held)
            if self.kind == "ridge":
                truth = y[held].astype(np.float64)
                possible[held] = (truth - y[train].astype(np.float64).mean()) ** 2
                gained[held] = possible[held] - (truth - predicted) ** 2
            else:
                gained[held] = possible[held] * (predicted == y[held])
        return _Parts(np.bincount(self.unit, gained), np.bincount(self.unit, possible))

    def _predictions(self, x: Any, y: np.ndarray, train: np.ndarray, held: np.ndarray) -> Shaped[np.ndarray, " held"]:
        from sklearn.dummy import DummyClassifier, DummyRegressor  # type: ignore[import-untyped,unused-ignore]
        from sklearn.linear_model import LogisticRegression, Ridge  # type: ignore[import-untyped,unused-ignore]

        if isinstance(x, np.ndarray):
            return fitted(x[train], y[train], self.kind, self.penalty).predict(x[held].astype(np.float64))
        if self.kind == "ridge":
            y, model = y.astype(np.float64), DummyRegressor() if x is None else Ridge(alpha=self.penalty)
        elif x is None:
            model = DummyClassifier(strategy="most_frequent")
        else:
            model = LogisticRegression(C=1 / self.penalty, max_iter=1000, tol=1e-3)
        x = np.zeros((len(y), 1)) if x is None else x
        return np.asarray(model.fit(x[train], y[train]).predict(x[held]))


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


def _control_labels(y: np.ndarray, unit: Int[np.ndarray, " place"], rng: np.random.Generator) -> np.ndarray:
    """Labels that the activations cannot tell: `y` in random order, of units where it does not differ within one."""
    first = np.unique(unit, return_index=True)[1]
    if np.array_equal(y, y[first][unit]):
        return np.asarray(rng.permutation(y[first])[unit])
    return rng.permutation(y)


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
    unknown = np.zeros(len(part), dtype=np.int64)
    return part.columns.get("from_answer", part.columns.get("pos", unknown))


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
