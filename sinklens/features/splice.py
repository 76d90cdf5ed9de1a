"""Splice an SAE into a run: reconstruct an activation from its features, and ablate or clamp some of them.

With f = encode(x) and f' the features after ablation and clamping, the new activation is

    decode(f')                          without the error term, or
    x + decode(f') − decode(f)          with it, where only the chosen features change.

Without changed features the second is x itself. Without the error term, what the autoencoder misses is lost too, so
compare an ablation with a splice that changes no feature. A transcoder reads x at one point and replaces the activation
y at another, by decode(f', x), or with the error term by y + decode(f', x) − decode(f, x).

Limitation: the effect of an ablated feature contains that of everything its direction also carries; compare it with
other features of the same firing rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.features.autoencoder import SAE
from sinklens.features.places import InScope, PointPlaces, Scope, states_of, stream_point
from sinklens.hooks.points import Point
from sinklens.interventions.places import AtPositions
from sinklens.interventions.rules import Rule
from sinklens.runs.intervention import Pairs, RunContext, whole_numbers

if TYPE_CHECKING:
    from sinklens.model import Model

ChosenFeatures = Sequence[int] | Mapping[int, float]


@dataclass(frozen=True)
class SpliceSAE(AtPositions):
    """Replace the activation at a point by what an SAE makes of it, or a transcoder of that at another point.

        SpliceSAE(sae, "blocks.2.hook_resid_post")                                       # the reconstruction
        SpliceSAE(sae, "blocks.2.hook_resid_post", features=[12, 40], error=True)        # ablate two features
        SpliceSAE(sae, "blocks.2.hook_resid_post", features={12: 5.0}, scope="masked")   # clamp one
        SpliceSAE(transcoder, "blocks.2.ln2.hook_normalized", to="blocks.2.hook_mlp_out")

    Attributes:
        sae: any object with ``encode`` and ``decode``; with `to`, a `Transcoder`.
        point: a point with a vector at each position; heads are flattened.
        features: features to set to zero, or a mapping from features to the values that they are set to. None changes
            none.
        error: whether to add the error term x − decode(encode(x)).
        scope: the states of the positions that are changed: "all", or one or several of "prompt", "masked",
            "committed" and "decided" (see sinklens.features.places).
        to: the point whose activation a transcoder replaces, later in the pass than `point`; None is `point`.
        where, positions, steps: further restrictions, as in every intervention at positions.

    Raises:
        SettingError: `sae` lacks a method; nothing would change; an unknown scope; and in the run, a feature that does
            not exist, activations of another size, or a point `to` that is computed before `point`.
    """

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("layers", "heads")
    indexed: ClassVar[tuple[str, ...]] = ("features",)

    sae: Any
    point: str
    _: KW_ONLY
    features: ChosenFeatures | None = None
    error: bool = False
    scope: Scope = "all"
    to: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sae, SAE):
            raise SettingError(
                f"sae must have the methods encode and decode; {type(self.sae).__name__} lacks one. For a folder in "
                f"SAELens's format use features.load_sae(folder)."
            )
        states_of(self.scope)
        if self.error and self.features is None:
            raise SettingError(
                "error=True without features= changes nothing; name the features to change, or pass error=False for "
                "the reconstruction."
            )
        if self.features is not None:
            listed = whole_numbers("feature", list(self.features))
            if min(listed) < 0:
                raise SettingError(f"features are numbers from 0; got {min(listed)}.")

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=`` and ``where=``."""
        return InScope.within(self.scope, super().rule)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        pair = PointPair(model, self.point, self.to)
        places = PointPlaces(self, model, run, pair.write)

        def splice(value: Tensor, hook: Point) -> Tensor | None:
            chosen = places.selected(hook, value)
            x = pair.taken(value)
            if chosen is None or not bool(chosen.any()):
                return None
            y = value[chosen]
            changed = value.clone()
            changed[chosen] = (
                self.changed(x[chosen].flatten(1).float(), y.flatten(1).float()).to(value.dtype).view_as(y)
            )
            return changed

        return places.around([*pair.hooks(), (pair.write, splice)])

    def changed(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The new activations [place, d_out] of activations [place, d_in] that were read.

        Args:
            x: what is read.
            y: what is replaced; None is `x`.
        """
        y, features = x if y is None else y, self.sae.encode(x)
        if self.features is None:
            return _fitting(self._decode(features, x), y)
        kept = _fitting(self._decode(features, x), y) if self.error else None
        new = _fitting(self._decode(self._set(features), x), y)
        return new if kept is None else y + (new - kept)

    def _decode(self, features: Tensor, x: Tensor) -> Tensor:
        return decoded(self.sae, features, None if self.to is None else x)

    def _set(self, features: Tensor) -> Tensor:
        """`features` with the chosen ones set."""
        assert self.features is not None
        numbers = whole_numbers("feature", list(self.features))
        if max(numbers) >= features.shape[-1]:
            raise SettingError(
                f"feature {max(numbers)} does not exist; the SAE has {features.shape[-1]}, 0 to "
                f"{features.shape[-1] - 1}."
            )
        values = [self.features[number] for number in numbers] if isinstance(self.features, Mapping) else 0.0
        features = features.clone()
        features[..., numbers] = torch.as_tensor(values, dtype=features.dtype, device=features.device)
        return features


def decoded(sae: Any, features: Tensor, x: Tensor | None) -> Tensor:
    """What an SAE makes of `features`, or a transcoder of those of `x`; None for an SAE."""
    found: Tensor = sae.decode(features) if x is None else sae.decode(features, x)
    return found


class PointPair:
    """Where an SAE reads and where it writes in a pass; for a transcoder, what it read waits for the other point.

    Attributes:
        read, write: canonical names of the points.
    """

    def __init__(self, model: "Model", point: str, to: str | None) -> None:
        self.read = stream_point(model, point)
        self.write = self.read if to is None else stream_point(model, to)
        self._kept: Tensor | None = None

    def hooks(self) -> Pairs:
        """Hooks that keep what is read; none if both points are the same."""

        def keep(value: Tensor, hook: Point) -> None:
            self._kept = value

        return [] if self.read == self.write else [(self.read, keep)]

    def taken(self, value: Tensor) -> Tensor:
        """What was read in this pass, where `value` is the activation at the other point.

        Raises:
            SettingError: nothing was read yet.
        """
        if self.read == self.write:
            return value
        kept, self._kept = self._kept, None
        if kept is None:
            raise SettingError(f"{self.write} is computed before {self.read}; a transcoder writes after it reads.")
        return kept


def _fitting(new: Tensor, x: Tensor) -> Tensor:
    if new.shape != x.shape:
        raise SettingError(
            f"the SAE returned activations of size {new.shape[-1]}, but the point has {x.shape[-1]}; use an SAE that "
            f"was trained at this point of this model."
        )
    return new.to(x)
