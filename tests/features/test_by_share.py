"""Losses by masked share against a loop over positions; a perfect SAE recovers everything, the mean nothing."""

import numpy as np
import pytest
import torch
from planted_saes import Perfect, random_sae
from watching import PADDED

import sinklens
from sinklens.errors import SettingError
from sinklens.features import SpliceSAE, assess_by_share

POINT = "blocks.1.hook_resid_post"
SETTINGS = {"gen_length": 8, "steps": 8}


def by_hand(model, hooks, base):
    """The loss of each undecided position, by row, step and share, from the logits of each step."""
    seen = {}
    keep = ("denoise.hook_logits", lambda value, hook: seen.update({hook.step: value.clone()}))
    sinklens.generate(model, PADDED, hooks=[*hooks, keep], replay=base, record_sinks=False, **SETTINGS)
    found = {1: [], 2: []}
    for step in range(base.steps_run):
        for row in range(2):
            columns = base.undecided[row, step].nonzero()[:, 0].tolist()
            half = 2 if len(columns) > 4 else 1
            for column in columns:
                logs = seen[step][row, column].log_softmax(dim=-1)
                found[half].append(-float(logs[base.tokens[row, column]]))
    return {half: np.mean(values) for half, values in found.items()}


@pytest.mark.usefixtures("unchecked")
def test_losses_are_means_over_the_positions_of_steps_with_this_share(worded):
    model, sae = worded(), random_sae()
    found = assess_by_share(model, sae, POINT, PADDED, buckets=2, **SETTINGS)
    base = sinklens.generate(model, PADDED, record_sinks=False, **SETTINGS)
    for name, hooks in (("loss", []), ("loss_spliced", [SpliceSAE(sae, POINT)])):
        wanted = by_hand(model, hooks, base)
        np.testing.assert_allclose(found[name], [wanted[1], wanted[2]], rtol=1e-4)
    assert found["places"].values.tolist() == [2 * (1 + 2 + 3 + 4), 2 * (5 + 6 + 7 + 8)]
    recovered = (found["loss_mean"] - found["loss_spliced"]) / (found["loss_mean"] - found["loss"])
    np.testing.assert_allclose(found["recovered"], recovered)


def test_a_perfect_sae_recovers_all_of_the_loss_and_one_of_means_none(worded):
    class Constant:
        """Replaces everything by zero."""

        def encode(self, x):
            return x.new_zeros(len(x), 1)

        def decode(self, features):
            return features.new_zeros(len(features), 24)

    found = assess_by_share(worded(), Perfect(), POINT, PADDED, buckets=2, scope="masked", **SETTINGS)
    np.testing.assert_allclose(found["recovered"], 1.0, atol=1e-4)
    bad = assess_by_share(worded(), Constant(), POINT, PADDED, buckets=2, scope="masked", **SETTINGS)
    assert (bad["recovered"] < 0.99).all()
    assert torch.isfinite(torch.tensor(bad["loss_spliced"].values)).all()


def test_shares_without_steps_are_nan_and_wrong_models_refused(worded):
    found = assess_by_share(worded(), Perfect(), POINT, ["w5"], buckets=4, gen_length=2, steps=2)
    assert np.isnan(found["loss"].values).tolist() == [True, False, True, False]
    with pytest.raises(SettingError, match="needs a model with a mask token"):
        assess_by_share(worded("llama", True), Perfect(), POINT, ["w5"])
