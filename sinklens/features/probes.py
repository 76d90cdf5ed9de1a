"""Linear probes: fit one, predict with it, and use its direction as an intervention.

Let x be an activation, standardized in every dimension for the two kinds that scikit-learn fits. A probe has one output
for each class and predicts the class with the largest; a regression has one output, the prediction:

    logistic     softmax(W x + b), L2 penalty (scikit-learn's LogisticRegression)
    ridge        w · x + b of a label that is a number, L2 penalty (scikit-learn's Ridge)
    centroid     −|x − μ_c|² / 2: the nearest class mean
    difference   (μ_1 − μ_0) · (x − (μ_0 + μ_1) / 2) of two classes; decides as "centroid" does
    mass_mean    (μ_1 − μ_0) Σ⁻¹ · (x − (μ_0 + μ_1) / 2) of two classes, with Σ the covariance within classes (Marks &
                 Tegmark, 2310.06824); its *direction* is μ_1 − μ_0, as in "difference"

The weights of a `Probe` apply to x as it is; the standardization is folded in.

Limitation: that a probe reads something does not mean that the model does. Steer along the direction
or remove it (`Probe.steer`, `Probe.remove`), and do the same with `Probe.random`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from sinklens.errors import CheckpointError, require
from sinklens.features.probe_places import ProbeData
from sinklens.interventions.streams import Steer, SteerMode
from sinklens.utils.arguments import Number, Positive, checked, plainly_shown, read_as
from sinklens.utils.atomic import write_file
from sinklens.utils.hub import local

ProbeKind = Literal["logistic", "ridge", "mass_mean", "difference", "centroid"]
FILE, TENSORS = "probe.safetensors", ("weights", "bias", "means")
Vectors = Float[np.ndarray, "output d"]


@dataclass(frozen=True, eq=False)
class Probe:
    """A fitted linear probe.

    Attributes:
        kind: how it was fitted.
        point: the point whose activations it reads; "" for given vectors.
        weights: of each output.
        bias: of each output.
        classes: the label of each output; None for a regression.
        means: mean activation of each class; none for a regression.
    """

    kind: ProbeKind
    point: str
    weights: Vectors
    bias: Float[np.ndarray, " output"]
    classes: Shaped[np.ndarray, " output"] | None
    means: Float[np.ndarray, "known d"]

    def __repr__(self) -> str:
        reads = f"{self.weights.shape[1]} dimensions" + (f" at {self.point}" if self.point else "")
        predicts = "a number" if self.classes is None else f"{len(self.classes)} classes"
        return f"Probe({self.kind}, {reads}, predicts {predicts})"

    def outputs(self, x: Float[np.ndarray, "place d"]) -> Float[np.ndarray, "place output"]:
        """W x + b."""
        return x @ self.weights.T + self.bias

    def predict(self, x: Float[np.ndarray, "place d"]) -> Shaped[np.ndarray, " place"]:
        """The predicted class, or number, of each activation."""
        outputs = self.outputs(x)
        return outputs[:, 0] if self.classes is None else self.classes[outputs.argmax(axis=1)]

    def direction(self, toward: Any = None) -> Float[Tensor, " d"]:
        """The direction of a label, of unit length.

        For a regression it points to larger numbers, for two classes to the second one (in sorted order). For more, the
        class `toward` is compared with the mean of the others.

        Raises:
            SettingError: several classes without `toward`, or an unknown class.
        """
        found = self._contrast(self._vectors, toward)
        return torch.from_numpy(found / np.linalg.norm(found)).float()

    @property
    def _vectors(self) -> Vectors:
        """What directions are made of: class means, or what was fitted."""
        return self.weights if self.kind in ("logistic", "ridge") else self.means

    def gap(self, toward: Any = None) -> float:
        """Distance of the class means along `direction`; for a regression, the distance that adds 1 to the
        prediction."""
        along = self.direction(toward).numpy()
        if self.classes is None:
            return float(1 / (self.weights[0] @ along))
        return float(self._contrast(self.means, toward) @ along)

    def _contrast(self, vectors: Vectors, toward: Any) -> Float[np.ndarray, " d"]:
        """The vector of class `toward` minus the mean of the others."""
        if self.classes is None:
            return vectors[0]
        require(
            toward is not None or len(self.classes) <= 2,
            f"the probe has {len(self.classes)} classes, so toward= must name one of them: {_listed(self.classes)}.",
        )
        toward = self.classes[1] if toward is None else toward
        chosen = self.classes == toward
        require(chosen.sum() == 1, f"the probe has no class {toward!r}; it has {_listed(self.classes)}.")
        return np.asarray(vectors[chosen][0] - vectors[~chosen].mean(axis=0))

    @property
    def basis(self) -> Float[Tensor, "rank d"]:
        """An orthonormal basis of the directions that distinguish the outputs; at most one fewer than the classes."""
        vectors = self.weights if self.classes is None else self._vectors - self._vectors.mean(axis=0)
        _, size, rows = np.linalg.svd(vectors, full_matrices=False)
        return torch.from_numpy(rows[size > size.max() * 1e-5]).float()

    def random(self, seed: int = 0) -> "Probe":
        """The same probe with its directions rotated at random: a control of what it does as an intervention."""
        made = np.random.default_rng(seed).normal(size=(self.weights.shape[1], self.weights.shape[1]))
        turn = np.linalg.qr(made)[0].astype(self.weights.dtype)
        return replace(self, weights=self.weights @ turn, means=self.means @ turn)

    def save(self, path: str | Path) -> None:
        """Write the probe as safetensors."""
        classes = None if self.classes is None else self.classes.tolist()
        about = {"kind": self.kind, "point": self.point, "classes": classes}
        tensors = {name: np.ascontiguousarray(getattr(self, name)) for name in TENSORS}
        write_file(path, save(tensors, {"probe": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path, *, revision: str | None = None) -> "Probe":
        """Read what `save` wrote.

        Args:
            path: the file; or a name on the hub, ``owner/repository/folder``.
            revision: branch, tag or commit on the hub; None means the main branch.

        Raises:
            CheckpointError: there is no such file, it could not be downloaded, or it holds something else.
        """
        file = local(path, revision, [FILE])
        file = file / FILE if file.is_dir() else file
        try:
            with safe_open(file, framework="numpy") as opened:
                about = json.loads((opened.metadata() or {})["probe"])
                tensors = {name: opened.get_tensor(name) for name in TENSORS}
            classes = None if about["classes"] is None else np.array(about["classes"])
            kind, point = read_as(ProbeKind, "kind", about["kind"]), read_as(str, "point", about["point"])
            (outputs, width), labels = tensors["weights"].shape, (1,) if classes is None else classes.shape
            require(
                tensors["bias"].shape == labels == (outputs,) and tensors["means"].shape[1:] == (width,),
                "the shapes of its weights, bias, means and classes disagree",
                ValueError,
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{file} holds no probe: {error}. Pass a file that Probe.save wrote.") from error
        return cls(kind=kind, point=point, classes=classes, **tensors)

    # --- as an intervention ---

    @plainly_shown
    def steer(self, coefficient: Number, toward: Any = None, mode: SteerMode = "add", **places: Any) -> Steer:
        """Move the stream along `direction`.

        Args:
            coefficient: for "add" in units of `gap`: 1 moves a place from one class mean to the other.
            toward: see `direction`.
            mode: see `Steer`; for "set" the coefficient is the component along `direction`.
            **places: ``where=``, ``steps=`` and ``positions=``, as in every intervention.

        Raises:
            SettingError: the probe does not read a residual stream, or a coefficient that is not a number.
        """
        layer, point = self._stream()
        coefficient = read_as(Number, "coefficient", coefficient)
        scale = self.gap(toward) if mode == "add" else 1.0
        return Steer(self.direction(toward) * scale, coefficient, mode=mode, point=point, layers=[layer], **places)  # type: ignore[arg-type]

    def remove(self, **places: Any) -> list[Steer]:
        """Project all directions of `basis` out of the stream.

        Raises:
            SettingError: the probe does not read a residual stream.
        """
        layer, point = self._stream()
        return [
            Steer(vector, mode="project_out", point=point, layers=[layer], **places)  # type: ignore[arg-type]
            for vector in self.basis
        ]

    def _stream(self) -> tuple[int, str]:
        """Layer and point of the residual stream."""
        parts = self.point.split(".")
        require(
            len(parts) == 3 and parts[2].startswith("hook_resid"),
            f"steering and removal act on the residual stream, and the probe reads "
            f"{self.point or 'given vectors'}; fit one at blocks.L.hook_resid_post.",
        )
        return int(parts[1]), parts[2]


@checked
def fit_probe(
    data: ProbeData, point: str, label: str, kind: ProbeKind = "logistic", *, penalty: Positive = 1.0
) -> Probe:
    """Fit a probe to all places of `data`; `probe_table` says how well such a probe does on other prompts.

    Args:
        point: one of the points of `data`.
        label: one of its columns; numbers for "ridge", anything for the others.
        kind: see the module.
        penalty: strength of the L2 penalty of "logistic" and "ridge".

    Raises:
        SettingError: an unknown kind, point or column; a penalty that is not above 0; fewer than two classes, or more
            than two for "mass_mean" and "difference".
    """
    return replace(fitted(data.at(point), data.column(label), kind, penalty), point=point)


@checked
def fitted(
    x: Float[np.ndarray, "place d"], y: Shaped[np.ndarray, " place"], kind: ProbeKind, penalty: Positive = 1.0
) -> Probe:
    """A probe of vectors and their labels; see `fit_probe`."""
    x = np.asarray(x, dtype=np.float64)
    if kind == "ridge":
        from sklearn.linear_model import Ridge  # type: ignore[import-untyped,unused-ignore]

        linear = _linear(x, np.asarray(y, dtype=np.float64), Ridge(alpha=penalty))
        return Probe("ridge", "", *linear, None, np.zeros((0, x.shape[1])))
    classes = np.unique(y)
    require(
        len(classes) >= 2 and (len(classes) <= 2 or kind not in ("mass_mean", "difference")),
        f"a {kind} probe needs {'two classes' if kind in ('mass_mean', 'difference') else 'at least two classes'}; "
        f"the label has {_listed(classes)}.",
    )
    means = np.stack([x[y == name].mean(axis=0) for name in classes])
    make: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
        "logistic": lambda: _logistic(x, y, classes, penalty),
        "centroid": lambda: (means, -(means**2).sum(axis=1) / 2),
        "difference": lambda: _between(means, means[1] - means[0]),
        "mass_mean": lambda: _between(means, (means[1] - means[0]) @ _inverse_covariance(x, y, classes, means)),
    }
    weights, bias = make[kind]()
    return Probe(kind, "", weights, bias, classes, means)


def _between(means: Vectors, weight: Float[np.ndarray, " d"]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of two classes whose border lies halfway between their means."""
    return np.stack([np.zeros_like(weight), weight]), np.array([0.0, -weight @ means.mean(axis=0)])


