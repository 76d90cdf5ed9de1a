"""How good an SAE or a transcoder is where it is used: explained variance, dead features and recovered loss, by state.

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

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.lens import masked_share
from sinklens.features.autoencoder import SAE, Transcoder
from sinklens.features.places import InScope, PointPlaces, Scope, states_of
from sinklens.features.splice import PointPair, SpliceSAE, decoded
from sinklens.hooks.points import Point
from sinklens.interventions import MaskedLogits
from sinklens.interventions.rules import Rule
from sinklens.runs import generate
from sinklens.runs.intervention import Pairs, Reader, RunContext

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

MEASURES = ("explained_variance", "dead", "firing", "loss", "loss_spliced", "loss_mean", "recovered", "places")
LOSSES = ("loss", "loss_spliced", "loss_mean")


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
    sae: SAE | Transcoder,
    point: str,
    prompts: Sequence[Any],
    scopes: Sequence[Scope] = ("masked", "decided"),
    *,
    to: str | None = None,
    seed: int = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> xr.Dataset:
    """Assess `sae` at `point`, on runs of `prompts` in one batch; give prompts that it was not trained on.

    Args:
        model: a diffusion model.
        sae: any SAE, or with `to` any transcoder.
        point: where it belongs.
        prompts: texts, or rows of token ids.
        scopes: the states, or groups of states, that are assessed separately.
        to: the point that a transcoder writes to, where all measures are taken; None is `point`.
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
    listed = [states_of(scope) for scope in scopes]
    seen = [Moments(sae, point, scope=states, to=to) for states in listed]
    shared = {"seed": seed, "chat_template": chat_template, "record_sinks": False, "progress": False, **settings}
    logits = MaskedLogits()
    base = generate(model, list(prompts), hooks=[*seen, logits], **shared)
    loss = float(token_losses(base, logits).mean())

    def under(splice: SpliceSAE) -> float:
        generate(model, list(prompts), hooks=[splice, logits], replay=base, **shared)
        return float(token_losses(base, logits).mean())

    rows = []
    for states, moments in zip(listed, seen, strict=True):
        row = dict.fromkeys(MEASURES, float("nan")) | {"loss": loss, "places": moments.count}
        if moments.count:
            row |= moments.measures()
            row["loss_spliced"] = under(SpliceSAE(sae, point, scope=states, to=to))
            row["loss_mean"] = under(SpliceSAE(Mean(moments.mean.float()), to or point, scope=states))
            row["recovered"] = (row["loss_mean"] - row["loss_spliced"]) / (row["loss_mean"] - loss)
        rows.append(row)
    names = [scope if isinstance(scope, str) else "+".join(scope) for scope in scopes]
    return xr.Dataset({name: ("scope", [row[name] for row in rows]) for name in MEASURES}, {"scope": names})


def assess_by_share(
    model: "Model",
    sae: SAE | Transcoder,
    point: str,
    prompts: Sequence[Any],
    *,
    to: str | None = None,
    buckets: int = 4,
    scope: Scope = "all",
    seed: int = 0,
    chat_template: bool | str = False,
    **settings: Any,
) -> xr.Dataset:
    """Losses with and without `sae` at `point`, by the masked share of the answer, on runs of `prompts` in one batch.

    An SAE can be good on nearly finished texts and bad on empty ones, which a mean over all steps hides. Near a masked
    share of 1 there is little text to predict from; where ``loss_mean`` − ``loss`` is small, look at the losses.

    Args:
        model: a diffusion model.
        sae: any SAE, or with `to` any transcoder.
        point: where it belongs.
        prompts: texts, or rows of token ids, that it was not trained on.
        to: the point that a transcoder writes to; None is `point`.
        buckets: number of equal parts of the masked share.
        scope: states of the positions at which the SAE is spliced in.
        seed, chat_template, **settings: as in `sinklens.generate`.

    Returns:
        ``loss``, ``loss_spliced``, ``loss_mean`` (nats), ``recovered`` and ``places`` [bucket]; the coordinate is the
        upper bound of the share. NaN where no step has such a share.

    Raises:
        SettingError: an autoregressive model, or buckets below 1.
    """
    if model.mask_token_id is None or buckets < 1:
        raise SettingError(f"assess_by_share needs a model with a mask token ({model.name}) and at least one bucket.")
    states = states_of(scope)
    moments, logits = Moments(sae, point, scope=states, to=to), MaskedLogits()
    shared = {"seed": seed, "chat_template": chat_template, "record_sinks": False, "progress": False, **settings}
    base = generate(model, list(prompts), hooks=[moments, logits], **shared)
    losses = [token_losses(base, logits).numpy()]
    mean = SpliceSAE(Mean(moments.mean.float()), to or point, scope=states)
    for splice in (SpliceSAE(sae, point, scope=states, to=to), mean):
        generate(model, list(prompts), hooks=[splice, logits], replay=base, **shared)
        losses.append(token_losses(base, logits).numpy())
    bucket = _buckets(base, buckets)
    found = {name: np.full(buckets, np.nan) for name in LOSSES}
    places = np.array([(bucket == number).sum() for number in range(buckets)])
    for number in np.flatnonzero(places):
        for name, values in zip(LOSSES, losses, strict=True):
            found[name][number] = values[bucket == number].mean()
    loss, spliced, of_mean = (found[name] for name in LOSSES)
    data = {**found, "recovered": (of_mean - spliced) / (of_mean - loss), "places": places}
    coords = {"bucket": np.arange(1, buckets + 1) / buckets}
    return xr.Dataset({name: ("bucket", value) for name, value in data.items()}, coords)


