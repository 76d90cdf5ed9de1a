"""Probes have the weights of their formulas, and their directions do in a run what they say."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.features import Probe, ProbeData, fit_probe
from sinklens.features.probes import fitted
from sinklens.interventions import Activations

POINT, D = "blocks.1.hook_resid_post", 24


def sample(classes=2, places=300, d=6, seed=0):
    """Activations whose classes differ along their own directions, in dimensions of unequal size."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, size=places)
    x = rng.normal(size=(places, d)) + 3 * rng.normal(size=(classes, d))[y]
    return x * np.logspace(0, 2, d), np.array(["a", "b", "c"])[y]


def test_class_means_decide_by_the_nearest_or_halfway_between_two():
    x, y = sample(3)
    means = {name: x[y == name].mean(axis=0) for name in "abc"}
    nearest = [min(means, key=lambda name: float(((place - means[name]) ** 2).sum())) for place in x]
    assert fitted(x, y, "centroid").predict(x).tolist() == nearest
    x, y = sample()
    first, second = (x[y == name].mean(axis=0) for name in "ab")
    expected = np.where((x - (first + second) / 2) @ (second - first) > 0, "b", "a")
    probe = fitted(x, y, "difference")
    assert probe.predict(x).tolist() == expected.tolist()
    np.testing.assert_allclose(probe.direction().numpy(), (second - first) / np.linalg.norm(second - first), atol=1e-6)
    assert probe.gap() == pytest.approx(np.linalg.norm(second - first))


def test_mass_mean_undoes_the_covariance_within_classes():
    """Two classes that differ in the small dimension only; the large one is noise correlated with it."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, size=4000)
    noise = rng.normal(size=4000)
    x = np.stack([10 * noise, y + noise], axis=1)  # x1 − x0 / 10 is the class exactly
    assert (fitted(x, y, "mass_mean").predict(x) == y).mean() > 0.99
    assert (fitted(x, y, "difference").predict(x) == y).mean() < 0.8


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_and_ridge_are_those_of_scikit_learn_on_standardized_activations(classes):
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = sample(classes)
    reference = make_pipeline(StandardScaler(), LogisticRegression(C=0.5, max_iter=1000, tol=1e-3)).fit(x, y)
    found = fitted(x, y, "logistic", penalty=2.0).outputs(x)
    chances = np.exp(found) / np.exp(found).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances, reference.predict_proba(x), atol=1e-6)
    number = x[:, 0] - 2 * x[:, 3] + 5
    reference = make_pipeline(StandardScaler(), Ridge(alpha=3.0)).fit(x, number)
    np.testing.assert_allclose(fitted(x, number, "ridge", 3.0).predict(x), reference.predict(x), rtol=1e-8)


def probe_of(model, classes=2, kind="difference"):
    """A probe of random activations at `POINT`."""
    x, y = sample(classes, d=model.cfg.d_model, seed=4)
    return fit_probe(ProbeData({POINT: x.astype(np.float32)}, {"prompt": np.arange(len(y)), "y": y}), POINT, "y", kind)


def streams(model, hooks):
    """The stream at `POINT` at step 0, without and with `hooks`."""
    found = []
    for entry in ([], hooks):
        kept = Activations(names=[POINT], steps=[0])
        listed = entry if isinstance(entry, list) else [entry]
        sinklens.generate(model, "w1 w2 w3", hooks=[*listed, kept], gen_length=4, progress=False)
        found.append(kept.caches[0][POINT][0].double())
    return found


def test_one_unit_of_steering_moves_a_place_from_one_class_mean_to_the_other(worded):
    probe = probe_of(worded())
    before, after = streams(worded(), probe.steer(1))
    moved = torch.from_numpy(probe.means[1] - probe.means[0]).expand_as(before)
    torch.testing.assert_close(after - before, moved, rtol=1e-4, atol=1e-2)


def test_one_unit_of_steering_a_regression_raises_its_prediction_by_one(worded):
    x, _ = sample(d=D)
    probe = fit_probe(ProbeData({POINT: x}, {"prompt": np.arange(len(x)), "y": x[:, 2] / 50}), POINT, "y", "ridge")
    before, after = (probe.predict(stream.numpy()) for stream in streams(worded(), probe.steer(1.0)))
    np.testing.assert_allclose(after - before, 1.0, rtol=1e-4)


def test_what_is_removed_cannot_be_read_and_the_rest_stays(worded):
    probe = probe_of(worded(), classes=3, kind="logistic")
    basis = probe.basis.double()
    assert basis.shape == (2, D)
    before, after = streams(worded(), probe.remove())
    torch.testing.assert_close(after, before - before @ basis.T @ basis, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.ptp(probe.outputs(after.numpy()) - probe.bias, axis=1), 0, atol=1e-3)


def test_a_random_probe_keeps_lengths_and_angles_but_not_directions():
    probe = fitted(*sample(3, d=40), "centroid")
    other = probe.random(3)
    np.testing.assert_allclose(other.weights @ other.weights.T, probe.weights @ probe.weights.T)
    assert other.gap("a") == pytest.approx(probe.gap("a"))
    assert abs(float(other.direction("a") @ probe.direction("a"))) < 0.5


TWO, THREE = sample(), sample(3)
ELSEWHERE = Probe("ridge", "blocks.0.attn.hook_z", np.ones((1, 3)), np.zeros(1), None, np.zeros((0, 3)))
ON_STREAM = replace(ELSEWHERE, point=POINT)
REFUSED = [
    (lambda: fitted(*THREE, "mass_mean"), "mass_mean probe needs two classes; the label has 'a', 'b', 'c'"),
    (lambda: fitted(*THREE, "svm"), "kind must be one of logistic, ridge"),
    (lambda: fitted(THREE[0], np.zeros(300), "centroid"), "at least two classes"),
    (lambda: fitted(*THREE, "centroid").direction(), "3 classes, so toward= must name one of them: 'a', 'b', 'c'"),
    (lambda: fitted(*THREE, "centroid").direction("z"), "no class 'z'"),
    (lambda: ELSEWHERE.steer(1.0), r"the probe reads blocks\.0\.attn\.hook_z; fit one at"),
    (lambda: fitted(*THREE, "logistic", True), "penalty must be a finite number above 0; got True"),
    (lambda: ON_STREAM.steer(float("inf")), "coefficient must be a finite number; got inf"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_a_probe_cannot_do_is_refused(unchecked, call, match):
    with pytest.raises(SettingError, match=match):
        call()


def test_a_probe_is_shown_in_one_line():
    x, y = sample(3)
    named = replace(fitted(x, y, "centroid"), point="blocks.1.hook_resid_post")
    assert repr(named) == "Probe(centroid, 6 dimensions at blocks.1.hook_resid_post, predicts 3 classes)"
    assert repr(fitted(x, np.arange(len(x)), "ridge")) == "Probe(ridge, 6 dimensions, predicts a number)"
