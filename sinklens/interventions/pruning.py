"""Simulated pruning: a share of the weights of every row is 0 while a run lasts.

In each row of a weight matrix (one output) with n inputs, the round(share · n) weights of the lowest score are set to
0. With W the matrix and X the inputs of its module over calibration positions, the score of weight (i, j) is

    magnitude    |W_ij|
    wanda        |W_ij| · ‖X_j‖₂     (Sun et al., 2306.11695)
    random       a random number: the control, which removes as many weights of every row

`sinklens.experiments.input_norms` collects ‖X_j‖₂ from runs; it can leave out sinks (Sink-Aware Pruning, 2602.17664).

Limitation: nothing becomes smaller or faster, and, unlike in SparseGPT, the weights that stay are not adapted. All
scores compare the weights of one row; the magnitude pruning of Wanda's tables compares those of a matrix.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.interventions.weights import EditWeights, WeightMatrix
from sinklens.utils.arguments import Seed, Share, plainly_shown
from sinklens.utils.integers import MOST_SEED

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, eq=False)
class InputNorms:
    """‖X_j‖₂ of every input of every weight matrix, collected by `sinklens.experiments.input_norms`.

    Attributes:
        values: name of the matrix in the transformers model -> norms.
        positions: number of calibration positions; a position that counts by half is half a position.
    """

    values: Mapping[str, Float[Tensor, " inputs"]]
    positions: float

    def __repr__(self) -> str:
        return f"InputNorms({len(self.values)} matrices, {self.positions:.1f} positions)"


@plainly_shown
@dataclass(frozen=True)
class PruneWeights(EditWeights):
    """Set a share of the weights of every row to 0 while a run lasts; afterwards they are as before.

        sinklens.generate(model, prompt, hooks=PruneWeights(0.5))
        sinklens.generate(model, prompt, hooks=PruneWeights(0.5, "wanda", norms=input_norms(runs)))
        with PruneWeights(0.5, "random", seed=1).applied(model):  # a single pass
            logits = model(ids)

    A copy of the original values of the matrices is kept in memory meanwhile.

    Attributes:
        share: share of each row that is removed; of equal scores, the first inputs.
        score: "magnitude", "wanda" or "random"; see the module.
        norms: for "wanda": what `input_norms` returns. Stacked experts have none.
        seed: of "random"; the weights also depend on the name of their matrix.
        layers: layers whose weights are pruned.

    Raises:
        SettingError: a share outside 0 to 1, another score, norms without "wanda" or "wanda" without norms; norms of
            another model, or of other layers; otherwise as `EditWeights`.
    """

    share: Share
    score: Literal["magnitude", "wanda", "random"] = "magnitude"
    norms: InputNorms | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.score == "wanda") == (self.norms is not None),
            "score='wanda' and norms=sinklens.experiments.input_norms(runs) belong together.",
        )

    def edited(self, model: "Model", matrix: WeightMatrix) -> Float[Tensor, "*expert out inputs"]:
        scores = self._scores(matrix)
        lowest = scores.argsort(dim=-1, stable=True)[..., : round(self.share * scores.shape[-1])]
        return matrix.rows.scatter(-1, lowest, 0.0)

    def _scores(self, matrix: WeightMatrix) -> Float[Tensor, "*expert out inputs"]:
        if self.score == "random":
            digest = hashlib.sha256(f"{self.seed} {matrix.name}".encode()).digest()
            own = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % (MOST_SEED + 1))
            return torch.rand(matrix.rows.shape, generator=own).to(matrix.rows.device)
        size = matrix.rows.float().abs()
        return size if self.score == "magnitude" else size * self._norms_of(matrix).to(size)

    def _norms_of(self, matrix: WeightMatrix) -> Float[Tensor, " inputs"]:
        assert self.norms is not None
        found = self.norms.values.get(matrix.name)
        if found is None or len(found) != matrix.rows.shape[-1]:
            raise SettingError(
                f"norms has no inputs of {matrix.name} with its size: it is of another model or of other layers, the "
                f"calibration never reached the matrix, or it stacks experts. Restrict layers=, or pass "
                f"score='magnitude'."
            )
        return found
