"""How good an SAE is where it is used: explained variance, dead features and recovered loss, by state.

The loss of a step is the cross-entropy, at the undecided positions, of the tokens that the run finally has; all runs
are on the canvases of the unchanged run. With the SAE spliced in at the positions of one state,

    recovered = (loss_mean − loss_spliced) / (loss_mean − loss),

where loss_mean replaces the same activations by their mean: 1 if the splice costs nothing, 0 if it is as bad as the
mean. The mean is a stricter reference than zero, which a stream never is.

Caveat: where replacing the activations by their mean hardly costs anything, `recovered` is a ratio of small numbers;
look at the losses.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import xarray as xr
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.features.autoencoder import SAE
from sinklens.features.places import InScope, PointPlaces, Scope, states_of, stream_point
from sinklens.features.splice import SpliceSAE
from sinklens.hooks.points import Point
from sinklens.interventions import MaskedLogits
from sinklens.interventions.rules import Rule
from sinklens.runs import generate
from sinklens.runs.intervention import Pairs, Reader, RunContext

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

MEASURES = ("explained_variance", "dead", "firing", "loss", "loss_spliced", "loss_mean", "places")


@dataclass(frozen=True)
class Mean:
    """An SAE without features, which returns the same activation everywhere."""

    value: Tensor

    def encode(self, x: Tensor) -> Tensor:
        """[place, 1] zeros."""
        return x.new_zeros(len(x), 1)

    def decode(self, features: Tensor) -> Tensor:
        """The mean at every place."""
        return self.value.to(features).expand(len(features), -1)


def assess(
    model: "Model",
    sae: SAE,
    point: str,
    prompts: Sequence[Any],
    scopes: Sequence[Scope] = ("masked", "decided"),
    *,
    seed: int = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> xr.Dataset:
    """Assess `sae` at `point`, on runs of `prompts` in one batch; give prompts that it was not trained on.

    Args:
        model: a diffusion model.
        sae: any SAE.
        point: where it belongs.
        prompts: texts, or rows of token ids.
        scopes: the states, or groups of states, that are assessed separately.
        seed, chat_template, **settings: as in `sinklens.generate`.

    Returns:
        A Dataset over ``scope`` with ``explained_variance``; ``dead``, the share of features that never fire;
        ``firing``, the mean number that fires; ``loss``, ``loss_spliced``, ``loss_mean`` in nats and ``recovered`` (see
        the module); and ``places``, how many activations there were. NaN where there are none.

    Raises:
        SettingError: an autoregressive model, which has no undecided positions.
    """
    if model.mask_token_id is None:
        raise SettingError(f"assess compares losses at undecided positions, and {model.name} has none.")
    given = {"seed": seed, "chat_template": chat_template, "record_sinks": False, "progress": False, **settings}
    seen, logits = [Moments(sae, point, scope=states_of(scope)) for scope in scopes], MaskedLogits()
    base = generate(model, list(prompts), hooks=[*seen, logits], **given)
    loss, rows = token_losses(base, logits), []
    for moments in seen:
        row = dict.fromkeys(MEASURES, float("nan")) | {"loss": loss, "places": moments.fit.count}
        if moments.fit.count:
            row |= moments.fit.measures()
            mean = SpliceSAE(Mean(moments.fit.mean.float()), point, scope=moments.scope)
            spliced = SpliceSAE(sae, point, scope=moments.scope)
            for name, hook in (("loss_spliced", spliced), ("loss_mean", mean)):
                generate(model, list(prompts), hooks=[hook, logits], replay=base, **given)
                row[name] = token_losses(base, logits)
        rows.append(row)
    names = [scope if isinstance(scope, str) else "+".join(scope) for scope in scopes]
    data = xr.Dataset({name: ("scope", [row[name] for row in rows]) for name in MEASURES}, {"scope": names})
    return data.assign(recovered=(data["loss_mean"] - data["loss_spliced"]) / (data["loss_mean"] - data["loss"]))


def token_losses(base: "Generation", logits: MaskedLogits) -> float:
    """Mean cross-entropy of the final tokens of `base` at the undecided positions of all steps, in nats."""
    parts = []
    for step in range(base.steps_run):
        final = base.tokens[base.undecided[:, step] & base.real]
        parts.append(torch.nn.functional.cross_entropy(logits.kept[step], final, reduction="none"))
    return float(torch.cat(parts).mean())


class Fit:
    """How well an autoencoder reconstructs, from sums over the activations that were added.

    Attributes:
        count: number of activations.
    """

    def __init__(self) -> None:
        self.count, self._missed, self._squares = 0, 0.0, 0.0
        self._total: Any = 0.0
        self._fired: Any = 0

    def add(self, x: Tensor, made: Tensor, features: Tensor) -> None:
        """Add activations [place, d], what the autoencoder makes of them, and the features that it has there."""
        self.count += len(x)
        self._missed += float((x - made).double().pow(2).sum())
        self._squares += float(x.double().pow(2).sum())
        self._total = self._total + x.double().sum(dim=0).cpu()
        self._fired = self._fired + (features > 0).sum(dim=0).cpu()

    @property
    def mean(self) -> Tensor:
        """Mean activation."""
        return self._total / self.count

    def measures(self) -> dict[str, float]:
        """Those of `MEASURES` that need no further run."""
        variance = self._squares - self.count * float(self.mean.pow(2).sum())
        return {
            "explained_variance": 1 - self._missed / variance,
            "dead": float((self._fired == 0).float().mean()),
            "firing": float(self._fired.sum()) / self.count,
        }


@dataclass(eq=False)
class Moments(Reader):
    """Reads how well an SAE reconstructs the places of a run.

    Attributes:
        fit: that of the last run.
    """

    sae: Any
    point: str
    _: KW_ONLY
    scope: Scope = "all"
    fit: Fit = field(default_factory=Fit, init=False)

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=``."""
        return InScope.within(self.scope)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        point = stream_point(model, self.point)
        places, self.fit = PointPlaces(self, model, run, point), Fit()

        def add(value: Tensor, hook: Point) -> None:
            chosen = places.selected(hook, value)
            if chosen is not None and bool(chosen.any()):
                x = value[chosen].flatten(1).float()
                features = self.sae.encode(x)
                self.fit.add(x, self.sae.decode(features), features)

        return places.around([(point, add)])
