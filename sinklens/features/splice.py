"""Splice an SAE into a run: reconstruct an activation from its features, and ablate or clamp some of them.

With f = encode(x) and f' the features after ablation and clamping, the new activation is

    decode(f')                          without the error term, or
    x + decode(f') − decode(f)          with it, where only the chosen features change.

Without changed features the second is x itself. Without the error term, what the autoencoder misses is lost too, so
compare an ablation with a splice that changes no feature.

Limitation: the effect of an ablated feature includes that of whatever else its direction carries; compare it with
other features of the same firing rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklens.errors import require
from sinklens.features.autoencoder import SAE
from sinklens.features.places import InScope, Scope, selected, states_of, stream_point
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions, Places
from sinklens.interventions.rules import Rule
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, RunContext, whole_numbers


@dataclass(frozen=True)
class SpliceSAE(AtPositions):
    """Replace the activation at a point by what an SAE makes of it.

        SpliceSAE(sae, "blocks.2.hook_resid_post")                                       # the reconstruction
        SpliceSAE(sae, "blocks.2.hook_resid_post", features=[12, 40], error=True)        # ablate two features
        SpliceSAE(sae, "blocks.2.hook_resid_post", features={12: 5.0}, scope="masked")   # clamp one

    Attributes:
        sae: any object with ``encode`` and ``decode``.
        point: a point with a vector at each position; heads are flattened.
        features: features to set to zero, or a mapping from features to the values that they are set to. None changes
            none.
        error: whether to add the error term x − decode(encode(x)).
        scope: the states of the positions that are changed: "all", or one or several of "prompt", "masked",
            "committed" and "decided" (see sinklens.features.places).
        where, positions, steps: further restrictions, as in every intervention at positions.

    Raises:
        SettingError: `sae` lacks a method, nothing would change, or the scope is unknown; in the run, a feature does
            not exist, or the activations have another size.
    """

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")
    indexed: ClassVar[tuple[str, ...]] = ("features",)

    sae: Any
    point: str
    _: KW_ONLY
    features: Sequence[int] | Mapping[int, float] | None = None
    error: bool = False
    scope: Scope = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            isinstance(self.sae, SAE),
            f"sae must have the methods encode and decode; {type(self.sae).__name__} lacks one. For a folder in "
            f"SAELens's format use features.load_sae(folder).",
        )
        states_of(self.scope)
        require(
            not self.error or self.features is not None,
            "error=True without features= changes nothing; name the features to change, or pass error=False for "
            "the reconstruction.",
        )
        if self.features is not None:
            listed = whole_numbers("feature", list(self.features))
            require(min(listed) >= 0, f"features are numbers from 0; got {min(listed)}.")

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=`` and ``where=``."""
        return InScope.within(self.scope, super().rule)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        point = stream_point(model, self.point)
        places = Places(self, model, run, [point])

        def splice(value: Tensor, hook: Point) -> Tensor | None:
            chosen = selected(places, hook, value)
            if chosen is None or not bool(chosen.any()):
                return None
            x, changed = value[chosen], value.clone()
            changed[chosen] = self.changed(x.flatten(1).float()).to(value.dtype).view_as(x)
            return changed

        return places.around([(point, splice)])

    def changed(self, x: Tensor) -> Tensor:
        """The activations [place, d_in] with the features changed."""
        features = self.sae.encode(x)
        if self.features is None:
            return _fitting(self.sae.decode(features), x)
        new = _fitting(self.sae.decode(self._set(features)), x)
        return x + (new - _fitting(self.sae.decode(features), x)) if self.error else new

    def _set(self, features: Tensor) -> Tensor:
        """`features` with the chosen ones set."""
        assert self.features is not None
        numbers = whole_numbers("feature", list(self.features))
        require(
            max(numbers) < features.shape[-1],
            f"feature {max(numbers)} does not exist; the SAE has {features.shape[-1]}, 0 to {features.shape[-1] - 1}.",
        )
        values = [self.features[number] for number in numbers] if isinstance(self.features, Mapping) else 0.0
        features = features.clone()
        features[..., numbers] = torch.as_tensor(values, dtype=features.dtype, device=features.device)
        return features


def _fitting(new: Tensor, x: Tensor) -> Tensor:
    require(
        new.shape == x.shape,
        f"the SAE returned activations of size {new.shape[-1]}, but the point has {x.shape[-1]}; use an SAE that "
        f"was trained at this point of this model.",
    )
    return new.to(x)
