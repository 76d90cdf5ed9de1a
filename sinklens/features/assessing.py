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
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from sinklens.errors import require
from sinklens.features.autoencoder import SAE
from sinklens.features.places import Scope, ScopeReader, stream_point
from sinklens.features.splice import SpliceSAE
from sinklens.interventions import MaskedLogits
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.result import Generation
from sinklens.utils.arguments import Seed, as_tuple, checked

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


@checked
def assess(
    model: "Model",
    sae: SAE,
    point: str,
    prompts: str | Sequence[Any],
    scopes: Scope | Sequence[Scope] = ("masked", "decided"),
    *,
    seed: Seed = 0,
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
    require(
        model.mask_token_id is not None, f"assess compares losses at undecided positions, and {model.name} has none."
    )
    given = {"seed": seed, "chat_template": chat_template, "record_sinks": False, "progress": False, **settings}
    scopes, point, logits = as_tuple(scopes), stream_point(model, point), MaskedLogits()
    fits = [Fit(sae) for _ in scopes]
    read = [
        ScopeReader(point, lambda hook, places, x, fit=fit: fit.add(x), scope=scope)  # type: ignore[misc]
        for fit, scope in zip(fits, scopes, strict=True)
    ]
    prompts = list(as_tuple(prompts))
    base = generate(model, prompts, hooks=[*read, logits], **given)
    loss, rows = token_losses(base, logits), []
    for fit, scope in zip(fits, scopes, strict=True):
        row = dict.fromkeys(MEASURES, float("nan")) | {"loss": loss, "places": fit.count}
        if fit.count:
            row |= fit.measures()
            mean, spliced = (SpliceSAE(one, point, scope=scope) for one in (Mean(fit.mean.float()), sae))
            for name, hook in (("loss_spliced", spliced), ("loss_mean", mean)):
                generate(model, prompts, hooks=[hook, logits], replay=base, **given)
                row[name] = token_losses(base, logits)
        rows.append(row)
    names = [scope if isinstance(scope, str) else "+".join(scope) for scope in scopes]
    data = xr.Dataset({name: ("scope", [row[name] for row in rows]) for name in MEASURES}, {"scope": names})
    return data.assign(recovered=(data["loss_mean"] - data["loss_spliced"]) / (data["loss_mean"] - data["loss"]))


def token_losses(base: "Generation", logits: MaskedLogits) -> float:
    """Mean cross-entropy of the final tokens of `base` at the undecided positions of all steps, in nats."""
    final = [base.tokens[base.undecided[:, step] & base.real] for step in range(base.steps_run)]
    parts = [
        torch.nn.functional.cross_entropy(logits.kept[step], tokens, reduction="none")
        for step, tokens in enumerate(final)
    ]
    return float(torch.cat(parts).mean())


class Fit:
    """How well an SAE reconstructs, from sums over the activations that were added.

    Attributes:
        count: number of activations.
    """

    def __init__(self, sae: SAE) -> None:
        self.sae, self.count, self._missed, self._squares = sae, 0, 0.0, 0.0
        self._total: Any = 0.0
        self._fired: Any = 0

    def add(self, x: Tensor) -> None:
        """Add activations [place, d]."""
        if not len(x):
            return
        features = self.sae.encode(x)
        self.count += len(x)
        self._missed += float((x - self.sae.decode(features)).double().pow(2).sum())
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
