"""The tuned lens: one affine map per layer, for each bucket of the masked share.

The logit lens reads an early stream with the unembedding of the last layer. A tuned lens (Belrose et al., 2303.08112)
first moves it to where the last layer would be,

    h ↦ h + h A + b,

with A and b trained per layer so that the reading agrees with the model's own prediction. A diffusion model predicts
under very different amounts of text, so there is one pair (A, b) for each *bucket* of the masked share, the share of
the answer's positions that are undecided at the step. An autoregressive model has no such share, and one bucket. The
last layer's map is the identity.

Caveat: a tuned lens may compute what the model computes only later. It says what a stream lets one predict, not what
the model has concluded there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError
from sinklens.utils.atomic import atomic_write

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Affine maps of the streams that leave the layers, as `train_tuned_lens` makes them.

    Attributes:
        model: name of the model.
        maps: A.
        offsets: b.
    """

    model: str
    maps: Float[Tensor, "bucket layer d_model d_model"]
    offsets: Float[Tensor, "bucket layer d_model"]

    @property
    def buckets(self) -> int:
        """Number of buckets; bucket i holds masked shares above i / buckets, up to (i + 1) / buckets."""
        return self.maps.shape[0]

    def bucket(self, share: float) -> int:
        """The bucket of a masked share."""
        return min(max(int(np.ceil(share * self.buckets - 1e-9)) - 1, 0), self.buckets - 1)

    def translate(
        self, stream: Float[Tensor, "*place d_model"], layer: int, share: float
    ) -> Float[Tensor, "*place d_model"]:
        """The streams that leave `layer` at steps with masked share `share`, moved to the last layer's."""
        at = self.bucket(share)
        moved = stream.float() @ self.maps[at, layer].to(stream.device) + self.offsets[at, layer].to(stream.device)
        return (stream + moved).to(stream.dtype)

    def check(self, model: "Model") -> None:
        """Check that this lens fits `model`.

        Raises:
            SettingError: it has other layers or another stream.
        """
        sizes = [model.cfg.n_layers, model.cfg.d_model]
        if list(self.maps.shape[1:3]) != sizes:
            raise SettingError(
                f"the lens is of {self.model} with [layers, d_model] {list(self.maps.shape[1:3])}, and {model.name} "
                f"has {sizes}; train one with train_tuned_lens(model, prompts)."
            )

    def save(self, path: str | Path) -> None:
        """Write the lens as safetensors."""
        tensors = {"maps": self.maps.contiguous(), "offsets": self.offsets.contiguous()}
        with atomic_write(path) as part:
            save_file(tensors, part, {"model": self.model})

    @classmethod
    def load(cls, path: str | Path) -> "TunedLens":
        """Read what `save` wrote.

        Raises:
            CheckpointError: there is no such file, or it holds something else.
        """
        try:
            with safe_open(path, framework="pt") as opened:
                found = cls((opened.metadata() or {})["model"], opened.get_tensor("maps"), opened.get_tensor("offsets"))
        except (OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} holds no tuned lens: {error}. Pass a file that TunedLens.save wrote."
            ) from error
        return found


def masked_share(run: "Generation") -> Float[np.ndarray, "batch step"]:
    """Share of the answer's positions that are undecided at each step; those undecided at step 0 are the answer."""
    undecided = (run.undecided & run.real[:, None]).sum(dim=2).double().numpy()
    return undecided[:, :-1] / np.maximum(undecided[:, :1], 1)


class PredictedPlaces(NamedTuple):
    """Positions whose tokens one pass predicts.

    Attributes:
        step: the step of the pass.
        places: the positions, in columns of the canvas.
    """

    step: int
    places: Bool[Tensor, "batch pos"]


def predicted_places(run: "Generation") -> list[PredictedPlaces]:
    """The passes that show what a run predicts.

    Of a diffusion run these are all steps, with their undecided positions; of an autoregressive run the last step
    alone, whose pass over the text predicts every token of the answer.
    """
    if not run.causal:
        return [PredictedPlaces(step, run.undecided[:, step] & run.real) for step in range(run.steps_run)]
    places = torch.zeros_like(run.real)
    places[:, run.prompt_length : run.prompt_length + run.steps_run] = run.active[:, : run.steps_run]
    return [PredictedPlaces(run.steps_run - 1, places)]


def check_buckets(model: "Model", buckets: int) -> None:
    """Check that runs of `model` can be split by the masked share.

    Raises:
        SettingError: no mask token, except of an autoregressive model with one bucket.
    """
    if model.causal and buckets != 1:
        raise SettingError(f"{model.name} is autoregressive, so its passes have no masked share; pass buckets=1.")
    if model.mask_token_id is None and not model.causal:
        raise SettingError(f"lenses are split by the masked share, and {model.name} has no mask token.")
