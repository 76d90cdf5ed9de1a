"""Sparse autoencoders: what one must offer, and the kinds that can be read from files.

An *SAE* is any object with ``encode``, from activations to features, and ``decode`` back. `SparseAutoencoder` computes

    pre = (x − b_dec) W_enc + b_enc,    f = activation(pre),    x̂ = f W_dec + b_dec

with one of three activations: ReLU ("standard"), the ReLU of the k largest ("topk"; Gao et al., 2406.04093), or the
ReLU where pre exceeds a threshold per feature ("jumprelu"; Rajamanoharan et al., 2407.14435). A *feature* is a column
of W_enc with its row of W_dec; it *fires* where f > 0. BatchTopK (Bussmann et al., 2412.06410) chooses features over a
batch while it is trained; afterward it is a JumpReLU with one threshold for all features.

Caveat: an SAE describes the distribution that it was trained on. One trained on decided tokens reconstructs the streams
of masked positions poorly, and its features there mean little.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError, require

SAEArchitecture = Literal["standard", "topk", "jumprelu"]


@runtime_checkable
class SAE(Protocol):
    """Any sparse autoencoder; `SparseAutoencoder` is one, and so are those of SAELens."""

    def encode(self, x: Tensor) -> Tensor:
        """Features [place, feature] of activations [place, d_in]."""

    def decode(self, features: Tensor) -> Tensor:
        """Activations [place, d_in] of features [place, feature]."""


@dataclass(frozen=True, eq=False)
class SparseAutoencoder:
    """A sparse autoencoder in memory; see the module for the formula.

    Attributes:
        W_enc, b_enc, W_dec, b_dec: encoder and decoder.
        architecture: "standard", "topk" or "jumprelu".
        k: for "topk", the number of features that may fire at a place.
        threshold: for "jumprelu", what pre has to exceed.
        subtract_b_dec: whether b_dec is subtracted before encoding (SAELens's ``apply_b_dec_to_input``).
        rescale: for "topk", multiply pre by the norms of W_dec's rows before the activation, and divide by them before
            decoding (SAELens's ``rescale_acts_by_decoder_norm``).
        point: the hook point of the activations; "" if the files do not say.
        model: name of the model; "" if the files do not say.

    Raises:
        SettingError: weights of shapes that do not fit, an activation without its `k` or `threshold`, or `rescale` with
            another than "topk".
    """

    W_enc: Float[Tensor, "d_in d_sae"]
    b_enc: Float[Tensor, " d_sae"]
    W_dec: Float[Tensor, "d_sae d_in"]
    b_dec: Float[Tensor, " d_in"]
    architecture: SAEArchitecture = "topk"
    k: int | None = None
    threshold: Float[Tensor, " d_sae"] | None = None
    subtract_b_dec: bool = True
    rescale: bool = False
    point: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        d_in, d_sae = self.W_enc.shape
        shapes = [tuple(value.shape) for value in (self.b_enc, self.W_dec, self.b_dec)]
        require(
            shapes == [(d_sae,), (d_sae, d_in), (d_in,)],
            f"W_enc of shape {[d_in, d_sae]} needs b_enc {[d_sae]}, W_dec {[d_sae, d_in]} and b_dec {[d_in]}; "
            f"got {', '.join(str(list(shape)) for shape in shapes)}.",
        )
        require(
            self.architecture in ("standard", "topk", "jumprelu"),
            f"architecture must be 'standard', 'topk' or 'jumprelu'; got {self.architecture!r}.",
        )
        require(
            self.architecture != "topk" or (self.k and 1 <= self.k <= d_sae),
            f"architecture 'topk' needs k between 1 and {d_sae}, the number of features; got {self.k}.",
        )
        if self.architecture == "jumprelu" and (self.threshold is None or self.threshold.shape != (d_sae,)):
            given = None if self.threshold is None else list(self.threshold.shape)
            raise SettingError(f"architecture 'jumprelu' needs a threshold of shape {[d_sae]}; got {given}.")
        require(
            not self.rescale or self.architecture == "topk",
            f"rescale belongs to architecture 'topk'; got it with {self.architecture!r}.",
        )

    @property
    def d_in(self) -> int:
        """Size of an activation."""
        return self.W_enc.shape[0]

    @property
    def d_sae(self) -> int:
        """Number of features."""
        return self.W_enc.shape[1]

    def to(self, device: str | torch.device) -> "SparseAutoencoder":
        """A copy on `device`."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in tensors.items()}
        return replace(self, **moved)

    def before_activation(self, x: Float[Tensor, "*place d_in"]) -> Float[Tensor, "*place d_sae"]:
        """pre of the formula."""
        x = x.to(self.W_enc) - self.b_dec if self.subtract_b_dec else x.to(self.W_enc)
        pre = x @ self.W_enc + self.b_enc
        return pre * self.W_dec.norm(dim=-1) if self.rescale else pre

    def encode(self, x: Float[Tensor, "*place d_in"]) -> Float[Tensor, "*place d_sae"]:
        """Features of activations."""
        pre = self.before_activation(x)
        if self.architecture == "topk":
            assert self.k is not None
            top = pre.topk(self.k, dim=-1)
            return torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())
        if self.architecture == "jumprelu":
            assert self.threshold is not None
            return pre.relu() * (pre > self.threshold)
        return pre.relu()

    def decode(self, features: Float[Tensor, "*place d_sae"]) -> Float[Tensor, "*place d_in"]:
        """Activations of features."""
        if self.rescale:
            features = features / self.W_dec.norm(dim=-1)
        return features @ self.W_dec + self.b_dec
