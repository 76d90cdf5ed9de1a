"""The loss that an SAE recovers, by the share of the answer that is still masked.

The measure is that of assessing.py, separately for each bucket of the masked share at which a step works: an SAE can be
good on nearly finished texts and bad on empty ones, and a mean over all steps hides it.

Caveat: near a masked share of 1 there is little text to predict from. Where `loss_mean` − `loss` is small, `recovered`
is a ratio of small numbers; look at the losses.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from sinklens.errors import SettingError
from sinklens.experiments.lens import masked_share
from sinklens.features.assessing import Mean, Moments, token_losses
from sinklens.features.autoencoder import SAE, Transcoder
from sinklens.features.places import Scope, states_of
from sinklens.features.splice import SpliceSAE
from sinklens.interventions import MaskedLogits
from sinklens.runs import generate

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

LOSSES = ("loss", "loss_spliced", "loss_mean")


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
    """Losses with and without `sae` at `point`, by masked share, on runs of `prompts` in one batch.

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
