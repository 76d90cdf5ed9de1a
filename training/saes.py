"""Train a TopK SAE on collected activations, as the shipped ones were (Gao et al., 2406.04093).

The loss is the share of the variance that the reconstruction misses. Features that have not fired for a while are
*dead*: 1/32 of what they miss of the residual is added, which revives them. Rows of W_dec have length 1. Activations
are divided by one number, so that the learning rate means the same at every point; it is folded into the weights at the
end.

Chunks of the store are read in random order, a few at a time, so memory does not grow with the store. With ``out=`` the
state is written regularly, and the same call resumes: it then takes the same batches as an uninterrupted one.

Pitfall: a small unexplained share of the variance does not mean that the model can use the reconstruction. `assess`
measures the loss with the SAE spliced in.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Lt
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.features.assessing import Fit
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.saelens import save_sae
from sinklens.features.store import ActivationStore, array_of
from sinklens.utils.arguments import Count, Positive, Seed, check_arguments
from sinklens.utils.atomic import atomic_write

STATE = "training.pt"
AUX = 1 / 32
BUFFER = 2**24  # values in memory: 64 MB
NAMES = ("W_enc", "b_enc", "W_dec", "b_dec")


@dataclass(frozen=True)
class SAERecipe:
    """How an SAE is trained.

    Attributes:
        d_sae: number of features.
        k: features that may fire at a place.
        steps: optimizer steps.
        batch: places per step.
        learning_rate: of Adam; rises over the first twentieth of the steps and falls to a tenth along a cosine.
        held_out: share of the last prompts that are not trained on.
        dead_after: places without firing after which a feature counts as dead.
        seed: of the initial weights and of the order of the places.
    """

    d_sae: Count
    k: Count
    steps: Count = 2000
    batch: Annotated[int, Ge(2)] = 1024
    learning_rate: Positive = 1e-3
    held_out: Annotated[float, Ge(0), Lt(1)] = 0.1
    dead_after: Count = 100_000
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.k > self.d_sae:
            raise SettingError(f"k must be at most d_sae, the number of features; got {self.k} of {self.d_sae}.")


@dataclass(frozen=True)
class TrainedSAE:
    """A trained autoencoder, and how well it reconstructs.

    Attributes:
        sae: the autoencoder.
        unexplained: share of the variance that each step's reconstruction missed, [step].
        explained_variance: 1 − the same share on the held-out places, or on the first chunk if there are none.
        dead: share of the features that fire at none of the places of `explained_variance`.
    """

    sae: SparseAutoencoder
    unexplained: Float[np.ndarray, " step"]
    explained_variance: float
    dead: float


def train(
    store: ActivationStore,
    recipe: SAERecipe,
    out: str | Path | None = None,
    *,
    save_every: int = 200,
    report: Callable[[int, int], None] | None = None,
) -> TrainedSAE:
    """Train an SAE on the activations in `store`.

    Args:
        store: a finished collection.
        recipe: how.
        out: folder for the state of the training, and at the end for the SAE in SAELens's format. The same call
            resumes an interrupted training.
        save_every: steps between two states on disk.
        report: called with the number of finished steps and of all steps after each.

    Raises:
        SettingError: the collection is not finished or has fewer places than a batch, or `out` holds the state of
            another training.
    """
    if not store.finished:
        raise SettingError(f"{store} is not finished; repeat the collect call, which resumes it.")
    trained = round(store.about["prompts"] * (1 - recipe.held_out))  # prompts; rows are in their order
    last = int(np.searchsorted(store.column("prompt"), trained))
    if last < recipe.batch:
        raise SettingError(f"{store} has {last} places to train on, fewer than a batch of {recipe.batch}.")
    training, file = _Training(store, recipe, last), None if out is None else Path(out) / STATE
    if file is not None and file.exists():
        training.restore(file)
    for x in _batches(store, recipe, last, training.step):
        training.update(x)
        if file is not None and (training.step % save_every == 0 or training.step == recipe.steps):
            training.keep(file)
        if report is not None:
            report(training.step, recipe.steps)
    sae = training.sae()
    if out is not None:
        save_sae(sae, out)
    first, end = (last, len(store)) if last < len(store) else (0, min(last, _chunk(store)))
    return TrainedSAE(sae, np.array(training.unexplained), *_held_out(store, sae, first, end))


def _chunk(store: ActivationStore) -> int:
    """Rows per chunk, which is what is read from disk at once."""
    return int(store.group[array_of(store.point)].chunks[0])


def _chunks(store: ActivationStore, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Bounds of the chunks that cover the rows from `first` to `last`."""
    chunk = _chunk(store)
    for start in range(first - first % chunk, last, chunk):
        yield max(start, first), min(start + chunk, last)


