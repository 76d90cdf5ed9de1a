"""A control for spliced SAEs: an error as long as the SAE's, in a random direction.

With r = decode(encode(x)) and u a random unit vector, drawn for each place,

    x ↦ x + |x − r| · u.

What the reconstruction changes and this does not is due to the direction of the SAE's error, not to its length.

Caveat: in d dimensions, a random direction has a share of 1/d of its square length along any given one, so it hardly
touches what the model reads. A direction of the activations' own covariance would be a stricter control.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.features.autoencoder import SAE


@dataclass(frozen=True, eq=False)
class RandomError:
    """An autoencoder that errs by as much as `sae`, at random.

        SpliceSAE(RandomError(sae), "blocks.2.hook_resid_post")

    Its features are the new activation itself, so they cannot be ablated one by one. Two of the same seed draw the same
    directions in the same order of calls.

    Attributes:
        sae: any SAE.
        seed: of the directions.
    """

    sae: SAE
    seed: int = 0
    draws: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draws", torch.Generator().manual_seed(self.seed))

    def encode(self, x: Float[Tensor, "place d_in"]) -> Float[Tensor, "place d_in"]:
        """The activations with the error."""
        length = (x - self.sae.decode(self.sae.encode(x))).norm(dim=-1, keepdim=True)
        drawn = torch.randn(x.shape, generator=self.draws).to(x)
        return x + length * torch.nn.functional.normalize(drawn, dim=-1)

    def decode(self, features: Float[Tensor, "place d_in"]) -> Float[Tensor, "place d_in"]:
        """The same."""
        return features
