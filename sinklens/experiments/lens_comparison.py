"""Which lens decodes the final token earlier?

At every undecided position of every step, or at every position of an autoregressive run's answer, a lens reads the
streams of all layers. It *decodes* the final token at layer l if that token is the most probable one there, and *from*
the first layer after which this no longer changes. The mean over positions and steps of a prompt, by bucket of the
masked share, is one number per prompt, so intervals are over prompts.

Caveat: the last layer's reading is the model's own prediction, which is often another token than the final one.
Positions where it is the final one are those of `decoded` at the last layer; `first` is n_layers where no layer
decodes the token for good.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr

from sinklens.errors import SettingError
from sinklens.experiments.lens import logit_lens
from sinklens.experiments.tuned_lens import TunedLens, check_buckets, masked_share, predicted_places
from sinklens.runs import generate

if TYPE_CHECKING:
    from sinklens.model import Model


def compare_lenses(
    model: "Model",
    prompts: Sequence[Any],
    lenses: Mapping[str, TunedLens | None],
    *,
    buckets: int = 4,
    seed: int = 0,
    **settings: Any,
) -> xr.Dataset:
    """Read runs of `prompts` with several lenses; give prompts that no lens was fitted on.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        lenses: name -> lens; None is the logit lens.
        buckets: equal parts of the masked share, of the result; 1 for an autoregressive model.
        seed, **settings: as in `sinklens.generate`.

    Returns:
        ``decoded`` [lens, prompt, bucket, layer], the share of undecided places whose final token is the most probable
        one; ``first`` [lens, prompt, bucket], the mean first layer from which it is; ``probability`` [lens, prompt,
        bucket, layer], its mean probability; NaN where a prompt has no such place.

    Raises:
        SettingError: no lens, buckets below 1, or several of an autoregressive model.
    """
    if not lenses or buckets < 1:
        raise SettingError("compare_lenses needs at least one lens and at least one bucket.")
    check_buckets(model, buckets)
    shape = (len(lenses), len(prompts), buckets)
    layers = model.cfg.n_layers
    decoded, probability = (np.full((*shape, layers), np.nan) for _ in range(2))
    first = np.full(shape, np.nan)
    for number, prompt in enumerate(prompts):
        run = generate(model, [prompt], seed=seed, record_sinks=False, progress=False, **settings)
        steps, places = zip(*((step, chosen[0, run.real[0]]) for step, chosen in predicted_places(run)), strict=True)
        share, predicted = masked_share(run)[0, list(steps)], torch.stack(places).cpu().numpy()
        bucket = np.clip(np.ceil(share * buckets - 1e-9).astype(int) - 1, 0, buckets - 1)
        for place, lens in enumerate(lenses.values()):
            data = logit_lens(model, run, steps=steps, top_k=1, lens=lens)
            top = (data["final_rank"] == 0).transpose("step", "pos", "layer").to_numpy()
            likely = data["final_probability"].transpose("step", "pos", "layer").to_numpy()
            for level in range(buckets):
                chosen = predicted & (bucket == level)[:, None]
                if chosen.any():
                    decoded[place, number, level] = top[chosen].mean(axis=0)
                    probability[place, number, level] = likely[chosen].mean(axis=0)
                    first[place, number, level] = first_layers(top[chosen]).mean()
    axes = ("lens", "prompt", "bucket")
    return xr.Dataset(
        {
            "decoded": ((*axes, "layer"), decoded),
            "first": (axes, first),
            "probability": ((*axes, "layer"), probability),
        },
        {"lens": list(lenses), "bucket": np.arange(1, buckets + 1) / buckets, "layer": range(layers)},
        {"model": model.name},
    )


def first_layers(top: np.ndarray) -> np.ndarray:
    """The first layer from which on `top` [place, layer] is True; the number of layers where the last one is not."""
    ever_after = np.flip(np.cumprod(np.flip(top, axis=1), axis=1), axis=1).astype(bool)
    return np.where(ever_after.any(axis=1), ever_after.argmax(axis=1), top.shape[1])
