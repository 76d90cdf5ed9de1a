"""The noise of each family, by `Family.bound`."""

from collections.abc import Callable
from typing import Any

from sinklens.errors import SettingError
from sinklens.experiments.nll.absorbing import Absorbing, ScoreEntropy
from sinklens.experiments.nll.noise import KEPT, MaskNoise, Noise
from sinklens.experiments.nll.random_tokens import MixedNoise, UniformNoise
from sinklens.model import Model


def _masks(model: Model) -> Noise:
    return MaskNoise(_mask_id(model))


def _subs(model: Model) -> Noise:
    kept = KEPT if model.checkpoint.blocks is None else 0.0
    return Absorbing(_mask_id(model), _config(model).time_conditioning, kept=kept)


def _score_entropy(model: Model) -> Noise:
    return ScoreEntropy(_mask_id(model), True, scaled=_config(model).scale_by_sigma)


def _uniform(model: Model) -> Noise:
    return UniformNoise(_mask_id(model), True, size=model.cfg.d_vocab)


def _mixture(model: Model) -> Noise:
    config, interval = _config(model), (_config(model).t_eps, 1 - _config(model).t_eps)
    return MixedNoise(_mask_id(model), True, interval, size=model.cfg.d_vocab, p_uniform=config.p_uniform)


NOISES: dict[str, Callable[[Model], Noise]] = {
    "masks": _masks,
    "subs": _subs,
    "score entropy": _score_entropy,
    "uniform": _uniform,
    "mixture": _mixture,
}
"""The values of `Family.bound`."""


def noise_of(model: Model) -> Noise:
    """The noise of the model's family.

    Raises:
        SettingError: its family has no published bound.
    """
    bound = model.family_record.bound
    if bound not in NOISES:
        raise SettingError(
            f"{model.family} models have no likelihood here: their canvas holds random tokens instead of masks, each "
            f"pass depends on the logits of the one before, and neither a noise schedule nor a bound has been "
            f"published. Compare answers with sinklens evaluate."
        )
    return NOISES[bound](model)


def _mask_id(model: Model) -> int:
    return -1 if model.mask_token_id is None else model.mask_token_id


def _config(model: Model) -> Any:
    return model.tree.hf.config