def _batches(store: ActivationStore, recipe: SAERecipe, last: int, start: int) -> Iterator[Tensor]:
    """The places of the steps from `start`; skipped groups of chunks are not read."""
    step, epoch, together = 0, 0, max(1, BUFFER // store.d_in // _chunk(store))
    bounds = list(_chunks(store, 0, last))
    while step < recipe.steps:
        rng = np.random.default_rng([recipe.seed, epoch])
        order = rng.permutation(len(bounds))
        for group in (order[at : at + together] for at in range(0, len(order), together)):
            chosen = [bounds[number] for number in group]
            rows = rng.permutation(sum(stop - begin for begin, stop in chosen))
            count = min(max(1, len(rows) // recipe.batch), recipe.steps - step)
            if step + count > start:
                x = torch.cat([store.read(*bound) for bound in chosen])
                for number in range(max(0, start - step), count):
                    yield x[rows[number * recipe.batch : (number + 1) * recipe.batch]]
            step += count
        epoch += 1


class _Training:
    """The state of a training."""

    def __init__(self, store: ActivationStore, recipe: SAERecipe, last: int) -> None:
        self.recipe, self.step, self.unexplained = recipe, 0, list[float]()
        self.about = {"model": store.about["model"], "point": store.point}
        self.identity = json.dumps([store.about, store.point, len(store), asdict(recipe)], sort_keys=True)
        start = store.read(0, min(last, _chunk(store)))
        mean = start.mean(dim=0)
        self.scale = float((start - mean).pow(2).mean().sqrt().clamp(min=1e-12))
        drawn = torch.Generator().manual_seed(recipe.seed)
        decoder = torch.nn.functional.normalize(torch.randn(recipe.d_sae, store.d_in, generator=drawn), dim=1)
        values = (decoder.T.contiguous().clone(), torch.zeros(recipe.d_sae), decoder, mean / self.scale)
        self.weights: dict[str, Any] = {name: value.requires_grad_() for name, value in zip(NAMES, values, strict=True)}
        self.optimizer = torch.optim.Adam(self.weights.values(), betas=(0.9, 0.999))
        self.idle = torch.zeros(recipe.d_sae, dtype=torch.long)  # places since each feature fired last

    def update(self, x: Float[Tensor, "place d_in"]) -> None:
        """One step of the optimizer."""
        x, recipe = x / self.scale, self.recipe
        rise = min(1.0, (self.step + 1) / max(1.0, recipe.steps / 20))
        fall = 0.55 + 0.45 * float(np.cos(np.pi * self.step / recipe.steps))
        self.optimizer.param_groups[0]["lr"] = recipe.learning_rate * rise * fall
        sae = SparseAutoencoder(**self.weights, k=recipe.k)
        pre = sae.before_activation(x)
        top = pre.topk(recipe.k, dim=-1)
        features = torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())
        residual = x - sae.decode(features)
        total = (x - x.mean(dim=0)).pow(2).sum()
        missed = residual.pow(2).sum() / total
        fired = (features > 0).any(dim=0)
        self.idle = torch.where(fired, 0, self.idle + len(x))
        loss = missed + AUX * self._revival(pre, residual.detach())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.weights["W_dec"].copy_(torch.nn.functional.normalize(self.weights["W_dec"], dim=1))
        self.unexplained.append(float(missed.detach()))
        self.step += 1

    def _revival(self, pre: Tensor, residual: Tensor) -> Tensor:
        """Share of the residual's variance that the dead features miss; 0 without dead features."""
        dead = self.idle > self.recipe.dead_after
        count = min(int(dead.sum()), residual.shape[1] // 2)
        if count == 0:
            return pre.new_zeros(())
        top = pre.masked_fill(~dead, -torch.inf).topk(count, dim=-1)
        features = torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())
        return (residual - features @ self.weights["W_dec"]).pow(2).sum() / residual.pow(2).sum()

    def sae(self) -> SparseAutoencoder:
        """The SAE of activations that are not divided: features grow with them."""
        found: dict[str, Any] = {name: value.detach().clone() for name, value in self.weights.items()}
        found |= {name: found[name] * self.scale for name in ("b_enc", "b_dec")}
        return SparseAutoencoder(**found, k=self.recipe.k, **self.about)

    def keep(self, file: Path) -> None:
        """Write the state."""
        weights = {name: value.detach() for name, value in self.weights.items()}
        state = {
            "identity": self.identity, "weights": weights, "optimizer": self.optimizer.state_dict(), "idle": self.idle,
            "unexplained": self.unexplained,
        }  # fmt: skip
        with atomic_write(file) as part:
            torch.save(state, part)

    def restore(self, file: Path) -> None:
        """Read the state that `keep` wrote.

        Raises:
            SettingError: it is that of another training.
        """
        state = torch.load(file, weights_only=True)
        if state["identity"] != self.identity:
            raise SettingError(
                f"{file} is the state of a training with another recipe or other activations; choose another out=, "
                f"or delete that file."
            )
        self.unexplained, self.idle = state["unexplained"], state["idle"]
        self.step = len(self.unexplained)
        with torch.no_grad():
            for name, value in self.weights.items():
                value.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


@torch.no_grad()
def _held_out(store: ActivationStore, sae: SparseAutoencoder, first: int, last: int) -> tuple[float, float]:
    """Explained variance and share of dead features on some rows."""
    fit = Fit(sae)
    for bound in _chunks(store, first, last):
        fit.add(store.read(*bound))
    measures = fit.measures()
    return measures["explained_variance"], measures["dead"]