def _inverse_covariance(x: np.ndarray, y: np.ndarray, classes: np.ndarray, means: Vectors) -> np.ndarray:
    """Pseudo-inverse of the covariance within classes, shrunk (Ledoit and Wolf, scikit-learn's)."""
    from sklearn.covariance import ledoit_wolf  # type: ignore[import-untyped,unused-ignore]

    residual = x - means[np.searchsorted(classes, y)]
    return np.asarray(np.linalg.pinv(ledoit_wolf(residual, assume_centered=True)[0], hermitian=True))


def _linear(x: np.ndarray, y: np.ndarray, model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The weights of a model of scikit-learn fitted to standardized activations, as weights of x as it is."""
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped,unused-ignore]

    scaler = StandardScaler().fit(x)
    model.fit(scaler.transform(x), y)
    weights = np.atleast_2d(model.coef_) / scaler.scale_
    return weights, model.intercept_ - weights @ scaler.mean_


def _logistic(x: np.ndarray, y: np.ndarray, classes: np.ndarray, penalty: Positive) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's weights, one row for each class."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped,unused-ignore]

    weights, bias = _linear(x, y, LogisticRegression(C=1 / penalty, max_iter=1000, tol=1e-3))
    if len(classes) > 2:
        return weights, bias
    return np.concatenate([np.zeros_like(weights), weights]), np.array([0.0, bias[0]])


def _listed(classes: "np.ndarray | Sequence[Any]") -> str:
    """Up to eight of them."""
    shown = ", ".join(repr(name.item() if hasattr(name, "item") else name) for name in classes[:8])
    return shown + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
