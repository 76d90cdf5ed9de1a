"""How good an SAE or a transcoder is where it is used: explained variance, dead features and recovered loss, by state.

The loss of a step is the cross-entropy, at the undecided positions, of the tokens that the run finally has; all runs
are on the canvases of the unchanged run. With the SAE spliced in at the positions of one state,

    recovered = (loss_mean − loss_spliced) / (loss_mean − loss),

where loss_mean replaces the same activations by their mean: 1 if the splice costs nothing, 0 if it is as bad as the
mean. The mean is a stricter reference than zero, which a stream never is.

Caveat: where replacing the activations by their mean hardly costs anything, `recovered` is a ratio of small numbers;
look at the losses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
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
from sinklens.utils.arguments import Count, read_as

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

MEASURES = ("explained_variance", "dead", "firing", "loss", "loss_spliced", "loss_mean", "places")
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
    seen = [Moments(sae, point, scope=states_of(scope), to=to) for scope in scopes]
    runs = _Runs(model, prompts, seen, seed=seed, chat_template=chat_template, **settings)
    rows = []
    for moments in seen:
        row = dict.fromkeys(MEASURES, float("nan")) | {"loss": float(runs.losses.mean()), "places": moments.fit.count}
        if moments.fit.count:
            losses = {name: float(values.mean()) for name, values in runs.compared(moments).items()}
            row |= moments.fit.measures() | losses
        rows.append(row)
    names = [scope if isinstance(scope, str) else "+".join(scope) for scope in scopes]
    return _with_recovered({name: [row[name] for row in rows] for name in MEASURES}, "scope", names)


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
    read_as(Count, "buckets", buckets)
    moments = Moments(sae, point, scope=states_of(scope), to=to)
    runs = _Runs(model, prompts, [moments], seed=seed, chat_template=chat_template, **settings)
    bucket = _buckets(runs.base, buckets)
    places = np.bincount(bucket, minlength=buckets)
    sums = {name: np.bincount(bucket, values, buckets) for name, values in runs.compared(moments).items()}
    means = {name: total / np.where(places, places, np.nan) for name, total in sums.items()}
    return _with_recovered({**means, "places": places}, "bucket", np.arange(1, buckets + 1) / buckets)


class _Runs:
    """The unchanged run of some prompts, and runs of its canvases with an SAE spliced in.

    Attributes:
        base: the unchanged run, which `seen` read.
        losses: those of `token_losses`.

    Raises:
        SettingError: an autoregressive model.
    """

    def __init__(self, model: "Model", prompts: Sequence[Any], seen: Sequence["Moments"], **given: Any) -> None:
        if model.mask_token_id is None:
            raise SettingError(f"assess compares losses at undecided positions, and {model.name} has none.")
        self._run = partial(generate, model, list(prompts), **{"record_sinks": False, "progress": False, **given})
        self._logits = MaskedLogits()
        self.base = self._run(hooks=[*seen, self._logits])
        self.losses = token_losses(self.base, self._logits).numpy()

    def compared(self, moments: "Moments") -> dict[str, np.ndarray]:
        """The losses of the unchanged run, with the SAE, and with the mean in place of the activations."""
        scope, point = moments.scope, moments.point
        mean = SpliceSAE(Mean(moments.fit.mean.float()), moments.to or point, scope=scope)
        losses = [self.losses]
        for splice in (SpliceSAE(moments.sae, point, scope=scope, to=moments.to), mean):
            self._run(hooks=[splice, self._logits], replay=self.base)
            losses.append(token_losses(self.base, self._logits).numpy())
        return dict(zip(LOSSES, losses, strict=True))


def _with_recovered(columns: Mapping[str, Any], axis: str, names: Any) -> xr.Dataset:
    """The columns as a Dataset, with ``recovered``."""
    data = xr.Dataset({name: (axis, values) for name, values in columns.items()}, {axis: names})
    return data.assign(recovered=(data["loss_mean"] - data["loss_spliced"]) / (data["loss_mean"] - data["loss"]))


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


class Fit:
    """How well an autoencoder reconstructs, from sums over the activations that were added.

    Attributes:
        count: number of activations.
    """

    def __init__(self) -> None:
        self.count, self._missed, self._squares = 0, 0.0, 0.0
        self._total: Any = 0.0
        self._fired: Any = 0

    def add(self, y: Tensor, made: Tensor, features: Tensor) -> None:
        """Add activations [place, d], what the autoencoder makes of them, and the features that it has there."""
        self.count += len(y)
        self._missed += float((y - made).double().pow(2).sum())
        self._squares += float(y.double().pow(2).sum())
        self._total = self._total + y.double().sum(dim=0).cpu()
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
    to: str | None = None
    fit: Fit = field(default_factory=Fit, init=False)

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=``."""
        return InScope.within(self.scope)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        pair = PointPair(model, self.point, self.to)
        places, self.fit = PointPlaces(self, model, run, pair.write), Fit()

        def add(value: Tensor, hook: Point) -> None:
            chosen, read = places.selected(hook, value), pair.taken(value)
            if chosen is None or not bool(chosen.any()):
                return
            x, y = read[chosen].flatten(1).float(), value[chosen].flatten(1).float()
            features = self.sae.encode(x)
            self.fit.add(y, decoded(self.sae, features, None if self.to is None else x), features)

        return places.around([*pair.hooks(), (pair.write, add)])
