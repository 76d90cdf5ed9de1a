"""How well a label can be read, with controls: every point, at every step, noise level or state.

Probes are fitted and tested on different prompts (folds), never on different positions of one prompt. The score of
classes is the share of places that are right; with ``balanced=True`` every class counts equally. The score of "ridge"
is R², 1 − Σ (y − ŷ)² / Σ (y − ȳ)², with ȳ the mean of the training folds. Beside it stand

    majority    always the most frequent class of the training folds (0 for R²)
    shuffled    the same probe, fitted and tested on labels that are shuffled among the places, or among the prompts if
                they do not differ within one: what it scores by chance
    control     the same probe, fitted and tested on the control task of Hewitt & Liang (1909.03368): every token that
                is at one of the places gets a fixed label, drawn from the labels of the part. NaN where the tokens are
                not known, or too few for two labels in every fold, as on undecided positions, which are all masks
    bag         a logistic or ridge probe which sees only tokens: how often each is on the canvas of the step, and which
                one is at the place; NaN where the canvases are not known
    place       the same, which sees only the position, counted from the start of the answer (of the text, if unknown)

*Selectivity* is the score minus that of the control task: near 0 where the activation says which token it is, and the
probe learned the label of each token by heart.

p is the one-sided p value of the hypothesis that the activations of a prompt say nothing about its own labels: the
labels of all its places go to another prompt together, and probes are fitted to them again, `RESAMPLES` times. This
test uses a ridge regression of the label, or of an indicator of each class, whatever the kind: its statistic is R² over
all folds. Where prompts have different numbers of places, labels keep their relative place. ``p_holm`` is corrected
over all rows of the table. Intervals are over prompts: of the ratio of sums by bootstrap, or Wilson's where every
prompt is entirely right or wrong.

Pitfall: a label that is the same in all prompts, such as the position, leaves no labels to exchange; p is NaN.

Pitfall: prompts from one template share what a probe can learn by heart. Name what they share with ``units=``: a column
such as the template, whose values are then never in both training and test.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]

from sinklens.errors import require
from sinklens.features.probe_places import ProbeData
from sinklens.features.probes import ProbeKind, fitted
from sinklens.utils.arguments import Positive, Seed, checked
from sinklens.utils.estimates import RESAMPLES, Estimate, holm, pooled, proportion

NOISE_BINS = 4
SCORES = ("score", "low", "high", "majority", "shuffled", "control", "bag", "place", "selectivity", "p")


@checked
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
    seed: Seed = 0,
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
        balanced: whether every class counts equally.
        repeats: draws of shuffled labels, and of control tasks; 1 or more.
        seed: of folds, draws and intervals.

    Returns:
        A row for each point and part: ``point``, the part, ``score``, ``low`` and ``high`` (95 %), ``majority``,
        ``shuffled``, ``control``, ``bag``, ``place``, ``selectivity``, ``p``, ``p_holm``, ``units`` and ``places``.
        Parts in which a training fold has a single class have NaN.

    Raises:
        SettingError: an unknown column or setting, fewer units than folds, or a label that the kind cannot fit.
    """
    require(folds >= 2 and repeats >= 1, f"folds must be 2 or more and repeats 1 or more; got {folds} and {repeats}.")
    rows = []
    for name, part in _parts(data, by):
        y, unit = part.column(label), np.unique(part.column(units), return_inverse=True)[1]
        count, rng = int(unit.max()) + 1, np.random.default_rng(seed)
        require(
            count >= folds,
            f"there are {count} values of {units!r}, too few for {folds} folds; read more prompts, or pass "
            f"folds={max(2, count)}.",
        )
        test = _Test(unit, rng.permutation(np.arange(count) % folds)[unit], kind, penalty, balanced)
        shuffled = [_shuffled(y, unit, rng) for _ in range(repeats)]
        bag = _tokens(part)
        about = {} if by is None else {by: name}
        missing = about | dict.fromkeys(SCORES, np.nan) | {"units": count, "places": len(part)}
        if test.lacks_classes(y):
            rows += [{"point": point, **missing} for point in part.values]
            continue
        position = part.columns.get("from_answer", part.columns.get("pos", np.zeros(len(part))))
        controls = {
            "majority": test.scored(None, y).score,
            "bag": np.nan if bag is None else test.scored(bag, y).score,
            "place": test.scored(_one_hot(position), y).score,
        }
        tasks = [task for _ in range(repeats) for task in _control_task(part, y, test, rng)]
        for point, x in part.values.items():
            own = test.scored(x, y)
            found, control = _interval(own, seed), test.mean_score(x, tasks)
            scores = {
                "score": own.score, "low": float(found.low), "high": float(found.high),
                "shuffled": test.mean_score(x, shuffled), "control": control, "selectivity": own.score - control,
                "p": test.p_value(x, y, seed),
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

    def mean_score(self, x: Any, labels: Sequence[Shaped[np.ndarray, " place"]]) -> float:
        """The mean over several labels; NaN without any."""
        return float(np.mean([self.scored(x, y).score for y in labels])) if labels else float("nan")

    def p_value(self, x: Float[np.ndarray, "place d"], y: Shaped[np.ndarray, " place"], seed: int) -> float:
        """The share of exchanges of labels between units, no exchange included, that fit at least as well.

        Probes have to be fitted again: an old probe and the labels that it was fitted to depend on each other, as every
        unit is in the training data of all others, and p values from its fixed predictions are too small.
        """
        from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped,unused-ignore]

        rng, units = np.random.default_rng(seed), int(self.unit.max()) + 1
        givers = np.stack([np.arange(units), *(rng.permutation(units) for _ in range(RESAMPLES - 1))])
        classes = np.unique(y)
        some = classes[int(len(classes) == 2) :]  # of two classes, one indicator says all
        targets = (y[:, None] if self.kind == "ridge" else y[:, None] == some).astype(np.float64)
        folds = []
        for number in np.unique(self.fold):
            train, held = (np.flatnonzero(here) for here in (self.fold != number, self.fold == number))
            scaler = StandardScaler().fit(x[train].astype(np.float64))
            known, new = scaler.transform(x[train]), scaler.transform(x[held])
            solved = np.linalg.solve(known.T @ known + self.penalty * np.eye(known.shape[1]), known.T)
            folds.append((train, held, new, solved))
        missed, spread, changed = np.zeros(RESAMPLES), np.zeros(RESAMPLES), False
        for draws in np.array_split(np.arange(RESAMPLES), 1 + min(RESAMPLES - 1, targets.size * RESAMPLES // 2**22)):
            labels = targets[_exchanged(self.unit, givers[draws])]
            changed = changed or bool((labels != targets).any())
            for train, held, new, solved in folds:
                mean = labels[:, train].mean(axis=1, keepdims=True)
                truth = labels[:, held] - mean
                fit = np.einsum("hd,dk,nko->nho", new, solved, labels[:, train] - mean, optimize=True)
                missed[draws] += ((truth - fit) ** 2).sum(axis=(1, 2))
                spread[draws] += (truth**2).sum(axis=(1, 2))
        if not changed:
            return float("nan")
        quality = 1 - missed / spread
        return float((quality >= quality[0] - 1e-9).mean())  # the first exchange leaves all labels where they are

    def _predictions(self, x: Any, y: np.ndarray, train: np.ndarray, held: np.ndarray) -> Shaped[np.ndarray, " held"]:
        from sklearn.dummy import DummyClassifier, DummyRegressor  # type: ignore[import-untyped,unused-ignore]
        from sklearn.linear_model import LogisticRegression, Ridge  # type: ignore[import-untyped,unused-ignore]

        if isinstance(x, np.ndarray):
            return fitted(x[train], y[train], self.kind, self.penalty).predict(x[held].astype(np.float64))
        ridge = self.kind == "ridge"
        constant = DummyRegressor() if ridge else DummyClassifier(strategy="most_frequent")
        linear = Ridge(alpha=self.penalty) if ridge else LogisticRegression(C=1 / self.penalty, max_iter=1000, tol=1e-3)
        x, model = (np.zeros((len(y), 1)), constant) if x is None else (x, linear)
        return np.asarray(model.fit(x[train], y[train].astype(np.float64) if ridge else y[train]).predict(x[held]))


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


def _shuffled(y: np.ndarray, unit: Int[np.ndarray, " place"], rng: np.random.Generator) -> np.ndarray:
    """`y` in random order, of units where it does not differ within one."""
    first = np.unique(unit, return_index=True)[1]
    if np.array_equal(y, y[first][unit]):
        return np.asarray(rng.permutation(y[first])[unit])
    return rng.permutation(y)


def _control_task(part: ProbeData, y: np.ndarray, test: _Test, rng: np.random.Generator) -> list[np.ndarray]:
    """A fixed random label for each token; none if 20 draws have a single class in a training fold, or no tokens."""
    if "token_id" not in part.columns:
        return []
    tokens, code = np.unique(part.columns["token_id"], return_inverse=True)
    drawn = (rng.choice(y, len(tokens))[code] for _ in range(20 if len(tokens) > 1 else 0))
    return [labels for labels in drawn if not test.lacks_classes(labels)][:1]


def _exchanged(unit: Int[np.ndarray, " place"], giver: Int[np.ndarray, "draw unit"]) -> Int[np.ndarray, "draw place"]:
    """The place whose label each place gets, if every unit gets the labels of its giver."""
    order, size = np.argsort(unit, kind="stable"), np.bincount(unit)
    begin = np.cumsum(size) - size
    rank = np.empty_like(order)
    rank[order] = np.arange(len(unit)) - begin[unit[order]]
    from_unit = giver[:, unit]
    return np.asarray(order[begin[from_unit] + rank * size[from_unit] // size[unit]])


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