def _buckets(base: "Generation", buckets: int) -> np.ndarray:
    """The bucket of the step and row of every undecided position, in the order of `token_losses`."""
    share, parts = masked_share(base), []
    for step in range(base.steps_run):
        rows = (base.undecided[:, step] & base.real).nonzero()[:, 0].numpy()
        parts.append(np.clip(np.ceil(share[rows, step] * buckets - 1e-9).astype(int) - 1, 0, buckets - 1))
    return np.concatenate(parts)


def token_losses(base: "Generation", logits: MaskedLogits) -> Float[Tensor, " undecided"]:
    """Cross-entropy of the final tokens of `base` at every undecided position, step by step, row by row, in nats."""
    parts = []
    for step in range(base.steps_run):
        undecided = base.undecided[:, step] & base.real
        parts.append(torch.nn.functional.cross_entropy(logits.kept[step], base.tokens[undecided], reduction="none"))
    return torch.cat(parts)


@dataclass(eq=False)
class Moments(Reader):
    """Sums over the places of a run.

    Attributes:
        sums: those of the last run.
    """

    sae: Any
    point: str
    _: KW_ONLY
    scope: Scope = "all"
    to: str | None = None
    sums: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=``."""
        return InScope.within(self.scope)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        """See `HookSource.pairs`."""
        pair = PointPair(model, self.point, self.to)
        places = PointPlaces(self, model, run, pair.write)
        sums = self.sums = {"count": 0, "missed": 0.0, "squares": 0.0, "total": 0.0, "fired": 0}

        def add(value: Tensor, hook: Point) -> None:
            chosen, read = places.selected(hook, value), pair.taken(value)
            if chosen is None or not bool(chosen.any()):
                return
            x, y = read[chosen].flatten(1).float(), value[chosen].flatten(1).float()
            features = self.sae.encode(x)
            made = decoded(self.sae, features, None if self.to is None else x)
            sums["count"] += len(y)
            sums["missed"] += float((y - made).double().pow(2).sum())
            sums["squares"] += float(y.double().pow(2).sum())
            sums["total"] = sums["total"] + y.double().sum(dim=0).cpu()
            sums["fired"] = sums["fired"] + (features > 0).sum(dim=0).cpu()

        return places.around([*pair.hooks(), (pair.write, add)])

    @property
    def count(self) -> int:
        """Number of places."""
        return int(self.sums["count"])

    @property
    def mean(self) -> Tensor:
        """Mean activation."""
        return self.sums["total"] / self.count

    def measures(self) -> dict[str, float]:
        """Those of `MEASURES` that need no further run."""
        variance = self.sums["squares"] - self.count * float(self.mean.pow(2).sum())
        fired = self.sums["fired"]
        return {
            "explained_variance": 1 - self.sums["missed"] / variance,
            "dead": float((fired == 0).float().mean()),
            "firing": float(fired.sum()) / self.count,
        }
