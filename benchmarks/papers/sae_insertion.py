"""Can inserting an SAE lower a diffusion model's loss? (docs/papers/sae-insertion.md)

TopK SAEs are trained at the first two layers of tiny-llada on problems of the training set, and spliced in, as is the
shipped one of the third layer, while the model computes the likelihood of the right answers of held-out problems. The
control adds an error of the same length in a random direction at every place. The autoregressive tiny-llama has no SAE
here, so both models are also compared with the projection onto the first 16 principal components. It took 34
seconds of CPU time on one core.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from templates import balanced, mean
from torch import Tensor

import sinklens
from sinklens import features
from sinklens.experiments import Likelihood, likelihood
from sinklens.features import probe_data
from sinklens.tasks.word_problems import Problem, training

RECIPE = features.SAERecipe(d_sae=384, k=16, steps=200, batch=256)
MASKS = 16


class Components:
    """Projection onto the first principal components of some activations."""

    def __init__(self, values: np.ndarray, rank: int = 16) -> None:
        self.mean = torch.from_numpy(values.mean(axis=0)).float()
        self.basis = torch.linalg.svd(torch.from_numpy(values).float() - self.mean, full_matrices=False).Vh[:rank]

    def encode(self, x: Tensor) -> Tensor:
        """[place, rank]"""
        return (x - self.mean) @ self.basis.T

    def decode(self, features: Tensor) -> Tensor:
        """[place, d]"""
        return features @ self.basis + self.mean


def losses(model: Any, problems: list[Problem], hooks: Any = ()) -> list[Likelihood]:
    """Likelihoods of the right answers, with the same masks for all hooks."""
    prompts, answers = [one.prompt for one in problems], [f" {one.answer}" for one in problems]
    found = likelihood(model, prompts, answers, hooks=hooks, mc_num=MASKS)
    assert isinstance(found, list)
    return found


def increase(base: list[Likelihood], changed: list[Likelihood], problems: list[Problem], share: str = "") -> str:
    """By how many nats per masked token the loss grows, at all shares masked, or at "low" or "high" ones."""
    rows = []
    for one, two in zip(base, changed, strict=True):
        inside = ~np.isnan(one.losses) & np.isfinite(one.losses)
        if share:
            inside &= (one.shares > 0.5) == (share == "high")
        rows.append(float((two.losses - one.losses)[inside].mean()) if inside.any() else np.nan)
    return mean(rows, problems, ".2g")


def main() -> None:
    """Print the tables."""
    problems, train = balanced(5), [one.prompt for one in training(seed=3, size=24)]
    model = sinklens.load("tiny-llada")
    points = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    base = losses(model, problems)
    print("tiny-llada", "loss per masked token", mean([np.nanmean(one.losses) for one in base], problems, ".2g"))
    saes = {}
    with tempfile.TemporaryDirectory() as folder:
        features.collect(model, train, points[:2], Path(folder) / "both.zarr", steps=6)
        for point in points[:2]:
            trained = features.train(features.ActivationStore(Path(folder) / "both.zarr", point), RECIPE)
            saes[f"{point}, explains {trained.explained_variance:.3f}"] = (trained.sae, point, "all")
    shipped = features.load_sae("tiny-llada-masked")
    saes["shipped, masked positions"] = (shipped, shipped.point, "masked")
    for name, (sae, point, scope) in saes.items():
        for label, spliced in (("SAE", sae), ("random error", features.RandomError(sae))):
            changed = losses(model, problems, features.SpliceSAE(spliced, point, scope=scope))
            parts = [increase(base, changed, problems, share) for share in ("", "low", "high")]
            print(name, label, "all, low, high shares masked:", *parts)
    for name in ("tiny-llada", "tiny-llama"):
        model = sinklens.load(name)
        base = losses(model, problems)
        run = sinklens.generate(model, train[:10], record_sinks=False)
        values = probe_data(run, points, steps=range(0, run.steps_run, 4)).values
        for point in points:
            changed = losses(model, problems, features.SpliceSAE(Components(values[point]), point))
            print(name, point, "16 components", increase(base, changed, problems))


if __name__ == "__main__":
    main()
